// Collectives, played: what each rank has, and what travels in each round.
"use strict";

TOOLS.collectives = mount => {
  const WIDE = 600, LEFT = 50, GAP = 8, LEAST = 60, TALL = 26, PITCH = 30, BAR = 4, FONT = 12, LETTER = 0.68;
  const MOVES = 700, RESTS = 700;                       // ms of a round that is played
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const state = {}, controls = {};
  let answer = null, playing = null;

  const last = () => answer.rounds.length;
  const column = () => Math.max(LEAST + GAP, (Math.min(WIDE, mount.$(".stage").clientWidth) - LEFT) / answer.ranks);
  const cellWide = () => column() - GAP;
  const middle = rank => LEFT + rank * column() + cellWide() / 2;

  function setUp() {
    const asks = () => { stop(); read(); update(); };
    controls.collective = selector("collective", CHOICES.collectives, CHOICES.collectives[0], asks);
    controls.ranks = slider("ranks", upTo(8, 2), 2, asks);
    controls.round = slider("round", [0], 0, () => { stop(); go(controls.round.value); });
    mount.$(".question").append(...Object.values(controls));
    mount.$(".run").addEventListener("click", () => playing ? stop() : play());
    mount.$(".next").addEventListener("click", () => { stop(); state.round === last() ? go(0) : advance(); });
    mount.$(".previous").addEventListener("click", () => { stop(); go(state.round ? state.round - 1 : last()); });
  }

  function begin() {                                    // as a link has it
    stop();
    Object.assign(state, mount.begins(["collective", "ranks", "round"]));
    update();
  }

  function read() {                                     // another collective begins before its first round
    Object.assign(state, { collective: controls.collective.value, ranks: controls.ranks.value, round: 0 });
  }

  const update = mount.latest(async signal => {
    answer = await mount.answerTo("collective", state, ["round"], signal);
    controls.collective.set(null, state.collective);
    controls.ranks.set(controls.ranks.values, state.ranks);
    if (!upTo(last(), 0).includes(state.round)) {
      const asked = state.round;
      state.round = Math.min(last(), Math.max(0, Math.round(asked) || 0));
      mount.tell(`There is no round ${asked} of ${last()}: this is ${state.round}.`, false);
    }
    showCosts();
    show();
  });

  // ---------------------------------------------------------------------------------------- in words

  const nameOf = cell => cell === "" ? "" : cell.match(/[a-z]/g).map(letter => letter + cell.replace(/[a-z]+/, "")).join("+");
  const briefly = cell => nameOf(cell).length * LETTER * FONT <= cellWide() - 6 ? nameOf(cell) : cell;

  function sizeOf(cells) {                              // of a message
    if (answer.collective === "barrier") return "a byte";
    return cells.length === answer.parts ? "S bytes" : `S/${answer.parts / cells.length} bytes`;
  }

  function inWords(round) {
    if (round === 0) {
      return answer.collective === "barrier" ? `: each of ${answer.ranks} ranks knows of itself alone`
        : `: x of each rank is S bytes, ${answer.parts === 1 ? "sent whole" : `in ${answer.parts} parts`}`;
    }
    const messages = answer.rounds[round - 1], pairs = messages.map(([from, to]) => `${from}\u00a0→\u00a0${to}`).join(", ");
    return messages.length === 1 ? `: ${sizeOf(messages[0][2])}, rank ${pairs}`
      : `: ${messages.length} messages at the same time, each of ${sizeOf(messages[0][2])}, ranks ${pairs}`;
  }

  function label(round) {                               // what the picture says
    const has = answer.states[round].map((rows, rank) => `rank ${rank} has ` +
      rows.map(cells => cells.map(nameOf).filter(Boolean).join(", ")).join("; beside x "));
    return `${answer.collective} on ${answer.ranks} ranks, ${round ? `after round ${round} of ${last()}` : "before it"}: ${has.join(". ")}`;
  }

  const share = value => Number(value.toFixed(3));
  const duration = seconds => seconds < 1e-3 ? `${Number((1e6 * seconds).toPrecision(3))} µs`
    : `${Number((1e3 * seconds).toPrecision(3))} ms`;

  function showCosts() {
    const isBarrier = answer.collective === "barrier", units = ["", ...Array(2).fill(isBarrier ? "\u00a0bytes" : "\u00a0S")];
    mount.$(".costs tbody").replaceChildren(...answer.costs.map(([what, played, formula, value], i) => {
      const row = make("tr");
      row.append(make("th", { scope: "row" }, what), make("td", {}, share(played) + units[i]),
                 make("td", {}, `${formula} = ${share(value)}${units[i]}`));
      return row;
    }));
    const [machine, latency, bandwidth] = answer.machine, sizes = ["1 kB", "1 MB", "1 GB"];
    const takes = answer.takes.map(([, seconds], i) => `${duration(seconds)} for ${sizes[i]}`);
    mount.$(".takes").textContent = `With α = ${duration(latency)} and B = ${bandwidth / 1e9} GB/s (${machine}) it takes ` +
      (isBarrier ? `${duration(answer.takes[0][1])}.` : `${takes.slice(0, 2).join(", ")} and ${takes[2]}.`);
    mount.$(".says").replaceChildren(make("a", { href: `00_collectives.html#${answer.collective}` }, answer.collective), ": ",
                                     answer.says.replaceAll("`", ""));
    const isRounded = !Number.isInteger(Math.log2(answer.ranks)) && answer.costs.some(([, , formula]) => /log2 N/.test(formula));
    const isBeyond = answer.costs.some(([, , formula]) => formula.includes("P"));
    mount.$(".key small").textContent = (isBarrier ? "a: has heard that rank 0 has come. "
      : answer.parts === 1 ? "ab is a+b. " : "ab1 is a1+b1: part 1 of the x of ranks 0 and 1, added up. ") +
      "The bar in a cell has a color for each rank that is in it. Marked: what the round has brought. In the end, framed: the result." +
      (isRounded ? " log2 N is rounded up." : "") +
      (isBeyond ? ` P: ${answer.parts}, the largest power of 2 that is no more than N.` : "");
  }

  // ---------------------------------------------------------------------------------------- the picture

  const arcs = () => Math.max(...answer.rounds.flat().map(([from, to]) => heightOf(from, to))) + 12;
  const heightOf = (from, to) => 12 + 11 * Math.abs(from - to) + (from > to ? 6 : 0);
  const firstOf = row => arcs() + 22 + row * (answer.states[0][0][0].length * PITCH + 20);    // y of a row's first cell

  function show() {
    const round = state.round;
    controls.round.set(upTo(last(), 0), round);
    mount.writeLink(state);
    const more = mount.$(".more a");
    if (more) more.href = `collectives.html#${new URLSearchParams(state)}`;
    mount.$(".verdict").replaceChildren(make("strong", {}, round ? `Round ${round} of ${last()}` : "Before"), inWords(round));
    stage(drawn(round, round));
  }

  function stage(svg) {                                 // with a stop of Tab only if it can be scrolled
    const place = mount.$(".stage");
    place.replaceChildren(svg);
    if (place.scrollWidth > place.clientWidth) place.tabIndex = 0;
    else place.removeAttribute("tabindex");
    return svg;
  }

  // The state after a round, with the messages of another one.
  function drawn(round, sending) {
    const rows = Math.max(...answer.states[0].map(rows => rows.length));
    const deepest = Math.max(...answer.states[0].map(rows => rows.length > 1 ? rows[1].length : 0));
    const width = LEFT + answer.ranks * column(), height = firstOf(rows - 1) + PITCH * (rows > 1 ? deepest : answer.states[0][0][0].length);
    const svg = picture(width, height, label(round)), text = (at, words, more = {}) => svg.append(draw("text", {
      "font-size": FONT, "text-anchor": "middle", ...at, ...more }, words));
    answer.states[round].forEach((cells, rank) => {
      text({ x: middle(rank), y: arcs() + 14 }, `rank ${rank}`, { "font-weight": 600 });
      cells.forEach((row, i) => row.forEach((cell, at) => svg.append(drawnCell(cell, rank, i, at, kindOf(round, rank, i, at)))));
    });
    const parts = answer.states[0][0][0].length, left = { "text-anchor": "end", class: "soft" };
    for (let at = 0; at < parts; at++) {
      text({ x: LEFT - 8, y: firstOf(0) + at * PITCH + 16 }, answer.collective === "barrier" ? `rank ${at}`
        : parts === 1 ? "x" : `part ${at}`, left);
    }
    if (rows > 1) text({ x: LEFT, y: firstOf(1) - 6 }, "gathered in memory beside x", { "text-anchor": "start", class: "soft" });
    for (const [from, to] of answer.rounds[sending - 1] ?? []) svg.append(arc(from, to));
    return svg;
  }

  function kindOf(round, rank, row, at) {
    const [given, begin, end] = answer.gives[rank], before = answer.states[round - 1]?.[rank][row][at];
    if (round === last()) return row === given && at >= begin && at < end ? "cell given" : "cell spent";
    return round && answer.states[round][rank][row][at] !== before ? "cell changed" : "cell";
  }

  function drawnCell(cell, rank, row, at, kind) {
    const x = LEFT + rank * column(), y = firstOf(row) + at * PITCH, group = draw("g", { class: kind });
    Object.assign(group.dataset, { rank, row, at, cell });
    group.append(draw("rect", { x, y, width: cellWide(), height: TALL, rx: 3 }));
    if (kind !== "travels") {
      group.append(draw("text", { x: x + cellWide() / 2, y: y + 16, "font-size": FONT, "text-anchor": "middle" }, briefly(cell)));
    }
    const wide = (cellWide() - 4) / answer.ranks;
    for (let i = 0; i < answer.ranks; i++) {
      if (cell.includes("abcdefgh"[i])) {
        group.append(draw("rect", { x: x + 2 + i * wide, y: y + TALL - BAR - 1, width: wide - 1, height: BAR, fill: COLORS[i], class: "curve" }));
      }
    }
    return group;
  }

  function arc(from, to) {                              // over the ranks, from one to the other
    const aside = from < to ? 14 : -4, begin = middle(from) + aside, end = middle(to) - aside, base = arcs() - 1;
    const top = base - 4 / 3 * heightOf(from, to), turn = (end - begin) / 6, group = draw("g", { class: "message" });
    Object.assign(group.dataset, { from, to });
    const [dx, dy] = [turn, base - top], long = Math.hypot(dx, dy), [ux, uy] = [dx / long, dy / long];
    const tip = [[end, base], [end - 8 * ux + 4 * uy, base - 8 * uy - 4 * ux], [end - 8 * ux - 4 * uy, base - 8 * uy + 4 * ux]];
    group.append(draw("path", { d: `M${begin} ${base}C${begin + turn} ${top} ${end - turn} ${top} ${end - 6 * ux} ${base - 6 * uy}` }),
                 draw("polygon", { points: tip.map(point => point.join(",")).join(" ") }),
                 draw("title", {}, `rank ${from} sends to rank ${to}`));
    return group;
  }

  // ---------------------------------------------------------------------------------------- playing

  function go(round) {
    mount.tell("", false);
    state.round = round;
    show();
  }

  // One round further: what is sent travels, and is there. Returns when it is.
  async function advance() {
    const next = state.round + 1;
    if (next > last()) return;
    if (!calm.matches) {
      const svg = stage(drawn(state.round, next)), moves = [];
      for (const [from, to, cells, first, row, into] of answer.rounds[next - 1]) {
        const chip = draw("g");
        chip.append(...cells.flatMap((cell, i) => cell ? [drawnCell(cell, from, 0, first + i, "travels")] : []));
        svg.append(chip);
        const dx = (to - from) * column(), dy = firstOf(row) - firstOf(0) + (into - first) * PITCH;
        moves.push(chip.animate([{ transform: "none" }, { transform: `translate(${dx}px, ${dy}px)` }],
                                { duration: MOVES, easing: "ease-in-out", fill: "forwards" }).finished);
      }
      await Promise.all(moves);
      if (svg !== mount.$(".stage svg")) return;        // something else is shown by now
    }
    go(next);
  }

  async function play() {
    const mine = playing = {};
    mount.$(".run").textContent = "stop";
    if (state.round === last()) go(0);
    while (playing === mine && state.round < last()) {
      await advance();
      await new Promise(resolve => { setTimeout(resolve, RESTS); });
    }
    if (playing === mine) stop();
  }

  function stop() {
    playing = null;
    mount.$(".run").textContent = "play";
  }

  setUp();
  begin();
  mount.onLink(begin);
};
