// The cuts of chapters 09 and 04: the ranks of a mesh, and what the chosen one holds.
"use strict";

TOOLS.cuts = mount => {
  const names = ["chapter", "pp", "dp", "cp", "tp", "ep", "experts", "kv_heads", "layers", "rank"];
  const VALUES = window.CHOICES.cuts;
  const ALONE = { pp: 1, dp: 1, cp: 1, ep: 1, experts: 0 };       // what chapter 04 has of other axes
  const UNIT = 1.6, GAP = 24, LEAST = 130, SPLIT = 3;     // of a row or column; between matrices; a matrix; experts
  const state = {}, controls = {};
  let answer = null, isLink = true;

  function begin() {
    Object.assign(state, mount.begins(names));
    isLink = true;
  }

  function setUp() {
    const few = mount.root.dataset.controls;
    for (const name of names.slice(0, -1)) {
      const changed = () => {
        state[name] = controls[name].value;
        if (state.chapter === "04_tensor_parallel") Object.assign(state, ALONE);
        update();
      };
      controls[name] = name === "chapter" ? selector(name, VALUES.chapter, "", changed) : slider(name, [state[name]], state[name], changed);
      if (!few || few.split(" ").includes(name)) mount.$(".question").append(controls[name]);
    }
    new ResizeObserver(() => answer && drawn()).observe(mount.$(".matrices"));
  }

  const update = mount.latest(async signal => {
    answer = await mount.answerTo("cuts", state, ["rank"], signal);
    bound();
    show();
  });

  function bound() {                                      // to what exists beside the others, and is answered
    const { rank, ...asked } = state, last = answer.ranks.length - 1;
    for (const name of names.slice(0, -1)) {
      controls[name].set(VALUES[name].filter(value => mount.can("cuts", { ...asked, [name]: value })), state[name]);
    }
    if (!answer.ranks[rank]) {
      state.rank = isLink ? 0 : last;
      if (isLink) mount.tell(`rank = '${rank}' is none of 0 to ${last}`, false);
    }
    isLink = false;
  }

  // -------------------------------------------------------------------------------------------- words

  const placed = (place, axes) => axes.filter(axis => answer.degrees[axis] > 1).map(axis => `${axis} ${place[axis]}`).join(", ");

  function inARow(names) {                                // block1, block2, block3 are block1 to block3
    const blocks = names.filter(name => name.startsWith("block"));
    const told = blocks.length > 2 ? [`${blocks[0]} to ${blocks.at(-1)}`] : blocks;
    return [...names.filter(name => name === "embedding"), ...told, ...names.filter(name => name === "head")].join(", ");
  }

  function inWords(shape, mine) {
    const what = shape.length > 2 ? ["experts", "rows", "columns"] : ["rows", "columns"];
    const cut = mine.map(([first, end], dim) => end - first < shape[dim] ? `${what[dim]} ${first} to ${end - 1}` : "")
      .filter(Boolean);
    return cut.join(", ") || "all of it";
  }

  function show() {
    mount.writeLink(state);
    mount.$(".more a").href = `cuts.html#${new URLSearchParams(state)}`;
    const me = answer.ranks[state.rank], { items } = answer.holdings[me.holding];
    const others = answer.ranks.filter(one => one !== me && one.holding === me.holding).map(one => one.rank);
    const where = placed(me.place, ["pp", "dp", "cp", "tp", "ep"]);
    mount.$(".verdict").replaceChildren(make("strong", {}, `Rank ${me.rank}${where ? `, at ${where}` : ""}`),
      `: it has ${inARow(items)}. ` + (others.length
        ? `The same parameters lie on ${others.length > 1 ? `ranks ${others.join(", ")}, which sum their gradients with it.`
          : `rank ${others[0]}, which sums its gradients with it.`}`
        : "No other rank holds all the same.") +
      (answer.degrees.tp > state.kv_heads ? " There are fewer kv heads than ranks of tp, so neighbours share one." : ""));
    mount.$(".ranks").replaceChildren(table(others));
    drawn();
  }

  // ------------------------------------------------------------------------------------------ drawing

  function color(holding) {
    const count = answer.holdings.length;
    return count <= COLORS.length ? COLORS[holding] : `hsl(${Math.round(360 * holding / count)} 45% 45%)`;
  }

  function table(others) {                         // as the lesson draws a mesh: outer axes down, inner ones across
    const rows = make("table", { class: "mesh" }), { pp, dp, cp, tp } = answer.degrees, wide = cp * tp;
    const head = make("tr");
    head.append(make("td"), ...answer.ranks.slice(0, wide).map(one => make("th", {}, placed(one.place, ["cp", "tp"]))));
    if (wide > 1) rows.append(head);
    for (let first = 0; first < pp * dp * wide; first += wide) {
      const row = make("tr");
      row.append(make("th", {}, placed(answer.ranks[first].place, ["pp", "dp"])));
      for (const one of answer.ranks.slice(first, first + wide)) {
        const cell = make("td"), isMine = one.rank === state.rank;
        const button = make("button", { type: "button", "aria-pressed": isMine,
                                        "aria-label": `rank ${one.rank}` }, one.rank), strip = make("span");
        if (answer.degrees.ep > 1) button.append(make("small", {}, ` ep ${one.place.ep}`));
        strip.style.background = color(one.holding);
        button.prepend(strip);
        button.classList.toggle("alike", others.includes(one.rank));
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

  function drawn() {
    const { holding } = answer.ranks[state.rank];
    const wide = Math.min(900, Math.max(280, mount.$(".matrices").clientWidth));
    mount.$(".matrices").replaceChildren(matrices(answer.holdings[holding].shards, color(holding), wide));
  }

  function matrices(shards, fill, most) {
    let x = 0, y = 18, row = 0;
    const svg = picture(1, 1, `what rank ${state.rank} holds: ` + Object.entries(shards)
      .map(([name, [shape, cuts]]) => `of ${name} ${inWords(shape, part(shape, cuts))}`).join("; "));
    for (const [name, [shape, cuts]] of Object.entries(shards)) {
      const [rows, columns] = shape.slice(-2), copies = shape.length > 2 ? shape[0] : 1;
      const usual = copies > 1 || Math.max(rows, columns) > 64 ? UNIT / 2 : UNIT;
      const scale = Math.min(usual, (most - SPLIT * (copies - 1)) / (columns * copies));
      const mine = part(shape, cuts), words = inWords(shape, mine), title = `${name}: ${shape.join(" × ")}`;
      const said = Math.max(7 * title.length, 6.2 * words.length);
      const wide = Math.max(columns * scale * copies + SPLIT * (copies - 1), LEAST, said);
      if (x && x + wide > most) {
        x = 0;
        y += row + GAP + 34;
        row = 0;
      }
      svg.append(draw("text", { x, y: y - 5, "font-size": 13 }, title));
      for (let copy = 0; copy < copies; copy++) {         // of experts, one beside the other
        const left = x + copy * (columns * scale + SPLIT), held = copies === 1 || mine[0][0] <= copy && copy < mine[0][1];
        const [[top, bottom], [from, to]] = mine.slice(-2);
        svg.append(draw("rect", { x: left, y, width: columns * scale, height: rows * scale, class: "empty" }));
        if (held) {
          const rect = draw("rect", { x: left + from * scale, y: y + top * scale, width: (to - from) * scale,
                                      height: (bottom - top) * scale, fill, class: "held" });
          rect.dataset.matrix = name;
          svg.append(rect);
        }
      }
      svg.append(draw("text", { x, y: y + rows * scale + 14, "font-size": 12, class: "soft" }, words));
      row = Math.max(row, rows * scale);
      x += wide + GAP;
    }
    const high = y + row + 20;
    for (const [key, value] of [["viewBox", `0 0 ${most} ${high}`], ["width", most], ["height", high]]) svg.setAttribute(key, value);
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

  begin();
  setUp();
  update();
  mount.onLink(() => {
    begin();
    update();
  });
};
