"""The scaling book's plots, and rooflines of our clusters: figures/rooflines.png."""

from functools import partial

from lab.bench.drawing import BLUE, GRAY, ORANGE, PURPLE, RED, new_figure
from lab.chapters import chapter
from lab.planner import rooflines
from lab.sources import scaling_book as book

GREEN = "#4f8a5b"
F = 28672                       # of the 70b, which the book rounds to 30,000
CHIPS = 576                     # of each cluster: nodes of 8, and racks of 72


def between(first, last, points=97):
    """Numbers from one to another, each the same factor above the one before."""
    return [first * (last / first) ** (i / (points - 1)) for i in range(points)]


def mark(axes, x, y, words, where=(6, -12), **more):
    """A point where two lines cross, and its number."""
    axes.plot(x, y, "o", color="black", markersize=5, zorder=5)
    axes.annotate(words, (x, y), xytext=where, textcoords="offset points", fontsize=8, **more)


def in_three_digits(tokens):
    return f"{float(f'{tokens:.3g}'):,.0f}"


def over(count):
    return f"messages over {count} {'axis' if count == 1 else 'axes'}"


def draw_data_parallel(axes):
    """Over tokens of a chip, messages of dp do not change, and compute grows with them."""
    layer, x = rooflines.mlp(book.D, F), between(100, 10_000)
    compute = [1e3 * rooflines.flops(layer, tokens)[1] / book.tpu().peak for tokens in x]
    axes.plot(x, compute, color="black", label="compute")
    _, sent = rooflines.bytes_sent("dp", layer, 1)
    for count, color in ((1, RED), (2, PURPLE), (3, BLUE)):
        y = 1e3 * sent / (count * book.tpu().nvlink)
        axes.plot(x, [y] * len(x), color=color, label=over(count))
        mark(axes, book.per_chip(count), y, f"{book.per_chip(count):,.0f}")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a chip",
             ylabel="ms of a layer's backward")
    axes.set_title("dp, and ZeRO-3: from so many tokens of a chip on, messages hide")


def draw_tensor(axes):
    """Over ranks of tp, messages do not change, and compute shrinks."""
    layer, tokens, x = rooflines.mlp(book.D, F), 2**20, between(1, 100)
    compute = [1e3 * rooflines.flops(layer, tokens, 1, tp)[0] / book.tpu().peak for tp in x]
    axes.plot(x, compute, color="black", label="compute")
    sent, _ = rooflines.bytes_sent("tp", layer, tokens)
    for count, color in ((1, RED), (2, PURPLE), (3, BLUE)):
        y = 1e3 * sent / (count * book.tpu().nvlink)
        axes.plot(x, [y] * len(x), color=color, label=over(count))
        mark(axes, book.widest(F, count), y, f"{book.widest(F, count):.1f}", (4, 5))
    axes.set(xscale="log", yscale="log", xlabel="ranks of tp",
             ylabel="ms of a layer's forward, 1 M tokens")
    axes.set_title("tp: up to so many ranks, whatever the batch, messages hide")


def draw_ratio(axes, chips=64):
    """Compute over messages, over tokens of a chip: ZeRO-3, tp, and both at their best."""
    x = between(10, 10_000)
    lines = {"ZeRO-3, three axes": (BLUE, partial(book.alone, "zero-3")),
             "tp, three axes": (RED, partial(book.alone, "tp")),
             "both, two axes and one": (GREEN, book.together)}
    for name, (color, of) in lines.items():
        axes.plot(x, [of(tokens, chips) for tokens in x], color=color, label=name)
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    first, last = book.least(book.F), book.per_chip(3)
    mark(axes, first, 1, f"{first:.0f}", (-8, 7), ha="right")
    mark(axes, last, 1, f"{last:.0f}")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a chip", ylabel="compute over messages")
    axes.set_title(f"4x4x4 chips, F = {book.F:,}: from {first:.0f} to {last:.0f} tokens, only both "
                   "hide")


def draw_batches(axes, chips=4096, ffn=4 * book.D):
    """Seconds over the batch, of compute and of each way to send."""
    def at_best(tokens):
        dp = rooflines.best_data_parallel(tokens, chips, ffn, book.AXES)
        return rooflines.messages(book.times(ffn, tokens)(dp, chips / dp))

    def in_powers(tokens):
        of = book.times(ffn, tokens)
        return rooflines.messages(of(*rooflines.fastest_split(of, chips)))

    def alone(axis, *split):
        return lambda tokens: book.times(ffn, tokens, (3, 3))(*split)[axis]

    lines = {"compute": ("black", "--", alone("compute", chips, 1)),
             "tp, three axes": (RED, "-", alone("tp", 1, chips)),
             "ZeRO-3, three axes": (BLUE, "-", alone("zero-3", chips, 1)),
             "both, X and Y powers of two": (ORANGE, "-", in_powers),
             "both, X by the formula": (GREEN, "-", at_best)}
    x = between(5e4, 1e7, 193)
    for name, (color, style, of) in lines.items():
        axes.plot(x, [1e3 * of(tokens) for tokens in x], color=color, linestyle=style, label=name)
    for tokens, where, side in ((chips * book.least(ffn), (-6, 8), "right"),
                                (book.least_batch(ffn, chips), (5, -13), "left"),
                                (chips * book.per_chip(3), (5, -13), "left")):
        y = 1e3 * lines["compute"][-1](tokens)
        mark(axes, tokens, y, f"{tokens:,.0f}", where, ha=side)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the batch",
             ylabel="ms of a layer's forward", ylim=(0.01, 100))
    axes.set_title(f"16x16x16 chips, F = {ffn:,}: what is above compute, is waited for")


