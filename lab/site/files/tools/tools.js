// What the tools share. A tool is mounted in an element with data-tool="NAME", in a lesson or on its own
// page; data-large says that it is the page's own, so that the page's link holds its state.
"use strict";

const TOOLS = {};                                       // {name: what mounts it}: each script adds its own
const SETTLES = 60;                                     // ms in which a slider that moves on asks nothing
const STAYS = 700;                                      // ms after which what it shows is worth going back to

// Dark enough for white digits, and for either background.
const COLORS = ["#355070", "#c9474c", "#6d597a", "#a8663d", "#3d7349", "#8a6d00", "#356c8e", "#8e4fa3",
                "#1d7a6f", "#a3526a", "#5f6b80"];

class Mount {                                           // the place of a tool
  constructor(root) {
    this.root = root;
    this.large = "large" in root.dataset;
    this.written = -Infinity;                           // when the link was, for a reader's choice
    this.isTouched = false;                             // since then
    this.before = null;                                 // what was there, while it says what one waits for
    for (const kind of ["input", "change", "click"]) {
      root.addEventListener(kind, () => { this.isTouched = true; }, true);
    }
  }

  $(selector) {
    return $(selector, this.root);
  }

  // {name: value} of what it shows: as its element says in data-NAME, and as the page's link says.
  begins(names, link = this.large ? readLink() : {}) {
    return Object.fromEntries(names.map(name => {
      const text = link[name] ?? this.root.dataset[name.toLowerCase()];
      return [name, /^-?\d+(\.\d+)?$/.test(text) ? Number(text) : text];
    }));
  }

  // The page's link holds the state. History has an entry for each one that a reader chose and stayed at:
  // not for each pixel of a drag, and not for what plays.
  writeLink(state) {
    const hash = `#${new URLSearchParams(state)}`, now = performance.now();
    if (!this.large || hash === location.hash) return;
    history[this.isTouched && now - this.written > STAYS ? "pushState" : "replaceState"](null, "", hash);
    if (this.isTouched) this.written = now;
    this.isTouched = false;
  }

  // The answer to a question: one that the page brought along, or Python's.
  async ask(name, asked, signal) {
    const query = written(name, asked);
    const told = $$("script[data-asked]", this.root).find(one => one.dataset.asked === query);
    return told ? JSON.parse(told.textContent) : this.waited(query, signal);
  }

  // The same, from Python. What a reader waits for is told in place of the verdict, which comes back if nothing
  // is answered.
  async waited(query, signal) {
    const place = this.$(".status") ?? this.$(".verdict");
    try {
      const answer = await ask(query, signal, words => {
        if (signal.aborted) return;
        this.before ??= [...place.childNodes];
        place.textContent = words;
      });
      this.before = null;
      return answer;
    } catch (error) {
      if (this.before && !signal.aborted) {
        place.replaceChildren(...this.before);
        this.before = null;
      }
      throw error;
    }
  }

  // Whether it has an answer: not every question has one. It bounds sliders.
  can(name, asked) {
    return isAnswered(written(name, asked));
  }

  // A line for each name of the page's link that is none of these.
  unknown(names) {
    return Object.keys(this.large ? readLink() : {}).filter(name => !names.includes(name))
      .map(name => `there is no ${name} to choose: it is left out`);
  }

  // The answer to a tool's state, but for names of it that are shown alone. A link that is refused when the
  // page begins with it is told in a line, and the state becomes what the tool begins with.
  async answerTo(name, state, shown, signal) {
    const asks = () => Object.fromEntries(Object.entries(state).filter(([key]) => !shown.includes(key)));
    const problems = this.unknown(Object.keys(state));
    let answer;
    try {
      answer = await this.ask(name, asks(), signal);
    } catch (error) {
      if (this.answered || signal.aborted) throw error;
      problems.unshift(error.message);
      Object.assign(state, this.begins(Object.keys(state), {}));
      answer = await this.ask(name, asks(), signal);
    }
    this.answered = true;
    this.tell(problems.join("; "), false);
    return answer;
  }

  // What is wrong, in a line; what was shown before it grows pale.
  tell(problem, isPale = Boolean(problem)) {
    this.root.classList.toggle("refused", isPale);
    this.$(".problem").textContent = problem;
    this.$(".problem").hidden = !problem;
  }

  // A function whose last call alone counts: the one before it is aborted.
  latest(answer) {
    let current = null;
    return async () => {
      const isFirst = !current, mine = new AbortController();
      current?.abort();
      current = mine;
      try {
        if (!isFirst) await settled(mine.signal);
        await answer(mine.signal);
      } catch (error) {
        if (!mine.signal.aborted) this.tell(error.message);
      }
    };
  }

  // On the tool's own page, Back and an edited link begin anew.
  onLink(begin) {
    if (this.large) addEventListener("hashchange", () => { this.isTouched = this.answered = false; begin(); });
  }
}

addEventListener("DOMContentLoaded", () => {
  for (const root of $$("[data-tool]")) TOOLS[root.dataset.tool](new Mount(root));
});

async function settled(signal) {
  await new Promise(resolve => { setTimeout(resolve, SETTLES); });
  signal.throwIfAborted();
}

// ------------------------------------------------------------------------------- questions, and links

function written(name, asked) {                         // as lab/site/tools.py writes it
  return `${name}?${Object.keys(asked).sort().map(key => `${key}=${encodeURIComponent(asked[key])}`).join("&")}`;
}

// The answer. Throws what is wrong, in a line. tell: says what a reader waits for.
async function ask(query, signal, tell) {
  const data = await answerTo(query, signal, tell);
  signal?.throwIfAborted();
  if (data.error) throw new Error(data.error);
  return data;
}

// A link holds the whole state of a tool's own page, behind its #. One to a place of the page has none.
function readLink() {
  const { hash } = location;
  return hash.includes("=") ? Object.fromEntries(new URLSearchParams(hash.slice(1))) : {};
}

// ------------------------------------------------------------------------------------------- drawing

function draw(tag, attributes = {}, text = "") {        // make, of page.js, for SVG
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== "") element.textContent = text;
  return element;
}

function picture(width, height, label) {
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

// ------------------------------------------------------------------------------------------ controls

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

