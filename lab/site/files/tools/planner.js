// The planner: sliders ask chapter 10, bars show its answer. Nothing is computed here but widths.
//
// What is asked is a question, and the degrees of a layout that are given. The search chooses those that are
// not. A degree that a reader moves gives all of them: the others stay as they are shown.
"use strict";

TOOLS.planner = mount => {
  const LAYOUT = ["tp", "cp", "pp", "v", "ep", "zero", "micro_batch", "recompute", "schedule", "sp"];
  const MIXTURE = ["shared", "node_limit", "two_hops"];
  const BYTES = { weight_bytes: [1, 2, 4], gradient_bytes: upTo(8, 0), master_bytes: [0, 2, 4],
                  moment_bytes: upTo(8, 0), sent_bytes: [1, 2, 4] };     // of a parameter
  const OWN = [...Object.keys(BYTES), ...MIXTURE];        // in place of the model's and the software's
  const MACHINE = ["cluster", "software", "optimizer", ...Object.keys(BYTES)];
  const QUESTION = ["model", "cluster", "software", "optimizer", "gpus", "batch", "seq", ...OWN];
  const FEW = ["model", "cluster", "gpus", "tp", "pp", "zero", "micro_batch", "recompute"];    // in a lesson
  const RESTS = 250;                                      // ms in which a search is not asked for

  const choices = window.CHOICES, truth = ["true", "false"];
  const WORDS = { model: Object.keys(choices.models), cluster: choices.clusters,
                  software: choices.software, optimizer: choices.optimizer, two_hops: truth, sp: truth,
                  recompute: choices.recompute, schedule: choices.layout_schedules };
  const controls = {};
  let question = {}, given = {};                          // what the link holds
  let shown = null;                                       // the layout that was answered

  // ------------------------------------------------------------------------------------ what is asked

  const batchOf = (name, seq) => Math.max(1, Math.floor(choices.map.tokens / seq));
  const least = name => ["zero", ...OWN].includes(name) ? 0 : 1;
  const isWhole = layout => LAYOUT.every(name => name in layout);

  // Why it is no value of this name; "": it is one.
  function problemOf(name, value) {
    if (![...QUESTION, ...LAYOUT].includes(name)) return `there is no ${name} to choose`;
    const all = WORDS[name];
    if (all) return all.includes(value) ? "" : `${name} = ${value} is none of ${all.join(", ")}`;
    return Number.isInteger(value) && value >= least(name) ? ""
      : `${name} = ${value} is no whole number from ${least(name)} on`;
  }

  function begin(link = mount.large ? readLink() : {}) {  // as the link says; and what it says wrong
    const names = [...QUESTION, ...LAYOUT], problems = [];
    const asks = { ...mount.begins(names, link), ...mount.begins(Object.keys(link), link) }, usual = mount.begins(names, {});
    question = {};
    given = {};
    for (const [name, value] of Object.entries(asks)) {
      if (value === undefined) continue;
      const problem = problemOf(name, value), instead = problem ? usual[name] : value;
      if (problem) problems.push(`${problem}: ${instead === undefined ? "it is left out" : `here it is ${instead}`}`);
      if (instead !== undefined) (LAYOUT.includes(name) ? given : question)[name] = instead;
    }
    question.seq ??= choices.models[question.model].seq;
    question.batch ??= batchOf(question.model, question.seq);
    note = problems.join("; ");
  }

  let note = "";                                          // what was wrong in the link

  function asked(of = question) {                         // the parameters of a question
    const names = { ...of }, model = choices.models[of.model];
    if (model?.experts === 1) for (const name of MIXTURE) delete names[name];
    for (const name of Object.keys(BYTES)) if (of[name] === choices.bytes[of.software][name]) delete names[name];
    if (of.seq === model?.seq) delete names.seq;
    if (of.optimizer === WORDS.optimizer[0]) delete names.optimizer;
    return names;
  }

  function changed(name, value) {                         // the question, with what hangs on this
    const now = { ...question, [name]: value };
    if (["model", "software"].includes(name)) for (const other of OWN) delete now[other];
    if (name === "model") now.seq = choices.models[value].seq;
    if (["model", "seq"].includes(name)) now.batch = batchOf(now.model, now.seq);
    return now;
  }

  function moved(layout, name, value) {                   // the layout, with what hangs on this
    const now = { ...layout, [name]: value };
    if (name === "tp" && layout.tp === 1) now.sp = "true";
    if (name === "pp" && value === 1) Object.assign(now, { v: 1, schedule: "1f1b" });
    if (name === "pp") now.v = Math.max(...slices(value).filter(v => v <= layout.v));
    if (name === "schedule" && value !== "1f1b") now.v = 1;
    return now;
  }

  // ------------------------------------------------------------------------------------- the controls

  function divisors(of, most) {
    return upTo(Math.min(of, most)).filter(value => of % value === 0);
  }

  function slices(pp) {                                   // of the layers of a stage
    return pp > 1 ? divisors(Math.ceil(choices.models[question.model].layers / pp), 8) : [1];
  }

  function valuesOf(name) {                               // of a slider
    const { layers, experts } = choices.models[question.model], { gpus } = question;
    return { gpus: powers(2 ** 15), batch: powers(2 ** 15), seq: powers(2 ** 20, 1024), ...BYTES,
             tp: powers(Math.min(64, gpus)), cp: powers(Math.min(64, gpus)), zero: upTo(3, 0),
             pp: divisors(gpus, Math.min(layers, 256)), micro_batch: powers(16), v: slices(shown?.pp ?? 1),
             ep: experts > 1 ? powers(experts) : [1], shared: upTo(16, 0), node_limit: upTo(16, 0) }[name];
  }

  const isAnswered = (name, value) => LAYOUT.includes(name)
    ? !shown || mount.can("plan", { ...asked(), ...moved(shown, name, value) })
    : mount.can("best", asked(changed(name, value)));

  function number(name) {                                 // a range of powers of two, and any number
    const label = slider(name, [1], 1, () => choose(name)), set = label.set;
    const field = make("input", { type: "number", min: 1, name: `${name}_number`, "aria-label": name });
    label.lastChild.replaceWith(field);
    label.set = (values, now) => { set(values, now); field.value = label.value = now; };
    field.addEventListener("change", () => {
      if (field.value === "") field.value = label.value;  // no number: it stays
      else {
        label.value = Number(field.value);
        choose(name);
      }
    });
    return label;
  }

  function setUp() {
    for (const name of [...QUESTION, ...LAYOUT]) {
      controls[name] = WORDS[name] ? selector(name, WORDS[name], WORDS[name][0], () => choose(name))
        : ["gpus", "batch"].includes(name) ? number(name) : slider(name, [1], 1, () => choose(name));
    }
    controls.dp = make("label");
    controls.dp.append(make("span", {}, "dp"), make("span", {}, "what is left"), make("output"));
    const offered = name => mount.large || FEW.includes(name);
    mount.$(".question").append(...QUESTION.filter(offered).map(name => controls[name]));
    mount.$(".layout").append(controls.dp, ...LAYOUT.filter(offered).map(name => controls[name]));
    mount.$(".take-best").addEventListener("click", () => take({}));
  }

  function choose(name) {                                 // what a control says
    const { value } = controls[name], problem = problemOf(name, value);
    note = problem;
    if (!problem && LAYOUT.includes(name)) given = moved({ ...shown, ...given }, name, value);
    if (!problem && QUESTION.includes(name)) question = changed(name, value);
    if (name === "model") given = {};
    fill();                                             // at once: a mixture has more controls
    update();
  }

  function take(layout) {                                 // all of it; or none: the fastest
    given = layout;
    note = "";
    update();
  }

  function fill() {                                       // the controls, from what was answered
    const { shared, node_limit, experts } = choices.models[question.model];
    const usual = { shared, node_limit, two_hops: String(choices.two_hops[question.software]),
                    ...choices.bytes[question.software] };
    const now = { ...usual, ...question, ...shown, ...given };
    for (const name of [...QUESTION, ...LAYOUT]) {
      const values = WORDS[name] ?? valuesOf(name);
      if (WORDS[name]) for (const one of $$("option", controls[name])) one.disabled = !isAnswered(name, one.value);
      controls[name].set(values.filter(value => isAnswered(name, value)), now[name] ?? values[0]);
    }
    for (const name of MIXTURE) controls[name].hidden = experts === 1;
  }

  // -------------------------------------------------------------------------------------- the results

  const gb = bytes => `${(bytes / 1e9).toFixed(bytes < 1e10 ? 1 : 0)} GB`;
  const share = part => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`;
  const seconds = value => `${value < 10 ? value.toPrecision(3) : value.toFixed(1)} s`;
  const counted = value => value.toLocaleString("en");
  const layoutOf = layout => Object.fromEntries(LAYOUT.map(
    name => [name, typeof layout[name] === "boolean" ? String(layout[name]) : layout[name]]));

  // Parts of a whole as one bar, with a line across it at `mark`.
  function bar(what, parts, most, height = 26, width = 900, mark = null) {
    const all = Object.values(parts).reduce((a, b) => a + b, 0);
    const said = Object.entries(parts).filter(([, value]) => value > all / 200);
    const causes = said.map(([cause, value]) => `${cause} ${share(value / all)}`).join(", ");
    const svg = picture(width, height, `${what}: ${causes}`);
    svg.setAttribute("preserveAspectRatio", "none");      // as wide as there is room, and as high as it is
    let x = 0;
    Object.entries(parts).forEach(([cause, value], i) => {
      const wide = value / most * width;
      const part = draw("rect", { x, y: 0, width: Math.max(0, wide), height, fill: COLORS[i % COLORS.length] });
      part.dataset.cause = cause;
      part.append(draw("title", {}, cause));
      svg.append(part);
      x += wide;
    });
    if (mark !== null) {
      const at = mark / most * width;
      svg.append(draw("line", { x1: at, x2: at, y1: 0, y2: height, stroke: "currentColor", "stroke-width": 2,
                                "stroke-dasharray": "4 2", "vector-effect": "non-scaling-stroke" }));
    }
    return svg;
  }

  function legend(parts, inWords) {
    const list = make("ul", { class: "legend" });
    const all = Object.values(parts).reduce((a, b) => a + b, 0);
    Object.entries(parts).forEach(([cause, value], i) => {
      if (value <= 0) return;
      const item = make("li"), swatch = draw("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
      swatch.append(draw("rect", { width: 10, height: 10, fill: COLORS[i % COLORS.length] }));
      item.append(swatch, `${cause} ${inWords(value)}, ${share(value / all)}`);
      list.append(item);
    });
    return list;
  }

  function showPlan(plan) {
    shown = layoutOf(plan.layout);
    fill();
    mount.root.classList.remove("waits", "refused");
    $("output", controls.dp).textContent = plan.layout.dp;
    mount.$(".verdict").replaceChildren(...(plan.memory ? [
      make("strong", {}, `${seconds(plan.seconds)} a step`),
      `, ${plan.tokens_per_second_per_gpu.toFixed(0)} tokens/s and ${plan.tflops.toFixed(0)} TFLOP/s of a ` +
      `GPU, ${share(plan.mfu)} of its peak, ${gb(plan.bytes)} of its memory: `,
      make("strong", {}, plan.words), " ",
      plan.why ? make("span", { class: "wrong" }, `✗ ${plan.why}, and has ${gb(plan.room)} of room`)
        : make("span", { class: "right" }, "✓ fits")]
      : [make("span", { class: "wrong" }, `✗ ${plan.why}`)]));
    mount.$(".caveats").textContent = plan.caveats.join("; ");
    const most = Math.max(plan.capacity * 1.02, plan.bytes || 0);
    mount.$(".room").textContent = `of ${gb(plan.capacity)}, of which ${gb(plan.room)} are room (dashed)`;
    mount.$(".memory").replaceChildren(...(plan.memory ? [
      bar(`${gb(plan.bytes)} of a GPU`, plan.memory, most, 26, 900, plan.room),
      legend(plan.memory, gb)] : []));
    mount.$(".seconds").replaceChildren(...(plan.memory ? [
      bar(`${seconds(plan.seconds)} of a step`, plan.time, plan.seconds), legend(plan.time, seconds)] : []));
    mount.$(".explain")?.replaceChildren(...plan.explain.map(line => make("li", {}, line.trim())));
    for (const place of [".memory", ".seconds", ".explain"].map(name => mount.$(name)).filter(Boolean)) {
      place.hidden = place.previousElementSibling.hidden = !place.children.length;
    }
    if (mount.large) mount.$(".command").textContent = plan.command;
  }

  function showBest(found, fixed) {
    const plans = mount.large ? found.plans : found.plans.slice(0, 5);
    const beside = Object.keys(fixed).length ? ` with ${inWords(fixed)}` : "";
    const which = `that ${found.fits ? "fit" : "may fit"}${beside}`;
    mount.$(".count").textContent = found.count ? `${plans.length} of ${counted(found.count)} ${which}` : "none fits";
    if (!found.count) {
      mount.$(".plans").replaceChildren();
      return;
    }
    const head = make("tr"), slowest = Math.max(...plans.map(plan => plan.seconds));
    for (const title of ["layout", "seconds", "MFU", "memory", "where they go"]) head.append(make("th", {}, title));
    head.append(make("td"));
    mount.$(".plans").replaceChildren(head, ...plans.map(plan => {
      const isTaken = LAYOUT.every(name => String(plan.layout[name]) === String(shown?.[name]));
      const row = make("tr", isTaken ? { class: "taken" } : {}), where = make("td"), last = make("td");
      const button = make("button", { type: "button", "aria-label": `take ${plan.words}` }, "take");
      where.append(bar(seconds(plan.seconds), plan.time, slowest, 12, 140));
      button.addEventListener("click", () => take(layoutOf(plan.layout)));
      last.append(button);
      row.append(make("td", {}, plan.words), make("td", {}, seconds(plan.seconds)),
                 make("td", {}, share(plan.mfu)), make("td", {}, gb(plan.bytes)), where, last);
      return row;
    }));
  }

  // {name: value, or null where it is left out} as a reader would say it.
  function inWords(changes) {
    return Object.entries(changes).map(([name, value]) => {
      const called = name === "gpus" ? "GPUs" : name.replaceAll("_", " ");
      return value === null ? `any ${called}` : `${called} ${/^\d+$/.test(value) ? counted(Number(value)) : value}`;
    }).join(", ");
  }

  // Buttons, for changes {name: text, or null} of which each would work.
  function offer(changes, fastest = null) {
    const buttons = changes.filter(isPossible).map(change => {
      const isMore = Object.keys(change).join() === "gpus" && change.gpus > question.gpus;
      const words = isMore ? `more GPUs: ${counted(Number(change.gpus))}` : `with ${inWords(change)}`;
      const button = make("button", { type: "button" }, words);
      button.addEventListener("click", () => apply(change));
      return button;
    });
    if (fastest) {
      buttons.push(make("button", { type: "button" }, `the fastest that fits: ${fastest.words}`));
      buttons.at(-1).addEventListener("click", () => take({}));
    }
    mount.$(".offers").replaceChildren(...buttons);
  }

  function after(change) {                                // { question, given } with it
    const now = { question: { ...question }, given: { ...given } };
    for (const [name, text] of Object.entries(change)) {
      const part = QUESTION.includes(name) ? "question" : "given";
      if (text === null) delete now[part][name];
      else now[part][name] = /^\d+$/.test(text) ? Number(text) : text;
    }
    return now;
  }

  function isPossible(change) {                           // here: not every flag is a control
    const now = after(change), names = [...QUESTION, ...LAYOUT];
    return Object.keys(change).every(name => names.includes(name))
      && mount.can(isWhole(now.given) ? "plan" : "best", { ...asked(now.question), ...now.given });
  }

  function apply(change) {
    ({ question, given } = after(change));
    note = "";
    update();
  }

  // ------------------------------------------------------------------------------------ the questions

  function say(text) {
    mount.$(".status").textContent = text;
  }

  function writeState() {                                 // into the page's link
    const all = { ...question, ...given }, names = [...QUESTION, ...LAYOUT].filter(name => name in all);
    mount.writeLink(Object.fromEntries(names.map(name => [name, all[name]])));
  }

  const update = mount.latest(async signal => {
    fill();
    writeState();
    mount.tell(note, false);
    offer([]);
    try {
      await answer(signal);
    } catch (error) {
      if (signal.aborted) throw error;
      if (!shown && Object.keys(readLink()).length) return beginWithoutLink(error.message);
      say("");
      mount.root.classList.remove("waits");
      mount.tell(error.message);
    }
    resting = signal;
    if (mapIsSeen) await fillMap(signal);
  });

  function beginWithoutLink(problem) {                    // whose question is refused
    begin({});
    note = problem;
    writeState();
    return update();
  }

  // The layout that is shown is answered first, where it still fits; and then the search.
  async function answer(signal) {
    const whole = isWhole(given) && given, kept = whole || shown && { ...shown, ...given };
    const planOf = layout => mount.ask("plan", { ...asked(), ...layoutOf(layout) }, signal);
    let plan = null;
    mount.root.classList.add("waits");
    say(whole ? "searching for the fastest …" : "searching …");
    if (whole || kept && mount.can("plan", { ...asked(), ...kept })) {
      plan = await planOf(kept);
      if (whole || !plan.why) showPlan(plan);
      if (!whole && !plan.why) say("This layout is the one from before. Searching for the fastest …");
    }
    if (shown) await new Promise(resolve => { setTimeout(resolve, RESTS); });
    signal.throwIfAborted();
    const fixed = whole ? {} : given, found = await mount.ask("best", { ...asked(), ...fixed }, signal);
    const [best] = found.plans;
    if (!whole) showPlan(await planOf(best?.layout ?? found.nearest));
    showBest(found, fixed);
    if (whole) await judge(plan, found, signal);
    else {
      say(!found.fits ? "" : `The fastest of the ${counted(found.count)} layouts that fit` +
          (Object.keys(given).length ? ` with ${inWords(given)}, which you gave.` : "."));
      const why = best ? `no layout fits for sure: ${found.why}` : "no layout fits; this one is nearest to it";
      if (!found.fits) mount.tell(why, false);
      offer(found.changes);
    }
  }

  // A layout that a reader chose, beside the fastest; or what would make it fit.
  async function judge(plan, found, signal) {
    const fastest = found.fits && found.plans[0], isIt = fastest && fastest.words === plan.words;
    say("You gave all degrees. " + (!fastest ? "No layout fits." : isIt ? "No layout that fits is faster."
      : `The fastest that fits takes ${seconds(fastest.seconds)}.`));
    offer([], isIt ? null : fastest);
    const alone = { ...asked(), ...given };
    if (!plan.why || !mount.can("best", alone)) return;
    offer((await mount.ask("best", alone, signal)).changes, fastest);
  }

  // ------------------------------------------------------------------------------------------ the map

  const cells = [];                                       // { button, name, gpus, asked }
  let mapIsSeen = false, resting = null;                  // the signal of the last question, when it has ended

  function setUpMap() {
    const head = make("tr"), { models, gpus: all } = choices.map;
    head.append(make("th", {}, "GPUs"), ...all.map(gpus => make("th", {}, counted(gpus))));
    mount.$(".map").append(head, ...models.map(name => {
      const row = make("tr");
      row.append(make("th", {}, name), ...all.map(gpus => {
        const cell = make("td"), button = make("button", { type: "button", class: "none" }, "…");
        button.addEventListener("click", () => chooseCell(name, gpus));
        cells.push({ button, name, gpus, asked: "" });
        cell.append(button);
        return cell;
      }));
      return row;
    }));
    new IntersectionObserver(entries => {
      if (mapIsSeen || !entries.some(entry => entry.isIntersecting)) return;
      mapIsSeen = true;
      if (resting && !resting.aborted) fillMap(resting).catch(() => null);    // it was aborted
    }).observe(mount.$(".map"));
  }

  async function fillMap(signal) {                        // those cells that another machine answered
    const names = asked(), machine = {};
    for (const name of MACHINE) if (name in names) machine[name] = names[name];
    const waiting = cells.map(cell => {
      const batch = batchOf(cell.name, choices.models[cell.name].seq);
      return [cell, { ...machine, model: cell.name, gpus: cell.gpus, batch }];
    }).filter(([cell, query]) => cell.asked !== JSON.stringify(query));
    for (const [cell] of waiting) showCell(cell, "…", "");
    for (const [cell, query] of waiting) {
      if (!mount.can("best", query)) {
        showCell(cell, "not in\nthese files", "these pages were written as files");
        continue;
      }
      try {
        const found = await mount.ask("best", query, signal), best = found.fits && found.plans[0];
        if (best) showCell(cell, `${share(best.mfu)}\n${degrees(best.layout)}`, best.words, shade(best.mfu));
        else showCell(cell, "does\nnot fit", found.why);
      } catch (error) {
        signal.throwIfAborted();
        showCell(cell, "no\nanswer", error.message);
      }
      cell.asked = JSON.stringify(query);
    }
  }

  function showCell({ button, name, gpus }, text, title, color = "") {
    button.textContent = text;
    button.title = title;
    button.setAttribute("aria-label", `${name} on ${counted(gpus)} GPUs: ${text.replaceAll("\n", ", ")}`);
    button.className = color ? "" : "none";
    button.style.background = color;
  }

  function degrees({ tp, cp, pp, zero, recompute }) {
    const parts = Object.entries({ tp, cp, pp }).filter(([, degree]) => degree > 1).map(part => part.join(" "));
    return [parts.join(", "), zero ? `ZeRO-${zero}` : "dp", recompute === "none" ? "" : "recomputed"]
      .filter(Boolean).join("\n");
  }

  function shade(mfu) {                                   // 20% to 60%, dark to green
    const part = Math.min(1, Math.max(0, (mfu - 0.2) / 0.4));
    return `hsl(${215 - 75 * part} ${25 + 20 * part}% ${27 + 8 * part}%)`;
  }

  function chooseCell(name, gpus) {
    question = { ...changed("model", name), gpus };
    take({});
    mount.$(".verdict").scrollIntoView({ block: "center" });
  }

  begin();
  setUp();
  if (mount.large) setUpMap();
  update();
  mount.onLink(() => { begin(); update(); });
};
