// Starts the page: tabs, theme, key, and what all tabs share.

import { hooks, key } from "./api.js";
import { startChat } from "./chat.js";
import { openText, startCompletion } from "./completion.js";
import { startControls } from "./controls.js";
import { $, $$, stored } from "./dom.js";
import { startImages } from "./images.js";
import { loadModels, models } from "./models.js";
import { startServer, watchServer } from "./server.js";

const TRY_AGAIN = 2000; // milliseconds

// --- tabs ---

const tabs = $$('[role="tab"]');
const FOCUS = { chat: "#message", completion: "#prompt" };

function openTab(name, focus = false) {
  const chosen = tabs.find((tab) => tab.dataset.tab === name && !tab.hidden) ?? tabs[0];
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", String(tab === chosen));
    tab.tabIndex = tab === chosen ? 0 : -1;
    $(`#${tab.dataset.tab}`).hidden = tab !== chosen;
  }
  document.body.dataset.tab = chosen.dataset.tab;
  history.replaceState(null, "", `#/${chosen.dataset.tab}`); // no id of an element, to which a browser would go
  watchServer(chosen.dataset.tab === "server");
  if (focus) $(FOCUS[chosen.dataset.tab] ?? "body").focus();
}

function startTabs() {
  for (const tab of tabs) tab.addEventListener("click", () => openTab(tab.dataset.tab));
  $('[role="tablist"]').addEventListener("keydown", (event) => {
    const shown = tabs.filter((tab) => !tab.hidden);
    const at = shown.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    const next = shown[(to + shown.length) % shown.length];
    next.focus();
    openTab(next.dataset.tab);
  });
  window.addEventListener("hashchange", () => openTab(location.hash.slice(2)));
}

// --- theme ---

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const shown = () => document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light");
  const pressed = $("#theme-button");
  const name = () => (pressed.title = `Use the ${shown() === "dark" ? "light" : "dark"} theme`);
  pressed.addEventListener("click", () => {
    const theme = shown() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    stored.set("theme", theme);
    name();
  });
  system.addEventListener("change", name);
  name();
}

// --- key ---

let asked = null; // the question that is open: all requests wait for one

function askForKey(wrong) {
  asked ??= new Promise((resolve) => {
    const [dialog, input] = [$("#key-dialog"), $("#key")];
    $("#key-problem").hidden = !wrong;
    input.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    const closed = () => {
      asked = null;
      const given = dialog.returnValue === "save";
      if (given) key.set(input.value.trim());
      input.value = "";
      resolve(given);
    };
    dialog.addEventListener("close", closed, { once: true });
  });
  return asked;
}

function startKey() {
  hooks.needKey = askForKey;
  $("#key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    $("#key-dialog").close("save");
  });
  $("#key-cancel").addEventListener("click", () => $("#key-dialog").close("cancel"));
  $("#key-button").addEventListener("click", async () => {
    if (await askForKey(false)) refresh();
  });
}

// --- the server ---

function notice(text) {
  $("#notice").textContent = text;
  $("#notice").hidden = !text;
}

let waiting = false;
let wanted = location.hash.slice(2); // a tab that may not be there yet

function waitForServer() {
  if (waiting) return;
  waiting = true;
  notice("The server cannot be reached. Trying again…");
  const look = async () => {
    try {
      if (!(await fetch("health", { cache: "no-store" })).ok) throw new Error();
      waiting = false;
      notice("");
      refresh();
    } catch {
      setTimeout(look, TRY_AGAIN);
    }
  };
  setTimeout(look, TRY_AGAIN);
}

async function refresh() {
  try {
    await loadModels();
    await startImages((there) => ($("#tab-images").hidden = !there));
    const onlyImages = !models.list.length && !models.loading && !$("#tab-images").hidden;
    if (wanted === "images" || (onlyImages && !wanted)) openTab("images");
    wanted = null;
  } catch (error) {
    if (!waiting) notice(error.message);
  }
}

hooks.offline = waitForServer;
models.addEventListener("change", () => {
  if (!waiting) notice(models.loading ? "The server is loading its models…" : "");
});
startTheme();
startKey();
startControls();
startChat((text) => {
  openTab("completion");
  openText(text);
});
startCompletion();
startServer();
startTabs();
openTab(wanted, !matchMedia("(pointer: coarse)").matches);
refresh();
