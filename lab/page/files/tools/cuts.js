// Chapter 09's cuts: the ranks of a mesh, and what the chosen one holds.
"use strict";

TOOLS.cuts = mount => {
  const names = ["pp", "dp", "cp", "tp", "ep", "experts", "kv_heads", "layers", "rank"];
  const UNIT = 1.6, GAP = 28;                             // of a row or column; between matrices
  const state = {}, controls = {};
  let answer = null;

  function begin() {
    Object.assign(state, mount.begins(names));
  }

  function setUp() {
    const values = { experts: [0, 2, 4, 8, 16], kv_heads: [1, 2, 4, 8], layers: upTo(16), pp: upTo(8),
                     dp: upTo(8), cp: [1, 2, 4, 8], tp: [1, 2, 4, 8], ep: [1, 2, 4, 8] };
    for (const name of names.slice(0, -1)) {
      controls[name] = slider(name, values[name], state[name], () => {
        state[name] = controls[name].value;
        update();
      });
    }
    mount.$(".question").append(...Object.values(controls));
  }

  const update = mount.latest(async signal => {
    mount.writeLink(state);
    const { rank, ...mesh } = state;
    answer = await mount.ask("cuts", mesh, signal);
    state.rank = Math.min(state.rank, answer.ranks.length - 1);
    mount.tell("");
    show();
  });

  const holding = one => JSON.stringify([one.items, one.shards]);

  function show() {
    mount.writeLink(state);
    const kinds = [...new Set(answer.ranks.map(holding))];
    mount.$(".ranks").replaceChildren(table(kinds));
    const me = answer.ranks[state.rank], same = answer.ranks.filter(one => holding(one) === holding(me));
    const place = Object.entries(me.place).filter(([axis]) => answer.degrees[axis] > 1)
      .map(([axis, index]) => `${axis} ${index}`).join(", ") || "alone";
    mount.$(".which").textContent = `Rank ${me.rank}: ${place}`;
    const others = same.map(one => one.rank).filter(rank => rank !== me.rank);
    mount.$(".says").textContent = `It has ${me.items.join(", ")}. ` + (others.length
      ? `The same parameters lie on rank${others.length > 1 ? "s" : ""} ${others.join(", ")}, which sum their gradients ` +
        "with it (and with ZeRO share out what belongs to them)."
      : "No other rank holds all the same.") +
      (answer.degrees.tp > state.kv_heads ? " There are fewer kv heads than ranks of tp, so neighbours share one." : "");
    mount.$(".matrices").replaceChildren(matrices(me.shards, COLORS[kinds.indexOf(holding(me)) % COLORS.length]));
  }

  function table(kinds) {                                 // a row for each stage, in the order of ranks
    const rows = make("table", { class: "plans" });
    for (let stage = 0; stage < answer.degrees.pp; stage++) {
      const row = make("tr");
      row.append(make("td", {}, `pp ${stage}`));
      for (const one of answer.ranks.filter(one => one.place.pp === stage)) {
        const cell = make("td"), { dp, cp, tp } = one.place;
        const words = Object.entries({ dp, cp, tp }).filter(([axis]) => answer.degrees[axis] > 1)
          .map(([axis, index]) => `${axis}${index}`).join(" ");
        const button = make("button", { type: "button", "aria-pressed": one.rank === state.rank }, `${one.rank}  ${words}`);
        button.style.borderLeft = `.6rem solid ${COLORS[kinds.indexOf(holding(one)) % COLORS.length]}`;
        if (one.rank === state.rank) button.style.background = "var(--marked)";
        button.addEventListener("click", () => {
          state.rank = one.rank;
          show();
          $(`[aria-pressed=true]`, mount.$(".ranks")).focus();
        });
        cell.append(button);
        row.append(cell);
      }
      rows.append(row);
    }
    return rows;
  }

  function matrices(shards, color) {
    const names = Object.keys(shards);
    let x = 0, y = 22, row = 0, across = 0;
    const svg = picture(1, 1, "matrices, and the parts of them that this rank holds");
    for (const name of names) {
      const [shape, cuts] = shards[name], [rows, columns] = shape.slice(-2);
      const copies = shape.length > 2 ? shape[0] : 1, scale = copies > 1 || Math.max(rows, columns) > 64 ? UNIT / 2 : UNIT;
      const mine = part(shape, cuts), width = Math.max(columns * scale * copies + 4 * (copies - 1), 135);
      if (x + width > 900) { x = 0; y += row + GAP + 34; row = 0; }
      svg.append(draw("text", { x, y: y - 8, "font-size": 13 }, `${name}  ${shape.join(" × ")}`));
      for (let copy = 0; copy < copies; copy++) {         // of experts, one beside the other
        const left = x + copy * (columns * scale + 4), held = copies === 1 || mine[0][0] <= copy && copy < mine[0][1];
        const [[top, bottom], [from, to]] = mine.slice(-2);
        svg.append(draw("rect", { x: left, y, width: columns * scale, height: rows * scale, class: "empty" }));
        if (held) {
          svg.append(draw("rect", { x: left + from * scale, y: y + top * scale, width: (to - from) * scale,
                                    height: (bottom - top) * scale, fill: color, class: "held" }));
        }
      }
      svg.append(draw("text", { x, y: y + rows * scale + 14, "font-size": 11, class: "soft" }, inWords(shape, mine)));
      row = Math.max(row, rows * scale);
      x += width + GAP;
      across = Math.max(across, x);
    }
    svg.setAttribute("viewBox", `0 0 ${across} ${y + row + 20}`);
    svg.setAttribute("width", across);
    svg.setAttribute("height", y + row + 20);
    return svg;
  }

  function part(shape, cuts) {                            // [[first, last + 1]] of each dimension
    const mine = shape.map(size => [0, size]);
    for (const [dim, index, parts] of cuts) {
      const size = (mine[dim][1] - mine[dim][0]) / parts;
      mine[dim] = [mine[dim][0] + index * size, mine[dim][0] + (index + 1) * size];
    }
    return mine;
  }

  function inWords(shape, mine) {
    const what = shape.length > 2 ? ["experts", "rows", "columns"] : ["rows", "columns"];
    const cut = mine.map(([first, last], dim) => last - first < shape[dim] ? `${what[dim]} ${first} to ${last - 1}` : "")
      .filter(Boolean);
    return cut.join(", ") || "all of it";
  }

  begin();
  setUp();
  update();
  mount.onLink(() => {
    begin();
    for (const [name, control] of Object.entries(controls)) control.set(control.values, state[name]);
    update();
  });
};
