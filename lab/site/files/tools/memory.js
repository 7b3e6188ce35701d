// What each rank keeps under ZeRO: bytes, and whose part.
"use strict";

TOOLS.memory = mount => {
  const KINDS = [["parameters", "#355070"], ["gradients", "#a8663d"], ["optimizer states", "#6d597a"]];
  const STAGES = ["02", "zero1", "zero2", "zero3"], ROWS = 8;
  const BAR = { high: 18, row: 50 }, PART = { high: 16, row: 20, left: 58 };
  const names = ["billions", "ranks", "precision", "stage", "gpu"], shown = ["stage", "gpu"];
  const state = {}, controls = {};
  let answer = null, playing = null;

  function begin() {
    Object.assign(state, mount.begins(names));
    if (state.stage === Number(STAGES[0])) state.stage = STAGES[0];     // which reads like a number
  }

  function setUp() {
    const { precision, ...offered } = window.CHOICES.memory, values = { stage: STAGES, ...offered };
    const options = { precision, gpu: window.CHOICES.clusters };
    for (const name of ["stage", "ranks", "billions", "precision", "gpu"]) {
      const changed = () => {
        stop();
        state[name] = controls[name].value;
        if (shown.includes(name)) show();
        else update();
      };
      controls[name] = values[name] ? slider(name, values[name], values[name][0], changed)
        : selector(name, options[name], options[name][0], changed);
    }
    $("span", controls.billions).textContent = "Ψ, in billions";
    mount.$(".question").append(...Object.values(controls));
    mount.$(".legend").append(...KINDS.map(([kind, fill]) => {
      const item = make("li"), box = draw("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
      box.append(draw("rect", { width: 10, height: 10, fill }));
      item.append(box, document.createTextNode(kind));
      return item;
    }));
    mount.$(".run").addEventListener("click", () => playing ? stop() : play());
    mount.$(".next").addEventListener("click", () => { stop(); go(1); });
    mount.$(".previous").addEventListener("click", () => { stop(); go(-1); });
    new ResizeObserver(() => answer && show()).observe(mount.$(".bars"));
  }

  const update = mount.latest(async signal => {
    answer = await mount.answerTo("memory", state, shown, signal);
    bound();
    show();
  });

  function bound() {                                      // to what is there, and is answered
    const { stage, gpu, ...asked } = state;
    for (const [name, known] of [["stage", STAGES], ["gpu", Object.keys(answer.rooms)]]) {
      if (known.includes(state[name])) continue;
      mount.tell(`${name} = '${state[name]}' is none of ${known.join(", ")}`, false);
      state[name] = mount.begins([name], {})[name];
    }
    for (const name of ["ranks", "billions"]) {
      controls[name].all ??= controls[name].values;
      controls[name].set(controls[name].all.filter(value => mount.can("memory", { ...asked, [name]: value })), state[name]);
    }
    for (const name of ["stage", "precision", "gpu"]) controls[name].set(controls[name].values, state[name]);
  }

  // ------------------------------------------------------------------------------------------ drawing

  const sum = values => values.reduce((total, value) => total + value, 0);
  const inGB = bytes => `${Number((bytes / 1e9).toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 5 })} GB`;
  const ranksInWords = n => n === 1 ? "1 rank" : `${n.toLocaleString("en")} ranks`;
  const called = stage => stage === "02" ? "02 data parallel" : stage;

  function show() {
    mount.writeLink(state);
    const { stages, whole } = answer, now = stages[STAGES.indexOf(state.stage)];
    const all = sum(whole), mine = sum(now.kept), room = inGB(answer.rooms[state.gpu]);
    mount.$(".verdict").replaceChildren(make("strong", {}, `${called(state.stage)}: ${inGB(mine)}`),
      ` on each of ${ranksInWords(state.ranks)}, of ${inGB(all)} for ${state.billions.toLocaleString("en")} billion parameters. ` +
      (now.least[state.gpu] === null ? `It fits the ${room} of ${state.gpu} on no number of ranks up to 4,096.`
        : `From ${ranksInWords(now.least[state.gpu])} on it fits the ${room} of ${state.gpu}.`));
    $$("li", mount.$(".legend")).at(-1).lastChild.textContent =
      state.precision === "fp32" ? "optimizer states" : "optimizer states, and masters";
    for (const [place, picture] of [[".bars", bars], [".parts", parts]]) {
      const wide = Math.min(760, Math.max(280, mount.$(place).clientWidth)), key = `${wide} ${picture.shape()}`;
      if (mount.$(place).dataset.drawn !== key) mount.$(place).replaceChildren(picture.make(wide));
      mount.$(place).dataset.drawn = key;
      picture.fill(wide);
    }
    mount.$(".which").textContent = `Whose part it is, in ${called(state.stage)}: ` + (state.stage === "02" || state.ranks === 1
      ? "each rank keeps all of it." : "what is filled, its rank keeps; what is empty, another one keeps.");
  }

  function piece(kind, attributes) {                      // moves to its place: as in tools.css
    const rect = draw("rect", { fill: KINDS[kind][1], class: "piece", ...attributes });
    rect.dataset.kind = KINDS[kind][0];
    return rect;
  }

  function place(rect, from, wide) {
    rect.style.x = `${from}px`;
    rect.style.width = `${wide}px`;
  }

  // A bar for each stage, in bytes: the whole is as wide as the picture.
  const bars = {
    shape: () => "",
    make(wide) {
      const svg = picture(wide, BAR.row * STAGES.length + 16, ""), totals = [];
      STAGES.forEach((stage, row) => {
        const group = draw("g", { class: "stage" }), y = row * BAR.row + 20;
        group.dataset.stage = stage;
        group.append(draw("text", { x: 0, y: y - 6, "font-size": 13, class: "name" }, called(stage)),
                     draw("rect", { x: 0, y, width: wide, height: BAR.high, class: "empty" }),
                     ...KINDS.map((_, kind) => piece(kind, { y, height: BAR.high })));
        group.addEventListener("click", () => { stop(); setStage(stage); });
        svg.append(group);
        totals.push(draw("text", { x: wide, y: y - 6, "font-size": 13, "text-anchor": "end", class: "total over" }));
      });
      svg.append(draw("path", { class: "room", stroke: "currentColor", "stroke-dasharray": "4 3" }),
                 draw("text", { class: "room", y: BAR.row * STAGES.length + 8, "font-size": 12 }), ...totals);
      return svg;
    },
    fill(wide) {
      const all = sum(answer.whole), scale = wide / all, room = answer.rooms[state.gpu];
      answer.stages.forEach(({ name, kept }, row) => {
        const group = $$(".stage", mount.$(".bars"))[row];
        group.classList.toggle("chosen", name === state.stage);
        $$(".total", mount.$(".bars"))[row].textContent = wide > 480 && name !== "02"
          ? `${kept.map(inGB).join(" + ")} = ${inGB(sum(kept))}` : inGB(sum(kept));
        let from = 0;
        $$(".piece", group).forEach((rect, kind) => {
          rect.dataset.bytes = kept[kind];
          place(rect, from, kept[kind] * scale);
          from += kept[kind] * scale;
        });
      });
      $("svg", mount.$(".bars")).setAttribute("aria-label", "a rank keeps " + answer.stages
        .map(({ name, kept }) => `${inGB(sum(kept))} in ${called(name)}`).join(", "));
      const [line, text] = $$(".room", mount.$(".bars")), x = Math.min(room / all, 1) * wide;
      line.setAttribute("d", STAGES.map((_, row) => `M${x} ${row * BAR.row + 18}v${BAR.high + 4}`).join(""));
      line.setAttribute("visibility", room < all ? "visible" : "hidden");
      text.setAttribute("x", x);
      text.setAttribute("text-anchor", x > wide / 2 ? "end" : "start");
      text.textContent = room < all ? `${state.gpu}: ${inGB(room)}` : `all of it fits ${state.gpu}: ${inGB(room)}`;
    },
  };

  // A row for each rank, or for the first of them: all three kinds, and of each the part that it keeps.
  const rows = () => Math.min(state.ranks, ROWS);
  const parts = {
    shape: () => state.ranks,
    make(wide) {
      const svg = picture(wide, PART.row * (ROWS + 1), "");
      for (let rank = 0; rank < rows(); rank++) {
        const group = draw("g", { class: "rank" }), y = rank * PART.row;
        group.append(draw("text", { x: 0, y: y + 13, "font-size": 13 }, `rank ${rank}`),
                     ...KINDS.map(() => draw("rect", { y, height: PART.high, class: "empty" })),
                     ...KINDS.map((_, kind) => piece(kind, { y, height: PART.high })));
        svg.append(group);
      }
      const left = state.ranks - rows();
      if (left) {
        svg.append(draw("text", { x: 0, y: PART.row * ROWS + 13, "font-size": 13, class: "soft" },
                        `and ${ranksInWords(left)} more`));
      }
      return svg;
    },
    fill(wide) {
      const scale = (wide - PART.left) / sum(answer.whole), { kept } = answer.stages[STAGES.indexOf(state.stage)];
      $$(".rank", mount.$(".parts")).forEach((group, rank) => {
        let from = PART.left;
        const empty = $$(".empty", group);
        $$(".piece", group).forEach((rect, kind) => {
          const all = answer.whole[kind] * scale, mine = kept[kind] * scale;
          place(empty[kind], from, all);
          place(rect, from + (mine < all ? rank * mine : 0), mine);
          from += all;
        });
      });
      $("svg", mount.$(".parts")).setAttribute("aria-label", `${called(state.stage)} on ${ranksInWords(state.ranks)}: ` +
        KINDS.map(([kind], i) => `of the ${kind} a rank keeps ${kept[i] < answer.whole[i] ? `1/${state.ranks}` : "all"}`).join(", "));
    },
  };

  // ------------------------------------------------------------------------------------------ playing

  function setStage(stage) {
    state.stage = stage;
    controls.stage.set(STAGES, stage);
    show();
  }

  function go(by) {
    setStage(STAGES[(STAGES.indexOf(state.stage) + by + STAGES.length) % STAGES.length]);
  }

  function play() {
    mount.$(".run").textContent = "stop";
    const step = () => {
      go(1);
      if (state.stage === STAGES.at(-1)) stop();
    };
    playing = setInterval(step, 1600);
    step();
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
    update();
  });
};
