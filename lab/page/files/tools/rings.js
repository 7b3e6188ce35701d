// Ring attention and its zig-zag, hop by hop.
"use strict";

TOOLS.rings = mount => {
  const SIZE = 400, EDGE = 58, FEWEST = 8, STRIP = 6;
  const controls = {};
  let answer = null, playing = null;

  const rankColor = rank => COLORS[rank % COLORS.length];
  const pairsOf = rank => rank.shapes.reduce((sum, [, pairs]) => sum + pairs, 0);
  const written = pairs => pairs.toLocaleString("en");

  function setUp() {
    const asks = () => { stop(); bound(); update(); };
    controls.ranks = slider("ranks", upTo(16, 2), 4, asks);
    controls.documents = slider("documents", [0], 0, asks);
    controls.cut = selector("cut", ["sequence", "document"], "sequence", asks);
    controls.window = slider("window", [0, ...powers(128, FEWEST)], 0, asks);
    controls.hop = slider("hop", [0], 0, () => { stop(); show(); });
    mount.$(".question").append(...Object.values(controls));
    mount.$(".run").addEventListener("click", () => playing ? stop() : play());
    mount.$(".next").addEventListener("click", () => go(1));
    mount.$(".previous").addEventListener("click", () => go(-1));
  }

  function begin() {                                      // as a link has it
    const link = mount.begins(["ranks", "documents", "cut", "window", "hop"]);
    for (const name of ["ranks", "window"]) controls[name].set(controls[name].values, link[name]);
    controls.documents.set([0], link.documents);
    controls.cut.set(null, link.cut);
    bound();
    setHop(link.hop);
  }

  function bound() {                                      // no document is shorter than its chunks are many
    const least = controls.cut.value === "document" ? Math.max(FEWEST, 2 * controls.ranks.value) : FEWEST;
    const now = controls.documents.value;
    const values = [0, ...powers(128, FEWEST).filter(mean => mean >= least)];
    controls.documents.set(values, now ? Math.max(now, values[1]) : 0);
  }

  function setHop(hop) {                                  // of those that there are
    const last = controls.ranks.value - 1;
    controls.hop.set(upTo(last, 0), Math.min(last, Math.max(0, hop)));
  }

  const update = mount.latest(async signal => {
    const { hop, ...asked } = controls;
    answer = await mount.ask("ring", Object.fromEntries(Object.entries(asked).map(([name, { value }]) => [name, value])), signal);
    mount.tell("");
    setHop(controls.hop.value);
    show();
  });

  function slowest(variant, until = answer.ranks) {       // the sum of what the slowest needs, hop by hop
    return answer[variant].hops.slice(0, until + 1)
      .reduce((sum, ranks) => sum + Math.max(...ranks.map(pairsOf)), 0);
  }

  function show() {
    const hop = controls.hop.value, n = answer.ranks;
    mount.writeLink(Object.fromEntries(Object.entries(controls).map(([name, { value }]) => [name, value])));
    mount.$(".zigzag-name").textContent = controls.cut.value === "document" ? "Zig-zag: two chunks of each document"
      : "Zig-zag: two chunks each";
    for (const variant of ["ring", "zigzag"]) {
      mount.$(`.${variant}-says`).textContent = inWords(variant, hop);
      mount.$(`.${variant}-matrix`).replaceChildren(matrix(variant, hop));
      mount.$(`.${variant}-work`).replaceChildren(work(variant, hop));
    }
    const times = slowest("ring") / slowest("zigzag"), [ring, ...both] = ["ring", "sequence", "document"]
      .map(name => answer.busiest[name].toFixed(2));
    mount.$(".verdict").replaceChildren(make("strong", {}, `On ${n} ranks the ring takes ${times.toFixed(2)} times ` +
      "as long as the zig-zag"), ` for the same attention of ${answer.tokens} tokens: in all, ${written(slowest("ring"))} ` +
      `and ${written(slowest("zigzag"))} pairs of the slowest ranks. The work of the busiest rank is ${ring} times the ` +
      `mean in the ring, ${both[0]} if a zig-zag cuts the sequence, and ${both[1]} if it cuts each document` +
      (answer.padding ? ` (which pads it by ${Math.round(100 * answer.padding)}%).` : "."));
  }

  function inWords(variant, hop) {
    const { hops } = answer[variant], last = hops.length - 1;
    if (hop > last) return `Hop ${hop} is not needed: nobody sees keys from so far, so they travel ${last} of ${answer.ranks - 1} hops.`;
    const done = hops[hop].map(pairsOf), idle = [], most = Math.max(...done), least = Math.min(...done);
    done.forEach((pairs, rank) => { if (!pairs) idle.push(rank); });
    const there = hop === 0 ? "each rank has its own keys" : "rank r has the keys of rank r - " + hop;
    const works = least === most ? `all compute ${written(most)} pairs`
      : idle.length ? `${idle.length} of ${done.length} ranks wait (${idle.join(", ")}), the others compute up to ${written(most)} pairs`
      : `they compute ${written(least)} to ${written(most)} pairs`;
    return `Hop ${hop}: ${there}; ${works}.`;
  }

  function matrix(variant, now) {
    const { holds, hops, documents, padding } = answer[variant];
    const side = SIZE / Math.max(answer.ring.places, answer.zigzag.places), size = answer[variant].places * side;
    const svg = picture(EDGE + SIZE + 2, EDGE + SIZE + 2, `${variant}: queries down, keys across`);
    const label = (text, attributes) => svg.append(draw("text", { "font-size": 11, ...attributes }, text));
    const box = (x, y, width, height, attributes) => svg.append(draw("rect", { x, y, width, height, ...attributes }));
    box(EDGE, EDGE, size, size, { class: "empty" });
    holds.forEach((runs, rank) => {
      for (const [first, end] of runs) {
        const at = EDGE + first * side, wide = (end - first) * side, middle = at + wide / 2;
        box(EDGE - STRIP - 2, at, STRIP, wide, { fill: rankColor(rank) });
        box(at, EDGE - STRIP - 2, wide, STRIP, { fill: rankColor(rank) });
        if (wide >= 12) label(`rank ${rank}`, { x: EDGE - STRIP - 6, y: middle + 4, "text-anchor": "end" });
        if (wide >= 14) label(rank, { x: middle, y: EDGE - STRIP - 5, "text-anchor": "middle" });
      }
    });
    label("keys of", { x: EDGE - STRIP - 6, y: EDGE - STRIP - 5, "text-anchor": "end", class: "soft" });
    hops.forEach((ranks, hop) => ranks.forEach((one, rank) => {
      for (const [corners, pairs, [x, y]] of one.shapes) {
        const group = draw("g", { class: "block", opacity: hop > now ? 0.1 : hop === now ? 1 : 0.45 });
        Object.assign(group.dataset, { rank, hop, pairs });
        group.append(draw("polygon", { points: corners.map(([x, y]) => `${EDGE + x * side},${EDGE + y * side}`).join(" "),
                                       fill: rankColor(rank), stroke: "white", "stroke-width": 0.6 }),
                     draw("title", {}, `rank ${rank} at hop ${hop}: ${written(pairs)} pairs`));
        const [wide, tall] = [0, 1].map(axis => extent(corners.map(corner => corner[axis])));
        const room = 0.6 * side * Math.min(wide, tall, 1.4 * pairs / Math.max(wide, tall));
        if (room >= 6) {
          group.append(draw("text", { x: EDGE + x * side, y: EDGE + y * side + 0.35 * Math.min(13, room),
                                      "font-size": Math.min(13, room), "text-anchor": "middle", class: "on-color" }, hop));
        }
        svg.append(group);
      }
    }));
    for (const [first, end] of padding) box(EDGE, EDGE + first * side, end * side, (end - first) * side, { class: "padding" });
    if (documents.length > 1) {
      for (const [first, end] of documents) {
        box(EDGE + first * side, EDGE + first * side, (end - first) * side, (end - first) * side, { class: "frame" });
      }
    }
    return svg;
  }

  const extent = values => Math.max(...values) - Math.min(...values);

  function work(variant, now) {                           // of each rank: computed, and waited, hop by hop
    const { hops } = answer[variant], n = answer.ranks, most = Math.max(slowest("ring"), slowest("zigzag"));
    const high = 18, scale = SIZE / most;
    const svg = picture(EDGE + SIZE + 2, n * high + 20, `${variant}: what each rank computes, and how long it waits`);
    for (let rank = 0; rank < n; rank++) {
      svg.append(draw("text", { x: EDGE - 6, y: rank * high + 13, "font-size": 12, "text-anchor": "end" }, `rank ${rank}`));
      let start = 0;
      for (const ranks of hops.slice(0, now + 1)) {
        const mine = pairsOf(ranks[rank]), all = Math.max(...ranks.map(pairsOf));
        svg.append(draw("rect", { x: EDGE + start * scale, y: rank * high + 1, width: all * scale, height: high - 3, class: "empty" }),
                   draw("rect", { x: EDGE + start * scale, y: rank * high + 1, width: mine * scale, height: high - 3,
                                  fill: rankColor(rank), class: "computed" }));
        start += all;
      }
    }
    svg.append(draw("text", { x: EDGE, y: n * high + 14, "font-size": 12, class: "soft" },
                    `so far: ${written(slowest(variant, now))} pairs long, of ${written(slowest(variant))}`));
    return svg;
  }

  function go(by) {
    stop();
    setHop(controls.hop.value + by);
    show();
  }

  function play() {
    let hop = controls.hop.value >= answer.ranks - 1 ? -1 : controls.hop.value;
    mount.$(".run").textContent = "stop";
    const step = () => {
      hop += 1;
      setHop(hop);
      show();
      if (hop >= answer.ranks - 1) stop();
    };
    playing = setInterval(step, 1200);
    step();
  }

  function stop() {
    clearInterval(playing);
    playing = null;
    mount.$(".run").textContent = "play";
  }

  setUp();
  begin();
  update();
  mount.onLink(() => {
    begin();
    update();
  });
};
