// What every page has: light and dark, keys, search; and what the pages that compute share.
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

// --------------------------------------------------------------------- what pages that compute share

// Dark enough for white digits, and for either background.
const COLORS = ["#355070", "#c9474c", "#6d597a", "#a8663d", "#3d7349", "#8a6d00", "#356c8e", "#8e4fa3",
                "#1d7a6f", "#a3526a", "#5f6b80"];

function make(tag, attributes = {}, text = "") {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

function draw(tag, attributes = {}, text = "") {        // the same for SVG
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== "") element.textContent = text;
  return element;
}

function picture(width, height, label) {
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

// The answer to a question, from Python; or, where the page is files, what Python said when these were
// written. Throws what is wrong, in a line.
async function ask(name, asked) {
  const query = Object.keys(asked).sort().map(key => `${key}=${encodeURIComponent(asked[key])}`).join("&");
  if (window.ANSWERS) {
    const answer = window.ANSWERS[`${name}?${query}`];
    if (!answer) throw new Error("these pages were written as files, without an answer to that: " +
                                 "`make page` starts the ones that compute");
    return answer;
  }
  const response = await fetch(`api/${name}?${query}`), data = await response.json();
  if (!response.ok) throw new Error(data.error);
  return data;
}

// A link holds the whole state of a page, behind its #.
function readLink() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function writeLink(state) {
  const hash = `#${new URLSearchParams(state)}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

// A range over any values; a `now` that is none of them becomes one. Returns the label's element.
function slider(name, values, now, changed) {
  const label = make("label", {}, ""), range = make("input", { type: "range", min: 0, name });
  const output = make("output");
  label.append(make("span", {}, name.replaceAll("_", " ")), range, output);
  label.set = (values, now) => {
    if (!values.includes(now)) values = [...values, now].sort((a, b) => a - b);
    range.max = values.length - 1;
    range.value = values.indexOf(now);
    label.values = values;
    output.textContent = label.value = now;
    range.setAttribute("aria-valuetext", output.textContent);
    range.disabled = values.length < 2;
  };
  label.set(values, now);
  range.addEventListener("input", () => {
    label.set(label.values, label.values[range.value]);
    changed();
  });
  return label;
}

function selector(name, values, now, changed) {
  const label = make("label"), select = make("select", { name });
  select.append(...values.map(value => make("option", { value }, value)));
  label.append(make("span", {}, name.replaceAll("_", " ")), select);
  label.set = (_, now) => { select.value = now; };
  label.set(values, values.includes(now) ? now : values[0]);
  Object.defineProperty(label, "value", { get: () => select.value });
  select.addEventListener("change", changed);
  return label;
}

function powers(most, least = 1) {
  const found = [];
  for (let value = least; value <= most; value *= 2) found.push(value);
  return found;
}

function upTo(most, least = 1) {
  return Array.from({ length: most - least + 1 }, (_, i) => i + least);
}

// Only the last question's answer counts: a slider asks faster than Python answers.
function latest(answer) {
  let number = 0;
  return async (...given) => {
    const mine = ++number;
    try {
      await answer(() => mine === number, ...given);
    } catch (error) {
      if (mine === number) tell(error.message);
    }
  };
}

function tell(problem) {
  const line = $("#problem");
  line.textContent = problem;
  line.hidden = !problem;
}