def draw_shards(axes, chips=4096, ffn=4 * book.D, tokens=4e5):
    """Over X, what ZeRO-3 and tp send; the formula's X, and all splits that divide."""
    x, of = between(16, chips / 2), book.times(ffn, tokens)
    axes.axhline(1e3 * of(chips, 1)["compute"], color="black", linestyle="--", label="compute")
    for axis, name, color in (("zero-3", "ZeRO-3", BLUE), ("tp", "tp", RED)):
        axes.plot(x, [1e3 * of(dp, chips / dp)[axis] for dp in x], color=color,
                  label=f"messages of {name}")
    tried = [split for split in rooflines.splits(chips) if x[0] <= split[0] <= x[-1]]
    axes.plot([dp for dp, _ in tried], [1e3 * rooflines.messages(of(*split)) for split in tried],
              "s", color=ORANGE, markersize=5, label="what is waited for, X a power of two")
    best = rooflines.best_data_parallel(tokens, chips, ffn, book.AXES)
    y = 1e3 * rooflines.messages(of(best, chips / best))
    mark(axes, best, y, f"X = {best:.0f}", (0, -18), ha="center")
    axes.set(xscale="log", yscale="log", xlabel="X, chips of ZeRO-3 (tp has the others)",
             ylabel="ms of a layer's forward")
    dp, tp = rooflines.fastest_split(of, chips)
    axes.set_title(f"400,000 tokens there: of all tried, ZeRO-3 over {dp} and tp over {tp} is best")


def draw_pods(axes, count=2):
    """Between pods: over tokens of a pod, as within one over tokens of a chip."""
    chips, x = book.tpu().per_node, between(1e4, 1e7)
    of_pods = [book.pods(count, chips, count * tokens) for tokens in x]
    axes.plot(x, [1e3 * compute for compute, _ in of_pods], color="black", label="compute")
    axes.plot(x, [1e3 * sent for _, sent in of_pods], color=RED, label="messages between pods")
    compute, sent = book.pods(count, chips)
    mark(axes, book.pod(), 1e3 * sent, f"{book.pod():,.0f}")
    words = f"2 M tokens on 2 pods:\n{compute / sent:.0f} times as long as messages"
    mark(axes, book.B / count, 1e3 * compute, words, (-8, 4), ha="right")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a pod",
             ylabel="ms of a layer's backward")
    axes.set_title(f"dp between pods of {chips:,} chips: from so many tokens of a pod on")


def draw_planned(axes, dp=64, tp=8):
    """The roof of a cluster, and what the planner leaves of it."""
    ten, x = chapter("10"), between(250, 16_000)
    roof = rooflines.Roof(ten, ten.MODELS["70b"], ten.CLUSTERS["h100"])
    for of, style, words in ((roof.seconds, "-", "roofline"), (roof.planned, "--", "planner")):
        def at(tokens, of=of):
            return of(tokens * dp * tp, dp, tp)

        compute = [1e3 * at(tokens)["compute"] for tokens in x]
        sent = [1e3 * rooflines.messages(at(tokens)) for tokens in x]
        axes.plot(x, compute, style, color="black", label=f"compute, {words}")
        axes.plot(x, sent, style, color=RED, label=f"messages, {words}")
        least = rooflines.crossing(at)
        mark(axes, least, 1e3 * at(least)["compute"], in_three_digits(least))
    axes.set(xscale="log", yscale="log", xlabel="tokens of a GPU", ylabel="ms of a layer's forward")
    axes.set_title("70b, 64 x tp 8, H100s: the planner adds HBM, attention, hops, real rates")


def draw_clusters(axes):
    """What each cluster needs: with ZeRO-3 book.alone, and with tp."""
    ten, names = chapter("10"), ["a100", "h800", "h100", "b200", "gb200", "tpu-v5p"]
    for offset, strategy, color in ((-0.2, "zero-3", BLUE), (0.2, "both", GREEN)):
        found = []
        for name in names:
            split = (3, 0) if strategy == "zero-3" else book.AXES
            of_axes = split if name in rooflines.TORUS else (1, 1)
            roof = rooflines.Roof(ten, ten.MODELS["70b"], ten.CLUSTERS[name], of_axes)
            found.append(roof.best(strategy, CHIPS))
        y = [row + offset for row in range(len(names))]
        axes.barh(y, [tokens for tokens, _ in found], 0.38, color=color,
                  label="ZeRO-3" if strategy == "zero-3" else "ZeRO-3 and tp, best of all tried")
        for row, (tokens, (_, tp)) in zip(y, found):
            words = in_three_digits(tokens) + (f" (tp {tp})" if tp > 1 else "")
            axes.text(tokens * 1.06, row, words, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel=f"tokens of one of {CHIPS} GPUs or chips",
             xlim=(80, 30_000))
    axes.tick_params(axis="y", length=0)
    axes.set_title("70b: from how many tokens of a GPU on, messages hide")


def draw():
    """Eight rooflines: where compute takes longer than messages, axis by axis, between pods, and
    on each cluster."""
    figure, panels = new_figure(13, 17, 4, 2)
    for axes, part in zip(panels.flat, (draw_data_parallel, draw_tensor, draw_ratio, draw_batches,
                                        draw_shards, draw_pods, draw_planned, draw_clusters)):
        part(axes)
        axes.legend(fontsize=8)
    figure.supxlabel("TPU v5p: 459 TFLOP/s, 180 GB/s for each axis of its torus, 6.25 GB/s between "
                     "pods; data sheets", fontsize=8, color=GRAY)
    return figure
