// Shows an error where it happened, with what the user can do about it.

import { NetworkError } from "./api.js";
import { short } from "./charts.js";
import { button, h } from "./dom.js";

const SHORT = 50; // milliseconds: what comes within them came at once, and says nothing of the speed

/** An element for an error. again: what "Try again" does, if that may help; others: more buttons. */
export function errorBox(error, again, ...others) {
  const retry = again && button("Try again", "again", again);
  const wait = h("span", { class: "wait" });
  const box = h("div", { class: "error", role: "alert" }, h("p", {}, error.message), h("div", { class: "row" }, retry, others, wait));
  const until = performance.now() + 1000 * (error.retryAfter ?? 0);
  const count = () => {
    const left = Math.ceil((until - performance.now()) / 1000);
    wait.textContent = left > 0 ? `The server says to try again in ${left} s.` : "";
    if (left > 0 && (box.isConnected || left === Math.ceil(error.retryAfter))) setTimeout(count, 250);
  };
  if (error.retryAfter) count();
  if (error instanceof NetworkError) box.classList.add("offline");
  return box;
}

/** The tokens of an answer and its speed, from the server's usage and the times of its events in milliseconds. */
export function speed(usage, asked, first, last) {
  if (!usage) return "";
  const { prompt_tokens: prompt, completion_tokens: count, prompt_tokens_details: details } = usage;
  const cached = details?.cached_tokens ? ` (${details.cached_tokens} cached)` : "";
  const parts = [`${count} token${count === 1 ? "" : "s"}`];
  if (count > 1 && last - first > SHORT) parts.push(`${short((1000 * (count - 1)) / (last - first))} tokens/s`);
  if (first) parts.push(`first after ${((first - asked) / 1000).toFixed(2)} s`);
  return [...parts, `prompt ${prompt}${cached}`].join(" · ");
}
