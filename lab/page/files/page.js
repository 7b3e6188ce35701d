// What every page has: light and dark, keys, search.
"use strict";

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

// ------------------------------------------------------------------------------- light and dark

const THEMES = ["", "light", "dark"];                   // "": as the system has it

function remembered(key, value) {                       // a file, opened as such, may remember nothing
  try {
    return value === undefined ? localStorage.getItem(key) : localStorage.setItem(key, value);
  } catch {
    return null;
  }
}

function showTheme(theme) {
  document.documentElement.toggleAttribute("data-theme", Boolean(theme));
  if (theme) document.documentElement.setAttribute("data-theme", theme);
}

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(remembered("theme") || "") + 1) % THEMES.length];
  remembered("theme", next);
  showTheme(next);
}

showTheme(remembered("theme"));

// ------------------------------------------------------------------------------------------ keys

function turn(by) {                                     // to the next part of the page, or back
  const parts = $$("[data-part]"), now = parts.findIndex(part => part.matches(".here"));
  const next = parts[Math.min(parts.length - 1, Math.max(0, now + by))];
  if (now >= 0) parts[now].classList.remove("here");
  next.classList.add("here");
  next.scrollIntoView({ block: "start" });
  next.tabIndex = -1;
  next.focus({ preventScroll: true });
}

const KEYS = {
  "j": () => turn(1),
  "k": () => turn(-1),
  "]": () => $("a[rel=next]")?.click(),
  "[": () => $("a[rel=prev]")?.click(),
  "/": () => openSearch(),
  "?": () => $("#page-keys").showModal(),
  "t": () => nextTheme(),
  "b": () => $$(":scope details", $(".here") || document).forEach(one => { one.open = !one.open; }),
};

document.addEventListener("keydown", event => {
  const typing = event.target.matches("input, select, textarea") || $("dialog[open]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

addEventListener("beforeprint", () => $$("details").forEach(one => { one.open = true; }));

// ---------------------------------------------------------------------------------------- search

function openSearch() {
  $("#page-search").showModal();
  $("#page-search input").select();
  if (window.SEARCH || $("script[src='search.js']")) return;
  const script = document.createElement("script");      // large, and seldom needed
  script.src = "search.js";
  script.onload = showResults;
  document.head.append(script);
}

function scoreOf([title, , text], words) {
  let total = 0;
  for (const word of words) {
    const inTitle = title.toLowerCase().includes(word), inText = text.toLowerCase().split(word).length - 1;
    if (!inTitle && !inText) return 0;
    total += 20 * inTitle + Math.min(inText, 10);
  }
  return total;
}

function lineWith(text, word) {                         // the line of the text that has it
  const at = Math.max(0, text.toLowerCase().indexOf(word));
  return text.slice(text.lastIndexOf("\n", at) + 1, at + 120).split("\n")[0].trim();
}

function showResults() {
  const words = $("#page-search input").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? (window.SEARCH || []).map(entry => [scoreOf(entry, words), entry])
    .filter(([points]) => points).sort((a, b) => b[0] - a[0]).slice(0, 20) : [];
  $("#page-search ol").replaceChildren(...found.map(([, [title, address, text]]) => {
    const link = make("a", { href: address }, title);
    link.append(make("small", {}, lineWith(text, words[0])));
    link.addEventListener("click", () => $("#page-search").close());
    const item = document.createElement("li");
    item.append(link);
    return item;
  }));
  if (words.length && !found.length) $("#page-search ol").append(make("li", {}, "nothing has these words"));
}

function walkResults(event) {                           // with the arrow keys, and Enter
  const links = [$("#page-search input"), ...$$("#page-search a")];
  const at = links.indexOf(document.activeElement), by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by) {
    event.preventDefault();
    links[Math.min(links.length - 1, Math.max(0, at + by))].focus();
  } else if (event.key === "Enter" && at === 0 && links[1]) {
    links[1].click();
  }
}

document.addEventListener("DOMContentLoaded", () => {
  $("#theme").addEventListener("click", nextTheme);
  $("#open-search").addEventListener("click", openSearch);
  $("#open-keys").addEventListener("click", () => $("#page-keys").showModal());
  $("#page-search input").addEventListener("input", showResults);
  $("#page-search").addEventListener("keydown", walkResults);
  for (const dialog of $$("dialog")) {
    dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
  }
});

function make(tag, attributes = {}, text = "") {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}
