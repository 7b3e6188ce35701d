// Ring attention and its zig-zag, hop by hop.
"use strict";

TOOLS.rings = mount => {
  const SIZE = mount.large ? 400 : 290, EDGE = 58, STRIP = 6;
  const LARGEST = 13, LEAST = 7;                        // px of a digit
  const VALUES = window.CHOICES.rings;
  const names = ["ranks", "documents", "cut", "window"];
  const state = {}, controls = {};
  let answer = null, playing = null, isLinked = false;   // isLinked: a link has said what is shown

  const rankColor = rank => COLORS[rank % COLORS.length];
  const written = number => number.toLocaleString("en");
  const last = () => answer.ranks - 1;
  const ranksOf = count => `${count} rank${count === 1 ? "" : "s"}`;
  const listed = words => words.length < 2 ? words.join() : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
  const isRun = ranks => ranks.length > 2 && ranks.at(-1) - ranks[0] === ranks.length - 1;
  const rangeOf = ranks => isRun(ranks) ? `${ranks[0]} to ${ranks.at(-1)}` : listed(ranks);

  function setUp() {
    for (const name of names) {
      const asks = () => {
        stop();
        state[name] = controls[name].value;
        update();
      };
      controls[name] = name === "cut" ? selector(name, VALUES.cut, VALUES.cut[0], asks) : slider(name, [0], 0, asks);
    }
    controls.hop = slider("hop", [0], 0, () => { stop(); go(controls.hop.value); });
    mount.$(".question").append(...mount.large ? Object.values(controls) : [controls.ranks, controls.hop]);
    mount.$(".run").addEventListener("click", () => playing ? stop() : play());
    mount.$(".next").addEventListener("click", () => { stop(); go((state.hop + 1) % answer.ranks); });
    mount.$(".previous").addEventListener("click", () => { stop(); go((state.hop + last()) % answer.ranks); });
  }

  function begin() {                                      // as a link has it
    stop();
    isLinked = true;
    Object.assign(state, mount.begins([...names, "hop"]));
    update();
  }

  function bound() {                                      // to what is offered beside the others, and is answered
    const { hop, ...asked } = state, offered = {};
    for (const name of names) {
      offered[name] = VALUES[name].filter(value => mount.can("ring", { ...asked, [name]: value }));
      controls[name].set(offered[name], state[name]);
    }
    for (const option of $$("option", controls.cut)) {
      option.disabled = option.value !== state.cut && !offered.cut.includes(option.value);
    }
  }

  const update = mount.latest(async signal => {
    answer = await mount.answerTo("ring", state, ["hop"], signal);
    bound();
    if (!upTo(last(), 0).includes(state.hop)) {
      const asked = state.hop;
      state.hop = Math.min(last(), Math.max(0, Math.round(asked) || 0));
      const line = `There is no hop ${asked} on ${ranksOf(answer.ranks)}: this is hop ${state.hop}.`;
      if (isLinked) mount.tell(line, false);
    }
    isLinked = false;
    show();
  });

  function slowest(variant, until = last()) {             // the sum of what the slowest needs, hop by hop
    return answer[variant].pairs.slice(0, until + 1).reduce((sum, pairs) => sum + Math.max(...pairs), 0);
  }

  function show() {
    const hop = state.hop;
    controls.hop.set(upTo(last(), 0), hop);
    mount.writeLink(state);
    if (!mount.large) mount.$(".more a").href = `rings.html#${new URLSearchParams(state)}`;
    const each = state.cut === "document" ? "of each document" : "each";
    mount.$(".zigzag-name").textContent = `Zig-zag: two chunks ${each}`;
    for (const variant of ["ring", "zigzag"]) {
      mount.$(`.${variant}-says`).textContent = inWords(variant, hop);
      mount.$(`.${variant}-matrix`).replaceChildren(matrix(variant, hop));
      mount.$(`.${variant}-work`).replaceChildren(work(variant, hop));
    }
    const times = slowest("ring") / slowest("zigzag");
    mount.$(".verdict").replaceChildren(make("strong", {}, `On ${ranksOf(answer.ranks)} the ring takes ` +
      `${times.toFixed(2)} times as long as the zig-zag`), ` for the same attention of ${answer.tokens} tokens.`);
    if (mount.large) mount.$(".sums").textContent = inSum();
  }

  // ---------------------------------------------------------------------------------------- in words

  function inSum() {
    const [ring, ...both] = ["ring", "sequence", "document"].map(name => answer.busiest[name].toFixed(2));
    const pads = answer.padding ? `, which pads it by ${Math.round(100 * answer.padding)}%` : "";
    return `The slowest ranks compute ${written(slowest("ring"))} pairs in the ring, hop by hop, and ` +
      `${written(slowest("zigzag"))} in the zig-zag. The work of the busiest rank is ${ring} times the mean ` +
      `in the ring, ${both[0]} if a zig-zag cuts the sequence, and ${both[1]} if it cuts each document${pads}.`;
  }

  function inWords(variant, hop) {
    const done = answer[variant].pairs[hop], needed = answer[variant].pairs.length - 1;
    if (!done) {
      return `Hop ${hop} is not needed: nobody sees keys from so far, so they travel ${needed} of ${last()} hops.`;
    }
    const idle = upTo(last(), 0).filter(rank => !done[rank]), most = Math.max(...done), least = Math.min(...done);
    const there = hop === 0 ? "each rank has its own keys" : `rank r has the keys of rank r - ${hop}`;
    const wait = `${idle.length} of ${ranksOf(done.length)} wait${idle.length === 1 ? "s" : ""} (${rangeOf(idle)})`;
    const works = least === most ? `all compute ${written(most)} pairs`
      : idle.length ? `${wait}, the others compute up to ${written(most)} pairs`
      : `they compute ${written(least)} to ${written(most)} pairs`;
    return `Hop ${hop}: ${there}; ${works}.`;
  }

  // ---------------------------------------------------------------------------------------- the matrix

  function matrix(variant, now) {
    const { places, holds, shapes, documents, padding } = answer[variant];
    const side = SIZE / Math.max(answer.ring.places, answer.zigzag.places), at = place => EDGE + place * side;
    const name = `${variant === "ring" ? "Ring" : "Zig-zag"} on ${ranksOf(answer.ranks)}`;
    const says = `${name}, queries down and keys across. ${inWords(variant, now)}`;
    const svg = picture(EDGE + SIZE + 2, EDGE + SIZE + 2, says);
    const label = (text, attributes) => svg.append(draw("text", { "font-size": 11, ...attributes }, text));
    const box = (x, y, width, height, attributes) => svg.append(draw("rect", { x, y, width, height, ...attributes }));
    box(EDGE, EDGE, places * side, places * side, { class: "empty" });
    for (const [first, end] of padding) box(EDGE, at(first), places * side, (end - first) * side, { class: "padded" });
    holds.forEach((runs, rank) => {
      for (const [first, end] of runs) {
        const wide = (end - first) * side, middle = at(first) + wide / 2;
        box(EDGE - STRIP - 2, at(first), STRIP, wide, { fill: rankColor(rank), class: "curve" });
        box(at(first), EDGE - STRIP - 2, wide, STRIP, { fill: rankColor(rank), class: "curve" });
        if (wide >= 12) label(`rank ${rank}`, { x: EDGE - STRIP - 6, y: middle + 4, "text-anchor": "end" });
        if (wide >= 14) label(rank, { x: middle, y: EDGE - STRIP - 5, "text-anchor": "middle" });
      }
    });
    label("keys of", { x: EDGE - STRIP - 6, y: EDGE - STRIP - 5, "text-anchor": "end", class: "soft" });
    shapes.forEach((ranks, hop) => ranks.forEach((mine, rank) => {
      const title = `rank ${rank} at hop ${hop}: ${written(answer[variant].pairs[hop][rank])} pairs in all`;
      for (const shape of mine) {
        svg.append(block(cornersOf(shape).map(([x, y]) => [at(x), at(y)]), rank, hop, now, title));
      }
    }));
    if (documents.length > 1) {
      for (const [first, end] of documents) {
        box(at(first), at(first), (end - first) * side, (end - first) * side, { class: "frame" });
      }
    }
    return svg;
  }

  function cornersOf(shape) {                             // two of a rectangle, or all
    if (shape.length === 4) {
      const [left, top, right, bottom] = shape;
      return [[left, top], [right, top], [right, bottom], [left, bottom]];
    }
    return shape.flatMap((x, i) => i % 2 ? [] : [[x, shape[i + 1]]]);
  }

  function block(corners, rank, hop, now, title) {
    const when = hop > now ? "later" : hop === now ? "now" : "past", group = draw("g", { class: `block ${when}` });
    Object.assign(group.dataset, { rank, hop });
    group.append(draw("polygon", { points: corners.map(corner => corner.join(",")).join(" "), fill: rankColor(rank) }),
                 draw("title", {}, title));
    const [x, y] = middleOf(corners), size = largest(corners, x, y, String(hop).length);
    if (size) group.append(draw("text", { x, y: y + 0.36 * size, "font-size": size, "text-anchor": "middle" }, hop));
    return group;
  }

  function middleOf(corners) {                            // the centre of gravity
    let area = 0, x = 0, y = 0;
    corners.forEach(([ax, ay], i) => {
      const [bx, by] = corners[(i + 1) % corners.length], twice = ax * by - bx * ay;
      area += twice;
      x += (ax + bx) * twice;
      y += (ay + by) * twice;
    });
    return [x / area / 3, y / area / 3];
  }

  function largest(corners, x, y, digits) {               // of what stays within the shape; 0: nothing would
    for (let size = LARGEST; size >= LEAST; size -= 1) {
      const wide = 0.31 * size * digits + 0.5, tall = 0.38 * size + 0.5;
      const fits = [[-1, -1], [1, -1], [1, 1], [-1, 1], [0, -1], [0, 1]].every(
        ([right, down]) => isInside(corners, x + right * wide, y + down * tall));
      if (fits && !corners.some(([cx, cy]) => Math.abs(cx - x) < wide && Math.abs(cy - y) < tall)) return size;
    }
    return 0;
  }

  function isInside(corners, x, y) {                      // a line to the right crosses an odd number of sides
    return corners.filter(([ax, ay], i) => {
      const [bx, by] = corners[(i + 1) % corners.length];
      return (ay > y) !== (by > y) && x < ax + (y - ay) / (by - ay) * (bx - ax);
    }).length % 2 === 1;
  }

  function work(variant, now) {                           // of each rank: computed, and waited, hop by hop
    const n = answer.ranks, most = Math.max(slowest("ring"), slowest("zigzag")), high = 18, scale = SIZE / most;
    const done = answer[variant].pairs.slice(0, now + 1), sums = upTo(n - 1, 0).map(
      rank => `rank ${rank} ${written(done.reduce((sum, pairs) => sum + pairs[rank], 0))}`);
    const name = `Pairs computed up to hop ${now}: ${listed(sums)}. The slowest took as long as ` +
      `${written(slowest(variant, now))}.`;
    const svg = picture(EDGE + SIZE + 2, n * high + 20, name);
    for (let rank = 0; rank < n; rank++) {
      const bars = draw("g", { class: "curve" }), at = { x: EDGE - 6, y: rank * high + 13 };
      svg.append(draw("text", { ...at, "font-size": 12, "text-anchor": "end" }, `rank ${rank}`), bars);
      let start = 0;
      for (const pairs of done) {
        const all = Math.max(...pairs), bar = { x: EDGE + start * scale, y: rank * high + 1, height: high - 3 };
        svg.insertBefore(draw("rect", { ...bar, width: all * scale, class: "empty" }), bars);
        bars.append(draw("rect", { ...bar, width: pairs[rank] * scale, fill: rankColor(rank), class: "computed" }));
        start += all;
      }
    }
    svg.append(draw("text", { x: EDGE, y: n * high + 14, "font-size": 12, class: "soft" },
                    `so far: ${written(slowest(variant, now))} pairs long, of ${written(slowest(variant))}`));
    return svg;
  }

  // ---------------------------------------------------------------------------------------- playing

  function go(hop) {
    mount.tell("", false);
    state.hop = hop;
    show();
  }

  function play() {
    mount.$(".run").textContent = "stop";
    const step = () => {
      go((state.hop + 1) % answer.ranks);
      if (state.hop === last()) stop();
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
  mount.onLink(begin);
};
