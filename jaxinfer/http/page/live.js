// Tells screen readers of an answer while it grows: whole sentences, and not more often than every few seconds.

import { $ } from "./dom.js";

const PAUSE = 4000; // milliseconds

export function say(text) {
  $("#live").textContent = text;
}

/** Returns a function that takes the text so far, and whether it is all. */
export function reader() {
  let told = 0;
  let last = performance.now();
  return (text, whole = false) => {
    const now = performance.now();
    if (!whole && now - last < PAUSE) return;
    const end = whole ? text.length : Math.max(text.lastIndexOf("\n"), text.lastIndexOf(". ")) + 1;
    if (end <= told) return;
    say(text.slice(told, end));
    [told, last] = [end, now];
  };
}
