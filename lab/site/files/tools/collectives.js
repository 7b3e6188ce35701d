// Collectives, played: what each rank has, and what travels in each round.
"use strict";

TOOLS.collectives = mount => {
  const WIDE = 600, LEFT = 50, GAP = 8, LEAST = 60, TALL = 26, PITCH = 30, BAR = 4, FONT = 12, LETTER = 0.68;
  const LETTERS = "abcdefgh";                           // of the ranks
  const MOVES = 700, RESTS = 700;                       // ms of a round that is played
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const state = {}, controls = {};
  let answer = null, playing = null, moving = null;     // moving: the round whose messages are on their way

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
    mount.$(".run").addEventListener("click", () => playing ? arrive() : play());
    mount.$(".next").addEventListener("click", () => {
      const hasArrived = arrive();                      // at once, at a quick click: it asks for the next round
      if (state.round < last()) advance();
      else if (!hasArrived) go(0);
    });
    mount.$(".previous").addEventListener("click", () => { arrive(); go(state.round ? state.round - 1 : last()); });
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
    moving = null;                                      // those of another one
    controls.collective.set(null, state.collective);
    controls.ranks.set(controls.ranks.values, state.ranks);
    if (!upTo(last(), 0).includes(state.round)) {
      const asked = state.round;
      state.round = Math.min(last(), Math.max(0, Math.round(asked) || 0));
      mount.tell(`There is no round ${asked} of ${last()}: this is ${state.round}.`, false);
    }
    tell();
    show();
  });

  // ---------------------------------------------------------------------------------------- in words

  const isBarrier = () => answer.collective === "barrier";
  const rounded = value => Number(value.toFixed(3));

  function nameOf(cell) {                               // "ab1" is a1+b1
    const part = cell.replace(/[a-z]+/, "");
    return [...cell.replace(part, "")].map(letter => letter + part).join("+");
  }

  function briefly(cell) {                              // in as many letters as there is room for
    return nameOf(cell).length * LETTER * FONT <= cellWide() - 6 ? nameOf(cell) : cell;
  }

  function sizeOf(cells) {                              // of a message
    if (isBarrier()) return "a byte";
    return cells.length === answer.parts ? "S bytes" : `S/${answer.parts / cells.length} bytes`;
  }

  function inWords(round) {
    const { parts, ranks, rounds } = answer;
    if (round === 0) {
      return isBarrier() ? `: each of ${ranks} ranks knows of itself alone`
        : `: x of each rank is S bytes, ${parts === 1 ? "sent whole" : `in ${parts} parts`}`;
    }
    const messages = rounds[round - 1], size = sizeOf(messages[0][2]);
    const pairs = messages.map(([from, to]) => `${from}\u00a0→\u00a0${to}`).join(", ");
    return messages.length === 1 ? `: ${size}, rank ${pairs}`
      : `: ${messages.length} messages at the same time, each of ${size}, ranks ${pairs}`;
  }

  function label(round) {                               // what the picture says
    const has = answer.states[round].map((rows, rank) => `rank ${rank} has ` +
      rows.map(cells => cells.map(nameOf).filter(Boolean).join(", ")).join("; beside x "));
    const when = round ? `after round ${round} of ${last()}` : "before it";
    return `${answer.collective} on ${answer.ranks} ranks, ${when}: ${has.join(". ")}`;
  }

  function duration(seconds) {
    const [number, unit] = seconds < 1e-3 ? [1e6 * seconds, "µs"] : [1e3 * seconds, "ms"];
    return `${Number(number.toPrecision(3))} ${unit}`;
  }

  function tell() {                                     // what is so in all rounds
    const name = make("a", { href: `00_collectives.html#${answer.collective}` }, answer.collective);
    mount.$(".says").replaceChildren(name, `: ${answer.summary.replaceAll("`", "")}`);
    mount.$(".costs tbody").replaceChildren(...answer.costs.map(([what, played, formula, value], i) => {
      const row = make("tr"), unit = i === 0 ? "" : isBarrier() ? "\u00a0bytes" : "\u00a0S";
      row.append(make("th", { scope: "row" }, what), make("td", {}, rounded(played) + unit),
                 make("td", {}, `${formula} = ${rounded(value)}${unit}`));
      return row;
    }));
    const [machine, latency, bandwidth] = answer.machine;
    const [least, some, most] = answer.takes.map(([, seconds]) => duration(seconds));
    mount.$(".takes").textContent = `With α = ${duration(latency)} and B = ${bandwidth / 1e9} GB/s (${machine}) ` +
      `it takes ${isBarrier() ? least : `${least} for 1 kB, ${some} for 1 MB and ${most} for 1 GB`}.`;
    mount.$(".key small").textContent = key().join(" ");
  }

  function key() {
    const formulas = answer.costs.map(one => one[2]).join(), isPower = Number.isInteger(Math.log2(answer.ranks));
    const lines = [isBarrier() ? "a: has heard that rank 0 has come." : answer.parts === 1 ? "ab is a+b."
      : "ab1 is a1+b1: part 1 of the x of ranks 0 and 1, added up."];
    lines.push("The bar in a cell has a color for each rank that is in it.",
               "Marked: what the round has brought. In the end, framed: the result.");
    if (formulas.includes("log2 N") && !isPower) lines.push("log2 N is rounded up.");
    if (formulas.includes("P")) lines.push(`P: ${answer.parts}, the largest power of 2 that is no more than N.`);
    return lines;
  }

  // ---------------------------------------------------------------------------------------- the picture

  const arcs = () => Math.max(...answer.rounds.flat().map(([from, to]) => heightOf(from, to))) + 12;
  const heightOf = (from, to) => 12 + 11 * Math.abs(from - to) + (from > to ? 6 : 0);
  const parts = () => answer.states[0][0][0].length;    // of x; a barrier's are the ranks
  const firstOf = row => arcs() + 22 + row * (parts() * PITCH + 20);      // y of a row's first cell

  function show() {
    const round = state.round;
    controls.round.set(upTo(last(), 0), round);
    mount.writeLink(state);
    const more = mount.$(".more a");
    if (more) more.href = `collectives.html#${new URLSearchParams(state)}`;
    const when = round ? `Round ${round} of ${last()}` : "Before";
    mount.$(".verdict").replaceChildren(make("strong", {}, when), inWords(round));
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
    const gathered = Math.max(...answer.states[0].map(([, beside]) => beside?.length ?? 0));
    const height = gathered ? firstOf(1) + gathered * PITCH : firstOf(0) + parts() * PITCH;
    const svg = picture(LEFT + answer.ranks * column(), height, label(round));
    const text = (x, y, words, more) => svg.append(draw("text", { x, y, "font-size": FONT, ...more }, words));
    answer.states[round].forEach((rows, rank) => {
      text(middle(rank), arcs() + 14, `rank ${rank}`, { "text-anchor": "middle", "font-weight": 600 });
      rows.forEach((cells, row) => cells.forEach((cell, at) => {
        svg.append(drawnCell(cell, rank, row, at, kindOf(round, rank, row, at)));
      }));
    });
    for (let at = 0; at < parts(); at++) {
      const words = isBarrier() ? `rank ${at}` : answer.parts === 1 ? "x" : `part ${at}`;
      text(LEFT - 8, firstOf(0) + at * PITCH + 16, words, { "text-anchor": "end", class: "soft" });
    }
    if (gathered) text(LEFT, firstOf(1) - 6, "gathered in memory beside x", { class: "soft" });
    for (const [from, to] of answer.rounds[sending - 1] ?? []) svg.append(arc(from, to));
    return svg;
  }

  function kindOf(round, rank, row, at) {
    const [given, begin, end] = answer.gives[rank], before = answer.states[round - 1]?.[rank][row][at];
    if (round === last()) return row === given && at >= begin && at < end ? "cell given" : "cell spent";
    return round && answer.states[round][rank][row][at] !== before ? "cell changed" : "cell";
  }

  function drawnCell(cell, rank, row, at, kind) {
    const x = LEFT + rank * column(), y = firstOf(row) + at * PITCH, width = cellWide();
    const group = draw("g", { class: kind });
    Object.assign(group.dataset, { rank, row, at, cell });
    group.append(draw("rect", { x, y, width, height: TALL, rx: 3 }));
    if (kind !== "travels") {
      const words = briefly(cell), size = Math.min(FONT, (width - 6) / (0.57 * words.length));
      group.append(draw("text", { x: x + width / 2, y: y + 16, "font-size": size, "text-anchor": "middle" }, words));
    }
    const wide = (width - 4) / answer.ranks;
    const bar = { y: y + TALL - BAR - 1, width: wide - 1, height: BAR, class: "curve" };
    [...LETTERS.slice(0, answer.ranks)].forEach((letter, i) => {
      if (cell.includes(letter)) group.append(draw("rect", { ...bar, x: x + 2 + i * wide, fill: COLORS[i] }));
    });
    return group;
  }

  function arc(from, to) {                              // over the ranks, from one to the other
    const aside = from < to ? 14 : -4, begin = middle(from) + aside, end = middle(to) - aside, base = arcs() - 1;
    const top = base - 4 / 3 * heightOf(from, to), turn = (end - begin) / 6, group = draw("g", { class: "message" });
    const long = Math.hypot(turn, base - top), [ux, uy] = [turn / long, (base - top) / long];     // where it arrives
    const before = (back, right) => `${end - back * ux - right * uy} ${base - back * uy + right * ux}`;
    Object.assign(group.dataset, { from, to });
    group.append(draw("path", { d: `M${begin} ${base}C${begin + turn} ${top} ${end - turn} ${top} ${before(6, 0)}` }),
                 draw("polygon", { points: `${end} ${base} ${before(8, 4)} ${before(8, -4)}` }),
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
    const next = state.round + 1, mine = moving = { to: next };
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
    }
    if (moving !== mine) return;                        // something else is shown by now
    moving = null;
    go(next);
  }

  function arrive() {                                   // stops, where what is on its way goes; whether something was
    const there = moving?.to;
    stop();
    if (there !== undefined) go(there);
    return there !== undefined;
  }

  async function play() {
    arrive();
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
    playing = moving = null;
    mount.$(".run").textContent = "play";
  }

  setUp();
  begin();
  mount.onLink(begin);
};
