// Shows a model's text: fences of code, headings, items and tables, `code` and **bold**. All is made of text nodes;
// links and HTML stay the characters that they are.

import { button, copy, h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;

/** Divides a text into blocks: {kind, text}, with {language} of code and {depth, mark} of items. */
export function blocksOf(text) {
  const blocks = [];
  let open = null;
  let fence = null;
  const begin = (kind, lines, more) => {
    blocks.push((open = { kind, lines, ...more }));
  };
  for (const line of text.split("\n")) {
    const trimmed = line.trim();
    if (fence !== null) {
      const closes = trimmed.startsWith(fence) && trimmed.replaceAll(fence[0], "") === "";
      if (closes) open = fence = null;
      else open.lines.push(line);
      continue;
    }
    const begun = line.match(FENCE);
    const heading = line.match(/^#{1,6}\s+(.*)$/);
    const item = line.match(/^(\s*)([-*+•]|\d{1,3}[.)])\s+(.*)$/);
    if (begun) {
      fence = begun[1];
      begin("code", [], { language: begun[2] });
    } else if (!trimmed) {
      open = null;
    } else if (heading) {
      begin("heading", [heading[1]]);
      open = null;
    } else if (item) {
      const mark = /\d/.test(item[2]) ? item[2] : "•";
      begin("item", [item[3]], { depth: Math.min(3, Math.floor(item[1].length / 2)), mark });
    } else {
      const kind = trimmed.startsWith("|") ? "table" : "text";
      const goesOn = open && (open.kind === kind || (open.kind === "item" && kind === "text"));
      if (goesOn) open.lines.push(line);
      else begin(kind, [line]);
    }
  }
  return blocks.map(({ lines, ...block }) => ({ ...block, text: lines.join("\n") }));
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part, index) => {
    if (index % 2 === 0) return part;
    return part.startsWith("`") ? h("code", {}, part.slice(1, -1)) : h("strong", {}, part.slice(2, -2));
  });
}

function build(block) {
  switch (block.kind) {
    case "code": {
      const code = h("code", {}, block.text);
      const copier = button("Copy", null, () => copy(block.text, copier));
      return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, block.language || "code"), copier), h("pre", { tabindex: "0" }, code));
    }
    case "table":
      return h("pre", { class: "table", tabindex: "0" }, block.text);
    case "heading":
      return h("p", { class: "heading" }, inline(block.text));
    case "item":
      return h("p", { class: `item depth${block.depth}` }, h("span", { class: "mark" }, block.mark), h("span", {}, inline(block.text)));
    default:
      return h("p", {}, inline(block.text));
  }
}

/** Returns a function that shows a text in an element; a longer text changes only the last blocks. */
export function textView(node) {
  let shown = [];
  return (text) => {
    const blocks = blocksOf(text);
    const now = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < now.length && now[same] === shown[same]) same++;
    while (node.childNodes.length > same) node.lastChild.remove();
    node.append(...blocks.slice(same).map(build));
    shown = now;
  };
}
