// Rooflines: seconds of compute and of messages over the batch, and which is above.
"use strict";

TOOLS.roofline = mount => {
  const TALL = 380, ACROSS = 760, SIDE = 64, BELOW = 44;
  const LINES = [["compute", "currentColor"], ["messages of ZeRO-3", COLORS[0]], ["messages of tp", COLORS[1]]];
  const offered = window.CHOICES, controls = {};
  const words = { cluster: offered.clusters, model: offered.dense_models, strategy: offered.strategies };
  let answer = null, note = "";                           // what was wrong in the link

  function setUp() {
    const asks = () => { note = ""; bound(); update(); };
    for (const [name, values] of Object.entries(words)) {
      controls[name] = selector(name, values, values[0], name === "cluster" ? () => { meshed(); asks(); } : asks);
    }
    controls.chips = slider("chips", powers(2 ** 16, 2), 2, asks);
    controls.zero_axes = slider("zero_axes", [1], 1, asks);
    controls.tp_axes = slider("tp_axes", [1], 1, asks);
    mount.$(".question").append(...Object.values(controls));
    controls.tokens = slider("tokens", [256], 256, show);
    mount.$(".batch").append(controls.tokens);
  }

  function begin() {                                      // as a link has it, as far as that can be asked
    const names = ["cluster", "model", "strategy", "chips", "zero_axes", "tp_axes", "tokens"];
    const link = mount.begins(names), usual = mount.begins(names, {}), problems = mount.unknown(names);
    for (const name of names) {
      const isOne = words[name] ? words[name].includes(link[name])
        : Number.isInteger(link[name]) && link[name] >= (name === "chips" ? 2 : 1);
      if (isOne) continue;
      const why = words[name] ? `none of ${words[name].join(", ")}` : "no such number";
      problems.push(`${name} = ${link[name]} is ${why}: here it is ${usual[name]}`);
      link[name] = usual[name];
    }
    note = problems.join("; ");
    for (const name of Object.keys(words)) controls[name].set(null, link[name]);
    controls.chips.set(powers(2 ** 16, 2), link.chips);
    for (const name of ["zero_axes", "tp_axes"]) controls[name].set([1], link[name]);
    controls.tokens.set([], link.tokens);
    bound();
  }

  function meshed() {                                     // another machine: as many axes as it has
    const axes = offered.torus[controls.cluster.value] || 1;
    controls.zero_axes.set([1], Math.max(1, axes - 1));
    controls.tp_axes.set([1], 1);
    bound();
  }

  function bound() {                                      // both share the axes that there are
    const axes = offered.torus[controls.cluster.value] || 1, strategy = controls.strategy.value;
    const zero = Math.min(axes, controls.zero_axes.value), tp = Math.min(axes, controls.tp_axes.value);
    const both = strategy === "both" && axes > 1, first = both ? Math.min(zero, axes - 1) : zero;
    const second = both ? Math.min(tp, axes - first) : tp;
    controls.zero_axes.set(upTo(both ? axes - second : axes), first);
    controls.tp_axes.set(upTo(both ? axes - first : axes), second);
    controls.zero_axes.hidden = strategy === "tp";
    controls.tp_axes.hidden = strategy === "zero-3";
    const { tokens, ...asked } = values(), isAnswered = more => mount.can("roofline", { ...asked, ...more });
    controls.chips.set(powers(2 ** 16, 2).filter(chips => isAnswered({ chips })), controls.chips.value);
    for (const name of ["zero_axes", "tp_axes"]) {
      controls[name].set(controls[name].values.filter(axes => isAnswered({ [name]: axes })), controls[name].value);
    }
  }

  const values = () => Object.fromEntries(Object.entries(controls).map(([name, { value }]) => [name, value]));

  const update = mount.latest(async signal => {
    const { tokens, ...asked } = values();
    answer = await mount.ask("roofline", asked, signal);
    mount.tell(note, false);
    controls.tokens.set(answer.tokens, nearest(answer.tokens, tokens));
    show();
  });

  function nearest(numbers, wanted) {
    return numbers.reduce((best, one) => Math.abs(Math.log(one / wanted)) < Math.abs(Math.log(best / wanted)) ? one : best);
  }

  // ------------------------------------------------------------------------------------------ in words

  const inTime = seconds => seconds >= 1 ? `${seconds.toPrecision(3)} s`
    : seconds >= 1e-3 ? `${(1e3 * seconds).toPrecision(3)} ms` : `${(1e6 * seconds).toPrecision(3)} µs`;
  const counted = tokens => Math.round(tokens).toLocaleString("en");

  function show() {
    mount.writeLink(values());
    const { chip, summary, least, planned_least: planned, features, ffn, tokens } = answer;
    const chips = controls.chips.value, at = tokens.indexOf(controls.tokens.value);
    mount.$(".verdict").replaceChildren(make("strong", {}, `On ${counted(chips)} ${chip}s, ${summary}.`),
      planned === null ? "" : planned === 0 ? " So does the planner say." : ` The planner says from ${counted(planned)} on.`);
    const [compute, zero, tp] = answer.roof[at], sent = Math.max(zero, tp), [shards, ranks] = answer.splits[at];
    const layout = controls.strategy.value === "both" ? ` With ZeRO-3 over ${shards} and tp over ${ranks}, which send least,` : "";
    const above = compute >= sent ? "compute is above, and hides them"
      : `messages are above, and a ${chip} computes ${Math.round(100 * compute / sent)}% of the time`;
    mount.$(".now").textContent = `${counted(tokens[at])} tokens of a ${chip} are ${counted(tokens[at] * chips)} of a step.${layout} ` +
      `${layout ? "" : "Then "}compute takes ${inTime(compute)} and messages ${inTime(sent)}: ${above}.`;
    mount.$(".lines").replaceChildren(chart(at));
    mount.$(".says").textContent = `Its layer is two matrices of D·F weights, and F decides how wide tp may be. A whole layer of this ` +
      `model has ${counted(features)} weights for each number that tp sends, where F is ${counted(ffn)}` +
      (least ? `: so the lines cross at ${counted(least)}.` : ".");
  }

  // ------------------------------------------------------------------------------------------- the lines

  function called(tokens, least) {
    const where = least === null ? "messages are above" : `compute is above from ${counted(least)} on`;
    return `seconds of a layer's forward, from ${counted(tokens[0])} to ${counted(tokens.at(-1))} tokens of a ` +
      `${answer.chip}: ${where}`;
  }

  function chart(at) {
    const { tokens, roof, planned, least } = answer;
    const shown = LINES.map(([name, color], i) => [name, color, "", roof.map(times => times[i])]);
    if (planned.some(Boolean)) {
      shown.push(["compute, planned", "currentColor", "5 4", planned.map(times => times && times[0])],
                 ["messages, planned", COLORS[3], "5 4", planned.map(times => times && times[1])]);
    }
    const drawn = shown.filter(([, , , line]) => line.some(value => value > 0));
    const all = drawn.flatMap(([, , , line]) => line).filter(value => value > 0);
    const low = Math.floor(Math.log10(Math.min(...all))), high = Math.ceil(Math.log10(Math.max(...all)));
    const last = tokens.length - 1, right = value => SIDE + Math.log2(value / tokens[0]) / Math.log2(tokens[last] / tokens[0]) * ACROSS;
    const up = seconds => TALL - (Math.log10(seconds) - low) / (high - low) * (TALL - 10);
    const svg = picture(SIDE + ACROSS + 26, TALL + BELOW + 20 * drawn.length, called(tokens, least));
    const line = (x1, x2, y1, y2, more) => svg.append(draw("line", { x1, x2, y1, y2, ...more }));
    const label = (text, x, y, more = {}) => svg.append(draw("text", { x, y, "font-size": 12, ...more }, text));
    for (let power = low; power <= high; power++) {
      line(SIDE, SIDE + ACROSS, up(10 ** power), up(10 ** power), { class: "grid" });
      label(inTime(10 ** power).replace(".00", "").replace(".0", ""), SIDE - 6, up(10 ** power) + 4, { "text-anchor": "end" });
    }
    tokens.forEach((value, i) => {
      if (i % 4) return;
      line(right(value), right(value), up(10 ** high), TALL, { class: "grid" });
      label(counted(value), right(value), TALL + 16, { "text-anchor": "middle" });
    });
    label(`tokens of a ${answer.chip}`, SIDE + ACROSS, TALL + 34, { "text-anchor": "end", class: "soft" });
    drawn.forEach(([name, color, dashes, values], i) => {
      const points = values.map((value, j) => value > 0 ? `${right(tokens[j])},${up(value)}` : "").filter(Boolean).join(" ");
      const y = TALL + BELOW + 20 * i;
      const path = draw("polyline", { points, fill: "none", stroke: color, "stroke-width": dashes ? 1.3 : 2.2, "stroke-dasharray": dashes, class: "curve" });
      path.dataset.line = name;
      svg.append(path);
      line(SIDE, SIDE + 30, y, y, { stroke: color, "stroke-width": dashes ? 1.3 : 2.2, "stroke-dasharray": dashes, class: "curve" });
      label(name, SIDE + 38, y + 4);
    });
    line(right(tokens[at]), right(tokens[at]), up(10 ** high), TALL, { stroke: "currentColor", "stroke-dasharray": "2 3" });
    if (least > tokens[0] && least < tokens[last]) {
      line(right(least), right(least), TALL - 8, TALL, { stroke: "currentColor", "stroke-width": 3, class: "crossing" });
      label(`from ${counted(least)} on`, right(least) + 6, TALL - 6, { class: "over" });
    }
    return svg;
  }

  setUp();
  begin();
  update();
  mount.onLink(() => {
    begin();
    update();
  });
};
