// Builds elements. Texts become text nodes: nothing here, or in the files that use it, reads HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An element: attributes by name, listeners as onNAME, then children (nodes, texts, or lists of them). */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for elements of SVG. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function icon(name) {
  return svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

export function button(label, name, onclick, attributes = {}) {
  return h("button", { type: "button", class: "quiet small", onclick, ...attributes }, name && icon(name), h("span", {}, label));
}

export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

/** Copies a text, and shows on the button that it is copied. */
export async function copy(text, pressed) {
  const label = $("span", pressed);
  const before = label.textContent;
  try {
    await navigator.clipboard.writeText(text);
    label.textContent = "Copied";
  } catch {
    label.textContent = copyBySelection(text) ? "Copied" : "Not allowed";
  }
  setTimeout(() => (label.textContent = before), 1500);
}

// Browsers have a clipboard only for https and for this machine.
function copyBySelection(text) {
  const area = h("textarea", { class: "sr" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

/** localStorage that may be switched off. */
export const stored = {
  get(name) {
    try {
      return JSON.parse(localStorage.getItem(`jaxinfer.${name}`));
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`jaxinfer.${name}`, JSON.stringify(value));
    } catch { /* then it lasts as long as the page */ }
  },
};
