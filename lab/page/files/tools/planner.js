// The planner: sliders ask chapter 10, bars show its answer. Nothing is computed here but widths.
"use strict";

TOOLS.planner = mount => {
  const LAYOUT = ["tp", "cp", "pp", "v", "ep", "zero", "micro_batch", "recompute", "schedule", "sp"];
  const WORDS = ["model", "cluster", "software", "optimizer"];   // and no numbers
  const MIXTURE = ["shared", "node_limit", "two_hops"];
  const BYTES = { weight_bytes: [1, 2, 4], gradient_bytes: upTo(8, 0), master_bytes: [0, 2, 4],
                  moment_bytes: upTo(8, 0), sent_bytes: [1, 2, 4] };     // of a parameter
  const OWN = [...MIXTURE, ...Object.keys(BYTES)];        // in place of the model's and the software's
  const QUESTION = [...WORDS, "gpus", "batch", "seq", ...OWN];

  const choices = window.CHOICES;
  const defaults = mount.begins([...WORDS, "gpus"]);
  const state = {};                                       // what the link holds; without tp: the best
  const controls = {};

  const model = () => choices.models[state.model];
  const batchOf = (name, seq) => Math.max(1, Math.floor(choices.map.tokens / seq));

  function completed(link) {                              // what a link leaves out
    const found = { ...defaults, ...link };
    if (!choices.models[found.model]) found.model = defaults.model;
    for (const name of ["gpus", "batch", "seq", "tp", "cp", "pp", "v", "ep", "zero", "micro_batch", "shared",
                        "node_limit", ...Object.keys(BYTES)]) {
      if (name in found) found[name] = Math.max(0, Math.floor(Number(found[name]) || 0));
    }
    found.seq ||= choices.models[found.model].seq;
    found.batch ||= batchOf(found.model, found.seq);
    return found;
  }

  function asked(names) {                                 // the parameters of a question
    const question = {};
    for (const name of names) if (name in state) question[name] = state[name];
    if (model().experts === 1) for (const name of MIXTURE) delete question[name];
    for (const name of Object.keys(BYTES)) {
      if (question[name] === choices.bytes[state.software][name]) delete question[name];
    }
    if (question.seq === model().seq) delete question.seq;
    if (question.optimizer === defaults.optimizer) delete question.optimizer;
    return question;
  }

  // ------------------------------------------------------------------------------------- the controls

  function number(name, changed) {                        // a range of powers of two, and any number
    const label = slider(name, powers(2 ** 15), state[name], changed);
    const field = make("input", { type: "number", min: 1, name: `${name}_number`, "aria-label": name });
    label.lastChild.replaceWith(field);
    const set = label.set;
    label.set = (values, now) => { set(values, now); field.value = label.value = now; };
    label.set(label.values, state[name]);
    field.addEventListener("change", () => { label.value = field.value; changed(); });
    return label;
  }

  function setUp() {
    for (const name of WORDS) {
      const all = choices[name] || Object.keys(choices[`${name}s`]);
      controls[name] = selector(name, all, state[name], () => change(name));
    }
    controls.gpus = number("gpus", () => change("gpus"));
    controls.batch = number("batch", () => change("batch"));
    controls.seq = slider("seq", powers(2 ** 20, 1024), state.seq, () => change("seq"));
    controls.shared = slider("shared", [0], 0, () => change("shared"));
    controls.node_limit = slider("node_limit", [0], 0, () => change("node_limit"));
    controls.two_hops = selector("two_hops", ["true", "false"], "false", () => change("two_hops"));
    for (const [name, values] of Object.entries(BYTES)) {
      controls[name] = slider(name, values, choices.bytes[state.software][name], () => change(name));
    }
    mount.$(".question").append(...QUESTION.map(name => controls[name]));
    for (const name of LAYOUT) {
      const values = { recompute: choices.recompute, schedule: choices.layout_schedules,
                       sp: ["true", "false"] }[name];
      const changed = () => change(name);
      controls[name] = values ? selector(name, values, values[0], changed) : slider(name, [1], 1, changed);
    }
    controls.dp = make("label");
    controls.dp.append(make("span", {}, "dp"), make("span", {}, "what is left"), make("output"));
    mount.$(".layout").append(controls.dp, ...LAYOUT.map(name => controls[name]));
    mount.$(".take-best").addEventListener("click", () => { forget(); update(); });
  }

  function forget() {                                     // the layout: the best is taken instead
    for (const name of LAYOUT) delete state[name];
  }

  function change(name) {
    const value = controls[name].value, before = state[name];
    state[name] = [...WORDS, "recompute", "schedule", "sp", "two_hops"].includes(name)
      ? value : Math.max(["zero", ...OWN].includes(name) ? 0 : 1, Math.floor(Number(value) || 0));
    if (["model", "software"].includes(name)) for (const other of OWN) delete state[other];
    if (name === "model") state.seq = model().seq;
    if (["model", "seq"].includes(name)) state.batch = batchOf(state.model, state.seq);
    if (QUESTION.includes(name)) forget();
    if (name === "tp" && before === 1) state.sp = "true";
    if (name === "pp" && state.pp === 1) Object.assign(state, { v: 1, schedule: "1f1b" });
    if (name === "schedule" && state.schedule !== "1f1b") state.v = 1;
    update();
  }

  function divisors(of, most) {
    return upTo(Math.min(of, most)).filter(value => of % value === 0);
  }

  function show() {                                       // the state, on the controls
    const { layers, experts } = model(), gpus = state.gpus;
    const values = { gpus: powers(2 ** 15), batch: powers(2 ** 15), seq: powers(2 ** 20, 1024),
                     tp: powers(Math.min(64, gpus)), cp: powers(Math.min(64, gpus)), zero: upTo(3, 0),
                     pp: divisors(gpus, Math.min(layers, 256)), micro_batch: powers(16),
                     v: state.pp > 1 ? divisors(Math.ceil(layers / state.pp), 8) : [1],
                     ep: experts > 1 ? powers(experts) : [1] };
    const own = { shared: model().shared, node_limit: model().node_limit,
                  two_hops: String(choices.two_hops[state.software]), ...choices.bytes[state.software] };
    for (const name of MIXTURE) {
      controls[name].hidden = experts === 1;
      controls[name].set(upTo(16, 0), state[name] ?? own[name]);
    }
    for (const [name, values] of Object.entries(BYTES)) {
      controls[name].set(values, state[name] ?? own[name]);
    }
    for (const name of [...QUESTION, ...LAYOUT]) {
      const control = controls[name];
      if (name in state && !(name in own)) control.set(values[name], state[name]);
    }
  }

  // -------------------------------------------------------------------------------------- the answers

  const gb = bytes => `${(bytes / 1e9).toFixed(bytes < 1e10 ? 1 : 0)} GB`;
  const share = part => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`;
  const seconds = value => `${value < 10 ? value.toPrecision(3) : value.toFixed(1)} s`;

  // Parts of a whole as one bar; marks: [[value, what]] are lines across it.
  function bar(parts, most, height = 26, width = 900, marks = []) {
    const svg = picture(width, height + (marks.length ? 20 : 0), "a bar, whose parts the list names");
    let x = 0;
    Object.entries(parts).forEach(([cause, value], i) => {
      const wide = value / most * width;
      const part = draw("rect", { x, y: 0, width: Math.max(0, wide), height, fill: COLORS[i % COLORS.length] });
      part.dataset.cause = cause;
      part.append(draw("title", {}, cause));
      svg.append(part);
      x += wide;
    });
    for (const [value, what] of marks) {
      const at = value / most * width;
      svg.append(draw("line", { x1: at, x2: at, y1: 0, y2: height + 4, stroke: "currentColor",
                                "stroke-dasharray": "4 2" }),
                 draw("text", { x: at, y: height + 16, "font-size": 12,
                                "text-anchor": at > width / 2 ? "end" : "start" }, what));
    }
    return svg;
  }

  function legend(parts, inWords) {
    const list = make("ul", { class: "legend" });
    const all = Object.values(parts).reduce((a, b) => a + b, 0);
    Object.entries(parts).forEach(([cause, value], i) => {
      if (value <= 0) return;
      const item = make("li"), swatch = picture(10, 10, "");
      swatch.append(draw("rect", { width: 10, height: 10, fill: COLORS[i % COLORS.length] }));
      item.append(swatch, `${cause} ${inWords(value)}, ${share(value / all)}`);
      list.append(item);
    });
    return list;
  }

  function showPlan(plan) {
    mount.tell("");
    $("output", controls.dp).textContent = plan.layout.dp;
    const words = plan.layout.dp > 0 ? plan.words : "nothing";
    mount.$(".verdict").replaceChildren(...(plan.memory ? [
      make("strong", {}, `${seconds(plan.seconds)} a step`),
      `, ${plan.tokens_per_second_per_gpu.toFixed(0)} tokens/s and ${plan.tflops.toFixed(0)} TFLOP/s of a ` +
      `GPU, ${share(plan.mfu)} of its peak, ${gb(plan.bytes)} of its memory: `,
      make("strong", {}, words), " ",
      plan.why ? make("span", { class: "wrong" }, `✗ ${plan.why}, and has ${gb(plan.room)} of room`)
        : make("span", { class: "right" }, "✓ fits")]
      : [make("span", { class: "wrong" }, `✗ ${plan.why}`)]));
    mount.$(".caveats").textContent = plan.caveats.join("; ");
    const most = Math.max(plan.capacity * 1.02, plan.bytes || 0);
    mount.$(".memory").replaceChildren(...(plan.memory ? [
      bar(plan.memory, most, 26, 900, [[plan.room, `room: ${gb(plan.room)} of ${gb(plan.capacity)}`]]),
      legend(plan.memory, gb)] : []));
    mount.$(".seconds").replaceChildren(...(plan.memory ? [
      bar(plan.time, plan.seconds), legend(plan.time, seconds)] : []));
    mount.$(".explain").replaceChildren(...plan.explain.map(line => make("li", {}, line.trim())));
    mount.$(".command").textContent = plan.command;
  }

  function showBest(found) {
    mount.tell(found.fits ? "" : `no layout fits for sure: ${found.why}`);
    mount.$(".count").textContent = `of ${found.count.toLocaleString("en")} that ${found.fits ? "fit" : "may fit"}`;
    const head = make("tr");
    for (const title of ["layout", "seconds", "MFU", "memory", "where the seconds go", ""]) {
      head.append(make("th", {}, title));
    }
    const slowest = Math.max(...found.plans.map(plan => plan.seconds));
    const rows = found.plans.map(plan => {
      const row = make("tr", isTaken(plan.layout) ? { class: "taken" } : {}), where = make("td");
      const take = make("button", { type: "button", "aria-label": `take ${plan.words}` }, "take");
      where.append(bar(plan.time, slowest, 12, 260));
      take.addEventListener("click", () => { takeLayout(plan.layout); update(); });
      const last = make("td");
      last.append(take);
      row.append(make("td", {}, plan.words), make("td", {}, seconds(plan.seconds)),
                 make("td", {}, share(plan.mfu)), make("td", {}, gb(plan.bytes)), where, last);
      return row;
    });
    mount.$(".plans").replaceChildren(head, ...rows);
  }

  function takeLayout(layout) {
    for (const name of LAYOUT) state[name] = typeof layout[name] === "boolean" ? String(layout[name]) : layout[name];
  }

  function isTaken(layout) {
    return LAYOUT.every(name => String(layout[name]) === String(state[name]));
  }

  // -------------------------------------------------------------------------------------- the questions

  const update = mount.latest(async signal => {
    if (!("tp" in state)) show();
    mount.writeLink(state);
    const search = mount.ask("best", asked(QUESTION), signal);
    search.catch(() => null);                             // it is waited for below
    if (!("tp" in state)) {
      mount.$(".verdict").textContent = "searching …";
      const [best] = (await search).plans;
      takeLayout(best ? best.layout : leastMemory());
      mount.writeLink(state);
    }
    show();
    const plan = await mount.ask("plan", asked([...QUESTION, ...LAYOUT]), signal);
    showPlan(plan);
    const found = await search;
    showBest(found);
    await showMap(signal);
  });

  // What is shown where nothing fits: how far it is from that.
  function leastMemory() {
    const tp = Math.min(8, 2 ** Math.floor(Math.log2(state.gpus)));
    return { tp, cp: 1, pp: 1, v: 1, ep: 1, zero: 3, micro_batch: 1, recompute: "full",
             schedule: "1f1b", sp: tp > 1 };
  }

  let mapped = "";                                        // for which machine the map was drawn

  async function showMap(signal) {
    const machine = asked(["cluster", "software", "optimizer", ...Object.keys(BYTES)]);
    if (mapped === JSON.stringify(machine)) return;
    const head = make("tr"), cells = [];
    head.append(make("th", {}, "GPUs"), ...choices.map.gpus.map(
      gpus => make("th", {}, gpus.toLocaleString("en"))));
    const rows = choices.map.models.map(name => {
      const row = make("tr");
      row.append(make("th", {}, name));
      for (const gpus of choices.map.gpus) {
        const cell = make("td"), button = make("button", { type: "button", class: "none" }, "…");
        button.addEventListener("click", () => choose(name, gpus));
        cells.push([button, name, gpus]);
        cell.append(button);
        row.append(cell);
      }
      return row;
    });
    mount.$(".map").replaceChildren(head, ...rows);
    for (const [button, name, gpus] of cells) {
      const batch = batchOf(name, choices.models[name].seq);
      const found = await mount.ask("best", { ...machine, model: name, gpus, batch }, signal);
      const best = found.fits && found.plans[0];
      button.textContent = best ? `${share(best.mfu)}\n${degrees(best.layout)}` : "does\nnot fit";
      button.title = best ? best.words : found.why;
      button.className = best ? "" : "none";
      if (best) button.style.background = shade(best.mfu);
    }
    mapped = JSON.stringify(machine);
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

  function choose(name, gpus) {
    Object.assign(state, { model: name, gpus, seq: choices.models[name].seq });
    state.batch = batchOf(name, state.seq);
    forget();
    update();
    mount.$(".verdict").scrollIntoView({ block: "center" });
  }

  function begin() {
    for (const name of Object.keys(state)) delete state[name];
    Object.assign(state, completed(mount.large ? readLink() : {}));
  }

  begin();
  setUp();
  update();
  mount.onLink(() => { begin(); update(); });
};
