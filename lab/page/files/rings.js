// Ring attention and its zig-zag, hop by hop.
"use strict";

const SIZE = 400, EDGE = 58;
const controls = {};
let answer = null, playing = null;

const rankColor = rank => COLORS[rank % COLORS.length];
const blocksOf = hop => hop.blocks.reduce((sum, [, , share]) => sum + share, 0);

function setUp() {
  const link = readLink();
  controls.ranks = slider("ranks", upTo(16, 2), Number(link.ranks) || 4, () => { stop(); update(); });
  controls.hop = slider("hop", [0], 0, () => { stop(); show(); });
  $("#question").append(controls.ranks, controls.hop);
  $("#run").addEventListener("click", () => playing ? stop() : play());
  $("#next").addEventListener("click", () => go(1));
  $("#previous").addEventListener("click", () => go(-1));
  setHop(Number(link.hop) || 0);
}

function setHop(hop) {                                  // of those that there are
  const last = controls.ranks.value - 1;
  controls.hop.set(upTo(last, 0), Math.min(last, Math.max(0, hop)));
}

const update = latest(async isLatest => {
  const found = await ask("ring", { ranks: controls.ranks.value });
  if (!isLatest()) return;
  answer = found;
  tell("");
  setHop(controls.hop.value);
  show();
});

function slowest(variant, until) {                      // the sum of what the slowest needs, hop by hop
  return answer[variant].hops.slice(0, until + 1)
    .reduce((sum, ranks) => sum + Math.max(...ranks.map(blocksOf)), 0);
}

function show() {
  const hop = controls.hop.value, n = answer.ranks;
  writeLink({ ranks: n, hop });
  for (const variant of ["ring", "zigzag"]) {
    $(`#${variant}-says`).textContent = inWords(variant, hop);
    $(`#${variant}-matrix`).replaceChildren(matrix(variant, hop));
    $(`#${variant}-work`).replaceChildren(work(variant, hop));
  }
  const times = slowest("ring", n - 1) / slowest("zigzag", n - 1);
  $("#verdict").replaceChildren(make("strong", {}, `On ${n} ranks the ring takes ${times.toFixed(2)} times ` +
    "as long as the zig-zag"), ` for the same attention: in all, ${total("ring")} and ${total("zigzag")} ` +
    `blocks of the slowest ranks. In the ring, rank 0 has ${answer.ring.pairs[0]} blocks and rank ` +
    `${n - 1} has ${answer.ring.pairs[n - 1]}, for which all wait; in the zig-zag each rank has ` +
    `${answer.zigzag.pairs[0]}.`);
}

const total = variant => slowest(variant, answer.ranks - 1);

function inWords(variant, hop) {
  const ranks = answer[variant].hops[hop], done = ranks.map(blocksOf), idle = [];
  done.forEach((blocks, rank) => { if (!blocks) idle.push(rank); });
  const there = hop === 0 ? "each rank has its own keys" : "rank r has the keys of rank r - " + hop;
  const works = new Set(done).size === 1 ? `all compute ${done[0]} blocks`
    : `${idle.length} of ${done.length} ranks wait (${idle.join(", ")}), the others compute ${Math.max(...done)}`;
  return `Hop ${hop}: ${there}; ${works}.`;
}

function matrix(variant, now) {
  const { holds, hops } = answer[variant], n = holds.length, side = SIZE / (2 * n);
  const svg = picture(EDGE + SIZE + 2, EDGE + SIZE + 2, `${variant}: queries down, keys across`);
  const label = (text, attributes) => svg.append(draw("text", { "font-size": Math.min(12, side), ...attributes }, text));
  holds.forEach((chunks, rank) => {
    for (const chunk of chunks) {
      label(`rank ${rank}`, { x: EDGE - 6, y: EDGE + (chunk + 0.65) * side, "text-anchor": "end" });
      label(rank, { x: EDGE + (chunk + 0.5) * side, y: EDGE - 5, "text-anchor": "middle" });
    }
  });
  label("keys of", { x: EDGE - 6, y: EDGE - 5, "text-anchor": "end", class: "soft", "font-size": 11 });
  svg.append(draw("rect", { x: EDGE, y: EDGE, width: SIZE, height: SIZE, class: "empty" }));
  hops.forEach((ranks, hop) => ranks.forEach((one, rank) => {
    for (const [row, key, share] of one.blocks) {
      const x = EDGE + key * side, y = EDGE + row * side;
      const points = share === 1 ? `${x},${y} ${x + side},${y} ${x + side},${y + side} ${x},${y + side}`
        : `${x},${y} ${x + side},${y + side} ${x},${y + side}`;
      const group = draw("g", { class: "block", opacity: hop > now ? 0.1 : hop === now ? 1 : 0.45 });
      Object.assign(group.dataset, { rank, hop });
      group.append(draw("polygon", { points, fill: rankColor(rank), stroke: "white", "stroke-width": 0.6 }),
                   draw("title", {}, `rank ${rank} at hop ${hop}`));
      if (side > 12) {
        group.append(draw("text", { x: x + side * (share === 1 ? 0.5 : 0.3), y: y + side * 0.72,
                                    "font-size": Math.min(13, side * 0.5), "text-anchor": "middle",
                                    class: "on-color" }, hop));
      }
      svg.append(group);
    }
  }));
  return svg;
}

function work(variant, now) {                           // of each rank: computed, and waited, hop by hop
  const { hops } = answer[variant], n = answer.ranks, most = Math.max(total("ring"), total("zigzag"));
  const high = 18, scale = SIZE / most;
  const svg = picture(EDGE + SIZE + 2, n * high + 20, `${variant}: what each rank computes, and how long it waits`);
  for (let rank = 0; rank < n; rank++) {
    svg.append(draw("text", { x: EDGE - 6, y: rank * high + 13, "font-size": 12, "text-anchor": "end" }, `rank ${rank}`));
    let start = 0;
    for (const ranks of hops.slice(0, now + 1)) {
      const mine = blocksOf(ranks[rank]), all = Math.max(...ranks.map(blocksOf));
      svg.append(draw("rect", { x: EDGE + start * scale, y: rank * high + 1, width: all * scale, height: high - 3, class: "empty" }),
                 draw("rect", { x: EDGE + start * scale, y: rank * high + 1, width: mine * scale, height: high - 3,
                                fill: rankColor(rank), class: "computed" }));
      start += all;
    }
  }
  svg.append(draw("text", { x: EDGE, y: n * high + 14, "font-size": 12, class: "soft" },
                  `so far: ${slowest(variant, now)} blocks long, of ${total(variant)}`));
  return svg;
}

function go(by) {
  stop();
  setHop(controls.hop.value + by);
  show();
}

function play() {
  let hop = controls.hop.value >= answer.ranks - 1 ? -1 : controls.hop.value;
  $("#run").textContent = "stop";
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
  $("#run").textContent = "play";
}

document.addEventListener("DOMContentLoaded", () => {
  setUp();
  update();
  addEventListener("hashchange", () => {
    const link = readLink();
    controls.ranks.set(controls.ranks.values, Number(link.ranks) || 4);
    setHop(Number(link.hop) || 0);
    update();
  });
});
