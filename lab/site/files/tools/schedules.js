// Pipeline schedules: chapter 07's lists, drawn and played.
"use strict";

TOOLS.schedules = mount => {
  const KINDS = { F: ["#355070", "F: forward"], B: ["#a8663d", "B: inputs"],
                  W: ["#3d7349", "W: weights"], BW: ["#b5432c", "BW: both"] };
  const PALER = [0, 0.6, 0.74, 0.86];                     // of a rank's slices: dark digits lie on the pale ones
  const HIGH = 30, ALIVE = 40, LEFT = 58;
  const DIGIT = 0.64, SMALLEST = 7.5, LONGEST = 4000;     // a digit's width over its size; pixels
  const LASTS = 9000;                                     // ms, of a play
  const names = ["schedule", "ranks", "micro_batches", "chunks", "breadth_first", "F", "B", "W"];
  const state = {}, controls = {};
  const isCalm = matchMedia("(prefers-reduced-motion: reduce)");
  let answer = null, now = 0, followed = null, scale = 1, shown = [], playing = null;

  function begin() {
    Object.assign(state, mount.begins(names));
  }

  function setUp() {
    const values = { ranks: upTo(16), micro_batches: upTo(64), chunks: upTo(4),
                     F: upTo(30).map(tenths => tenths / 10) };
    values.B = values.W = values.F;
    for (const name of names) {
      const changed = () => {
        state[name] = controls[name].value;
        update();
      };
      controls[name] = values[name] ? slider(name, values[name], values[name][0], changed)
        : selector(name, name === "schedule" ? window.CHOICES.schedules : ["false", "true"], "", changed);
      controls[name].all = values[name];
    }
    const few = mount.root.dataset.controls;
    mount.$(".question").append(...names.filter(name => !few || few.split(" ").includes(name)).map(name => controls[name]));
    showControls();
    controls.until = slider("until", [0], 0, () => { stop(); goTo(controls.until.value); });
    controls.follow = slider("follow", ["all"], "all", () => follow(controls.follow.value));
    mount.$(".play").append(controls.until, ...(few ? [] : [controls.follow]));
    mount.$(".run").addEventListener("click", () => playing ? stop() : play());
    mount.$(".next").addEventListener("click", () => { stop(); step(1); });
    mount.$(".previous").addEventListener("click", () => { stop(); step(-1); });
    mount.$(".time").addEventListener("click", event => {
      const action = event.target.closest(".action");
      if (action) follow(action.dataset.micro === String(followed) ? "all" : Number(action.dataset.micro));
    });
    new ResizeObserver(() => answer && drawn()).observe(mount.$(".time"));
  }

  const update = mount.latest(async signal => {
    stop();
    answer = await mount.answerTo("schedule", state, [], signal);
    fit();
    bound();
    mount.writeLink(state);
    show();
  });

  // Not every schedule takes any number of ranks and micro-batches: the answer has those that it is about.
  function fit() {
    const changed = ["ranks", "micro_batches"].filter(name => answer[name] !== state[name]);
    for (const name of changed) state[name] = answer[name];
    const now = changed.map(name => `${name.replace("_", "-")} ${answer[name]}`).join(" and ");
    if (changed.length) mount.tell(`${state.schedule} does not take these numbers: here it has ${now}`, false);
  }

  function bound() {                                      // to what is answered
    const isAnswered = (name, value) => mount.can("schedule", { ...state, [name]: value });
    for (const name of names) {
      const values = controls[name].all?.filter(value => isAnswered(name, value));
      controls[name].set(values, state[name]);
    }
    for (const option of $$("option", controls.schedule)) {
      option.disabled = option.value !== state.schedule && !isAnswered("schedule", option.value);
    }
    showControls();
  }

  function showControls() {                               // those that mean something
    for (const name of ["chunks", "breadth_first"]) controls[name].hidden = state.schedule !== "interleaved";
  }

  // ------------------------------------------------------------------------------------------ drawing

  const percent = share => `${(100 * share).toFixed(1)}%`;
  const several = (count, noun) => `${count} ${noun}${count === 1 ? "" : noun.endsWith("batch") ? "es" : "s"}`;
  const rounded = time => Number(time.toFixed(2));
  const sliceOf = (stage, rank) => answer.stages.flatMap((at, i) => at === rank ? [i] : []).indexOf(stage);

  function show() {
    const most = Math.max(...answer.alive.flat());
    mount.$(".verdict").replaceChildren(make("strong", {}, `bubble ${percent(answer.bubble)}`),
      ` of the work, simulated; by the closed form ${answer.formula === null ? "unknown" : percent(answer.formula)}. ` +
      `A rank has up to ${several(most, "micro-batch")}${answer.slices > 1 ? ` (of one slice of ${answer.slices})` : ""} alive.`);
    mount.$(".legend").replaceChildren(...legend());
    mount.$(".lists").textContent = answer.lists.map((list, rank) => `rank ${rank}  ${list}`).join("\n");
    mount.$(".drawing").textContent = answer.drawing;
    mount.$(".command").textContent = answer.command;
    mount.$(".more a").href = `schedules.html#${new URLSearchParams(state)}`;
    const times = new Set(answer.actions.flat().map(([, , , start]) => rounded(start)));
    controls.until.set([...times, rounded(answer.end)].sort((a, b) => a - b), rounded(answer.end));
    controls.follow.set(["all", ...upTo(state.micro_batches - 1, 0)], "all");
    now = answer.end;
    followed = null;
    mount.$(".time").dataset.wide = "";
    drawn();
  }

  function legend() {
    const seen = new Set(answer.actions.flat().map(([kind]) => kind));
    return Object.entries(KINDS).filter(([kind]) => seen.has(kind)).map(([, [fill, words]]) => {
      const item = make("li"), box = draw("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
      box.append(draw("rect", { width: 10, height: 10, fill }));
      item.append(box, words);
      return item;
    });
  }

  function drawn() {                                      // as wide as there is room, or as digits need
    const wide = mount.$(".time").clientWidth - LEFT - 2;
    if (mount.$(".time").dataset.wide !== String(wide)) {
      const shortest = Math.min(...answer.actions.flat().map(([, , , start, stop]) => stop - start));
      scale = Math.max(wide / answer.end, Math.min(0.9 * SMALLEST / shortest, LONGEST / answer.end));
      mount.$(".time").dataset.wide = wide;
      mount.$(".time").replaceChildren(...timeline());
      mount.$(".alive").replaceChildren(...aliveOverTime());
    }
    mark();
  }

  // The names of ranks stay where they are, what is beside them scrolls.
  function beside(high, label, chart) {
    const names = draw("svg", { width: LEFT, height: high * answer.actions.length, class: "names", "aria-hidden": "true" });
    const svg = picture(Math.ceil(answer.end * scale) + 2, high * answer.actions.length, label), place = make("div", { class: "scrolls" });
    answer.actions.forEach((list, rank) => {
      names.append(draw("text", { x: 0, y: rank * high + 14, "font-size": 13 }, `rank ${rank}`));
      chart(svg, names, list, rank);
    });
    svg.append(draw("line", { class: "now", y1: 0, y2: high * answer.actions.length }));
    place.append(svg);
    return [names, place];
  }

  function timeline() {
    const label = `${state.schedule} on ${several(state.ranks, "rank")}, ${several(state.micro_batches, "micro-batch")}: ` +
      `bubble ${percent(answer.bubble)}`;
    let left = 0;
    shown = [];
    const made = beside(HIGH, label, (svg, _, list, rank) => {
      const y = rank * HIGH;
      svg.append(draw("rect", { x: 0, y: y + 2, width: answer.end * scale, height: HIGH - 4, class: "empty" }));
      // F and BW that are one share their time: above and below.
      const together = new Map(), seen = new Map();
      for (const [, , , start] of list) together.set(start, (together.get(start) || 0) + 1);
      for (const [kind, stage, i, start, stop] of list) {
        const at = seen.get(start) || 0, high = (HIGH - 4) / together.get(start), wide = (stop - start) * scale;
        const group = draw("g", { class: "action" }), slice = sliceOf(stage, rank);
        seen.set(start, at + 1);
        Object.assign(group.dataset, { kind, micro: i, start, stop, rank });
        shown.push({ group, micro: i, start, stop });
        group.append(draw("rect", { x: start * scale, y: y + 2 + at * high, width: wide, height: high,
                                    fill: paler(KINDS[kind][0], PALER[slice]) }),
                     draw("title", {}, `${kind} of micro-batch ${i} in stage ${stage}: ${rounded(start)} to ${rounded(stop)}`));
        const digits = numberOf(i, start * scale + wide / 2, y + 2 + at * high + high / 2, wide, high);
        if (digits) {
          digits.setAttribute("class", slice ? "on-pale" : "on-color");
          group.append(digits);
        } else {
          left += 1;
        }
        svg.append(group);
      }
    });
    mount.$(".hint").textContent = left ? "Where a number has no room, a pointer above it is told." : "";
    return made;
  }

  // Upright or, where it is too narrow, turned; null: not even that.
  function numberOf(i, x, y, wide, high) {
    const length = String(i).length, upright = Math.min(12, high - 1, (wide - 1) / (DIGIT * length));
    const turned = Math.min(11, (wide - 0.5) / 0.8, (high - 1) / (DIGIT * length));
    const size = upright >= SMALLEST ? upright : turned;
    if (size < 0.9 * SMALLEST) return null;
    return draw("text", { x, y: y + 0.36 * size, "font-size": size, "text-anchor": "middle",
                          ...(size === upright ? {} : { transform: `rotate(-90 ${x} ${y})` }) }, i);
  }

  function paler(color, share) {                          // mixed with white
    const parts = [1, 3, 5].map(at => parseInt(color.slice(at, at + 2), 16));
    return `#${parts.map(part => Math.round(part + (255 - part) * share).toString(16).padStart(2, "0")).join("")}`;
  }

  function aliveOverTime() {
    const label = "micro-batches alive, at the most: " +
      answer.alive.map((alive, rank) => `${Math.max(...alive)} on rank ${rank}`).join(", ");
    return beside(ALIVE, label, (svg, names, _, rank) => {
      const formula = up(rank, answer.most_alive[rank]);
      names.append(draw("text", { x: 0, y: rank * ALIVE + 29, "font-size": 12, class: "count soft" }));
      svg.append(draw("path", { class: "living" }),
                 draw("line", { x1: 0, x2: answer.end * scale, y1: formula, y2: formula, class: "most" }));
    });
  }

  function up(rank, value) {                              // where so many are, in the row of a rank
    return (rank + 1) * ALIVE - 4 - value / Math.max(...answer.most_alive, 1) * (ALIVE - 10);
  }

  // ------------------------------------------------------------------------------------------ playing

  function mark() {                                       // what has begun by now, and the one followed
    const time = now + 1e-9;
    for (const { group, micro, start, stop } of shown) {
      const isOver = stop < time || now === answer.end;
      group.classList.toggle("later", !isOver && start + 1e-9 >= now);
      group.classList.toggle("running", !isOver);
      group.classList.toggle("other", followed !== null && micro !== followed);
      group.firstChild.setAttribute("width", Math.max(0, (isOver ? stop : Math.min(now, stop)) - start) * scale);
    }
    const paths = $$(".living", mount.$(".alive")), counts = $$(".count", mount.$(".alive"));
    answer.actions.forEach((list, rank) => {
      let path = `M 0 ${up(rank, 0)}`, alive = 0;
      list.forEach(([kind, , , start, stop], i) => {      // from an F's start until a backward's end
        const at = kind === "F" ? start : stop;
        if (at >= time && now < answer.end) return;
        alive = answer.alive[rank][i];
        path += ` H ${at * scale} V ${up(rank, alive)}`;
      });
      paths[rank].setAttribute("d", `${path} H ${now * scale} V ${up(rank, 0)} Z`);
      counts[rank].textContent = now === answer.end ? `up to ${Math.max(...answer.alive[rank])}`
        : `${alive} of ${answer.most_alive[rank]}`;
    });
    for (const line of $$(".now", mount.root)) {
      line.setAttribute("x1", now * scale);
      line.setAttribute("x2", now * scale);
    }
  }

  function goTo(time) {
    now = time >= rounded(answer.end) ? answer.end : time;
    const begun = controls.until.values.filter(one => one <= now + 0.005);
    controls.until.set(controls.until.values, begun.at(-1));
    mark();
    for (const place of $$(".scrolls", mount.root)) place.scrollLeft = now * scale - 0.7 * place.clientWidth;
  }

  function step(by) {                                     // to the next start of an action
    const times = controls.until.values, at = times.indexOf(controls.until.value) + by;
    goTo(times[Math.min(times.length - 1, Math.max(0, at))]);
  }

  function follow(micro) {
    followed = micro === "all" ? null : micro;
    controls.follow.set(controls.follow.values, micro);
    mark();
  }

  function play() {
    const from = now >= answer.end ? 0 : now, began = performance.now(), mine = {};
    const later = tick => isCalm.matches ? setTimeout(tick, Math.max(150, LASTS / controls.until.values.length))
      : requestAnimationFrame(tick);
    const tick = moment => {                              // slides; or jumps, for those who want no motion
      if (playing !== mine) return;
      if (isCalm.matches) step(1);
      else goTo(Math.max(now, from + (moment - began) / LASTS * answer.end));
      if (now >= answer.end) stop();
      else later(tick);
    };
    playing = mine;
    mount.$(".run").textContent = "stop";
    goTo(from);
    later(tick);
  }

  function stop() {
    playing = null;
    mount.$(".run").textContent = "play";
  }

  begin();
  setUp();
  update();
  mount.onLink(() => {
    begin();
    update();
  });
};
