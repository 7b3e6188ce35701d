// What every page has: light and dark, keys, search.
"use strict";

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

// ------------------------------------------------------------------------------- light and dark

function remembered(key, value) {                       // a file, opened as such, may remember nothing
  try {
    return value === undefined ? localStorage.getItem(key) : localStorage.setItem(key, value);
  } catch {
    return null;
  }
}

function showTheme(theme) {                             // "": as the system has it
  document.documentElement.toggleAttribute("data-theme", Boolean(theme));
  if (theme) document.documentElement.setAttribute("data-theme", theme);
}

function nextTheme() {                                  // to the other one, at each click
  const systems = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const next = (remembered("theme") || systems) === "dark" ? "light" : "dark";
  remembered("theme", next === systems ? "" : next);
  showTheme(next === systems ? "" : next);
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
  "c": () => $(".here .copy")?.click(),
  "b": () => $$(":scope details", $(".here") || document).forEach(one => { one.open = !one.open; }),
};

document.addEventListener("keydown", event => {
  const typing = event.target.matches("input, select, textarea") || $("dialog[open]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

addEventListener("beforeprint", () => $$("details").forEach(one => { one.open = true; }));

// -------------------------------------------------------------------------- contents, and what is read

// The part of the page that is read now is marked: the last one that begins in the upper third.
function followParts() {
  const links = $$("#contents a[href^='#']"), parts = links.map(link => $(link.hash.replaceAll(".", "\\.")));
  const mark = () => {
    const now = parts.findLastIndex(part => part.getBoundingClientRect().top < innerHeight / 3);
    links.forEach((link, i) => {
      if (i === now) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
    if (now >= 0) keepInSight(links[now]);
  };
  const observer = new IntersectionObserver(mark, { rootMargin: "9999999px 0px -67% 0px" });
  parts.forEach(part => observer.observe(part));
}

function keepInSight(link) {                            // within the contents, which scroll by themselves
  const contents = $("#contents"), top = link.getBoundingClientRect().top - contents.getBoundingClientRect().top;
  if (top < 0 || top > contents.clientHeight - 40) contents.scrollTop += top - contents.clientHeight / 3;
}

function readFiles() {                                  // {name: whether it is read}
  try {
    return JSON.parse(remembered("read")) || {};
  } catch {
    return {};
  }
}

function markRead(name, isRead) {
  remembered("read", JSON.stringify({ ...readFiles(), [name]: isRead }));
  showRead();
}

function showRead() {
  const read = readFiles();
  for (const item of $$("li[data-file]")) item.toggleAttribute("data-read", Boolean(read[item.dataset.file]));
  if ($("#is-read")) $("#is-read").checked = Boolean(read[$("article").dataset.file]);
}

// A file is read when its end was seen, until the reader says something else.
function noticeEnd() {
  const name = $("article").dataset.file;
  new IntersectionObserver(([end]) => {
    if (end.isIntersecting && !(name in readFiles())) markRead(name, true);
  }).observe($(".end"));
  $("#is-read").addEventListener("change", event => markRead(name, event.target.checked));
}

function reveal() {                                     // a link may lead into what is closed
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const closed = [];
  for (let one = target?.closest("details:not([open])"); one; one = one.parentElement.closest("details:not([open])")) {
    closed.push(one);
  }
  closed.forEach(one => { one.open = true; });
  if (closed.length) target.scrollIntoView();
}

// ------------------------------------------------------------------------------- figures, code, commands

function showWhole(button) {                            // of a figure, whose upper part is there
  button.closest("figure").classList.remove("tall");
  button.remove();
}

function reachScrollers(within = document) {            // Tab stops where something can be scrolled
  for (const one of $$("pre, .wide, .scrolls, .stage, .lists, figure > div", within)) {
    if (one.scrollWidth > one.clientWidth + 1) one.tabIndex = 0;
    else one.removeAttribute("tabindex");
  }
}

// Code, without the numbers of its lines, and commands. A button is no tab stop: there is one for each
// function, and c copies the part that j and k have come to.
function addCopyButtons() {
  for (const code of $$(".code pre, .lesson > pre")) {
    const numbers = $$(":scope > span > a:first-child", code);
    if (!numbers.length && !/^\s*(torchrun|python|make|pip) /m.test(code.textContent)) continue;
    const button = make("button", { class: "copy", tabindex: -1, "aria-label": "copy these lines" }, "copy");
    button.addEventListener("click", async () => {
      button.textContent = await copied(code);
      setTimeout(() => { button.textContent = "copy"; }, 2000);
    });
    if (numbers.length) {
      code.parentElement.append(button);
    } else {                                            // the button stays where it is when the code scrolls
      const box = make("div", { class: "copies" });
      code.replaceWith(box);
      box.append(code, button);
    }
  }
}

async function copied(code) {                           // in a word, what became of it
  const lines = $$(":scope > span", code).map(line => line.textContent.slice(line.firstChild.textContent.length));
  try {
    await navigator.clipboard.writeText(lines.length ? lines.join("") : code.textContent);
    return "copied";
  } catch {                                             // a page that is a file may not: the old way
    getSelection().selectAllChildren(code);
    return document.execCommand("copy") ? "copied" : "selected";
  }
}

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

addEventListener("hashchange", reveal);
addEventListener("resize", () => reachScrollers());
document.addEventListener("toggle", () => reachScrollers(), true);

document.addEventListener("DOMContentLoaded", () => {
  const showContents = shown => {                       // on a phone, where they cover the page
    $("#contents").classList.toggle("shown", shown);
    $("#open-contents").setAttribute("aria-expanded", shown);
  };
  $("#open-contents").addEventListener("click", () => showContents(!$("#contents").matches(".shown")));
  $("#contents").addEventListener("click", event => { if (event.target.closest("a")) showContents(false); });
  followParts();
  showRead();
  for (const button of $$(".whole")) button.addEventListener("click", () => showWhole(button));
  if ($("#is-read")) noticeEnd();
  for (const number of $$(".code pre > span > a:first-child")) number.tabIndex = -1;    // or Tab stops a thousand times
  addCopyButtons();
  reachScrollers();
  for (const tool of $$("[data-tool]")) {               // which draws when it is answered
    new MutationObserver(() => reachScrollers(tool)).observe(tool, { childList: true, subtree: true });
  }
  reveal();
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
