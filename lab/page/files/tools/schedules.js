// Pipeline schedules: chapter 07's lists, drawn and played.
"use strict";

TOOLS.schedules = mount => {
  const KIND = { F: "#355070", B: "#a8663d", W: "#3d7349", BW: "#b5432c" };
  const HIGH = 30, LEFT = 56, ROOM = 1000;
  const names = ["schedule", "ranks", "micro_batches", "chunks", "breadth_first", "F", "B", "W"];
  const state = {}, controls = {};
  let answer = null, playing = null;

  function begin() {
    Object.assign(state, mount.begins(names));
  }

  function setUp() {
    const changed = name => () => {
      state[name] = controls[name].value;
      update();
    };
    const values = { ranks: upTo(16), micro_batches: upTo(64), chunks: upTo(4),
                     F: upTo(30).map(tenths => tenths / 10) };
    values.B = values.W = values.F;
    for (const name of names) {
      controls[name] = values[name] ? slider(name, values[name], state[name], changed(name))
        : selector(name, name === "schedule" ? window.CHOICES.schedules : ["false", "true"], state[name],
                   changed(name));
    }
    mount.$(".question").append(...Object.values(controls));
    controls.until = slider("until", [0], 0, () => { stop(); mark(); });
    controls.follow = slider("follow", ["all"], "all", mark);
    mount.$(".play").append(controls.until, controls.follow);
    mount.$(".run").addEventListener("click", () => playing ? stop() : play());
    mount.$(".next").addEventListener("click", () => follow(1));
    mount.$(".previous").addEventListener("click", () => follow(-1));
  }

  const update = mount.latest(async signal => {
    stop();
    mount.writeLink(state);
    for (const name of ["chunks", "breadth_first"]) {
      controls[name].hidden = state.schedule !== "interleaved";
    }
    answer = await mount.ask("schedule", state, signal);
    mount.tell("");
    show();
  });

  // ------------------------------------------------------------------------------------------ drawing

  function show() {
    const { end, actions } = answer;
    mount.$(".verdict").replaceChildren(make("strong", {}, `bubble ${(100 * answer.bubble).toFixed(1)}%`),
      ` of the work, simulated from the lists; the closed form says ` +
      `${answer.formula === null ? "nothing here" : `${(100 * answer.formula).toFixed(1)}%`}. ` +
      `At the most ${Math.max(...answer.alive.map(alive => Math.max(...alive)))} micro-batches ` +
      (answer.slices > 1 ? `(of one slice of ${answer.slices}) ` : "") + "are alive on a rank.");
    mount.$(".time").replaceChildren(timeline(actions, end));
    mount.$(".alive").replaceChildren(aliveOverTime(actions, end));
    mount.$(".lists").textContent = answer.lists.map((list, rank) => `rank ${rank}  ${list}`).join("\n");
    mount.$(".drawing").textContent = answer.drawing;
    mount.$(".command").textContent = answer.command;
    controls.until.set(upTo(100, 0).map(part => part * end / 100).map(time => Number(time.toFixed(2))), end);
    controls.follow.set(["all", ...upTo(state.micro_batches - 1, 0)], "all");
    mark();
  }

  function timeline(actions, end) {
    const scale = ROOM / end;
    const svg = picture(LEFT + ROOM + 10, HIGH * actions.length + 24, "ranks below each other, time across");
    actions.forEach((list, rank) => {
      const y = rank * HIGH;
      svg.append(draw("text", { x: 0, y: y + 20, "font-size": 13 }, `rank ${rank}`),
                 draw("rect", { x: LEFT, y: y + 2, width: ROOM, height: HIGH - 4, class: "empty" }));
      // F and BW that are one share their time: above and below.
      const together = new Map();
      for (const [, , , start] of list) together.set(start, (together.get(start) || 0) + 1);
      const seen = new Map();
      for (const [kind, stage, i, start, stop] of list) {
        const parts = together.get(start), at = seen.get(start) || 0, high = (HIGH - 4) / parts;
        seen.set(start, at + 1);
        const group = draw("g", { class: "action" }), wide = (stop - start) * scale;
        Object.assign(group.dataset, { kind, micro: i, start, stop, rank });
        group.append(draw("rect", { x: LEFT + start * scale, y: y + 2 + at * high, width: wide, height: high,
                                    fill: KIND[kind], stroke: "white", "stroke-width": 0.5,
                                    "fill-opacity": isFirstSlice(stage, rank) ? 1 : 0.65 }));
        group.append(draw("title", {}, `${kind} of micro-batch ${i} in stage ${stage}: ${start} to ${stop}`));
        if (wide > 6 + 5 * String(i).length) {
          group.append(draw("text", { x: LEFT + start * scale + wide / 2, y: y + 2 + at * high + high / 2 + 4,
                                      "font-size": Math.min(12, high), "text-anchor": "middle",
                                      class: "on-color" }, i));
        }
        svg.append(group);
      }
    });
    svg.append(draw("line", { class: "now", y1: 0, y2: HIGH * actions.length, stroke: "currentColor",
                              "stroke-width": 1.5 }));
    Object.entries(KIND).forEach(([kind, fill], at) => {
      const x = LEFT + 130 * at, y = HIGH * actions.length + 8;
      const words = { F: "F: forward", B: "B: inputs", W: "W: weights", BW: "BW: both at once" }[kind];
      svg.append(draw("rect", { x, y, width: 12, height: 12, fill }),
                 draw("text", { x: x + 17, y: y + 11, "font-size": 12 }, words));
    });
    return svg;
  }

  const isFirstSlice = (stage, rank) => answer.stages.indexOf(rank) === stage;

  function aliveOverTime(actions, end) {
    const most = Math.max(...answer.most_alive, 1), high = 44, scale = ROOM / end;
    const svg = picture(LEFT + ROOM + 10, (high + 8) * actions.length, "micro-batches alive, over time");
    actions.forEach((list, rank) => {
      const base = (high + 8) * (rank + 1) - 6, up = value => base - value / most * (high - 8);
      let path = `M ${LEFT} ${base}`;
      list.forEach(([kind, , , start, stop], i) => {      // from an F's start until a backward's end
        const at = kind === "F" ? start : stop;
        path += ` H ${LEFT + at * scale} V ${up(answer.alive[rank][i])}`;
      });
      const formula = up(answer.most_alive[rank]);
      svg.append(draw("text", { x: 0, y: base - 12, "font-size": 13 }, `rank ${rank}`),
                 draw("text", { x: LEFT - 6, y: formula + 4, "font-size": 11, "text-anchor": "end",
                                class: "soft" }, answer.most_alive[rank]),
                 draw("path", { d: `${path} H ${LEFT + ROOM} V ${base} Z`, fill: KIND.F, "fill-opacity": 0.5 }),
                 draw("line", { x1: LEFT, x2: LEFT + ROOM, y1: formula, y2: formula, stroke: "currentColor",
                                "stroke-dasharray": "4 3", "stroke-width": 0.8 }));
    });
    return svg;
  }

  // ------------------------------------------------------------------------------------------ playing

  function mark() {                                       // what has begun by now, and the one followed
    const until = controls.until.value, micro = controls.follow.value;
    for (const action of $$(".time .action", mount.root)) {
      const begun = Number(action.dataset.start) < until;
      const followed = micro === "all" || action.dataset.micro === String(micro);
      action.setAttribute("opacity", !begun ? 0 : followed ? 1 : 0.15);
    }
    const x = LEFT + until / answer.end * ROOM;
    mount.$(".now").setAttribute("x1", x);
    mount.$(".now").setAttribute("x2", x);
  }

  function follow(by) {
    const values = controls.follow.values, at = values.indexOf(controls.follow.value);
    controls.follow.set(values, values[(at + by + values.length) % values.length]);
    mark();
  }

  function play() {
    const steps = controls.until.values;
    let at = controls.until.value >= answer.end ? 0 : steps.indexOf(controls.until.value);
    mount.$(".run").textContent = "stop";
    playing = setInterval(() => {
      at += 1;
      controls.until.set(steps, steps[at]);
      mark();
      if (at >= steps.length - 1) stop();
    }, 90);
  }

  function stop() {
    clearInterval(playing);
    playing = null;
    mount.$(".run").textContent = "play";
  }

  begin();
  setUp();
  update();
  mount.onLink(() => {
    begin();
    for (const name of names) controls[name].set(controls[name].values, state[name]);
    update();
  });
};
