"""The playbook's heat map and plots, predicted: colors, lines and bars. Circles are measured."""

from lab.bench.drawing import BLUE, GRAY, ORANGE, PURPLE, RED, blank
from lab.chapters import chapter
from lab.planner import playbook

NODES = 1, 2, 4, 8, 16, 32, 64
COLORS = {"1B": BLUE, "3B": PURPLE, "8B": RED, "80B": ORANGE}
SEQUENCES = 1024, 2048, 4096, 8192
HOW = {"none": RED, "selective": ORANGE, "full": BLUE}
SPEED = "tokens/s of a GPU"


def ten():
    return chapter("10")


def fastest():
    """{(model, nodes): tokens/s of a GPU} of its best runs that are known here."""
    found = {}
    for name, nodes, _, told, _ in playbook.runs(ten()):
        found[name, nodes] = max(told, found.get((name, nodes), 0))
    return found


def words(layout):
    """Of a cell of the heat map."""
    degrees = " ".join(f"{axis} {getattr(layout, axis)}" for axis in ("dp", "tp", "pp")
                       if getattr(layout, axis) > 1)
    again = playbook.BATCH // (layout.dp * layout.micro_batch)
    return f"{degrees}\n{again} x {layout.micro_batch}, ZeRO-{layout.zero}"


def draw_best(axes):
    """MFU and layout of the fastest plan over models and nodes."""
    published, shares = fastest(), []
    for y, name in enumerate(playbook.SHAPES):
        shares.append([])
        for x, nodes in enumerate(NODES):
            plan = playbook.best(ten(), name, nodes)
            if plan is None:
                shares[-1].append(float("nan"))
                axes.text(x, y, "does not fit", ha="center", va="center", fontsize=9, color=GRAY)
                continue
            speed = playbook.BATCH * 4096 / plan.total / (8 * nodes)
            shares[-1].append(playbook.mfu(ten(), name, speed))
            text = f"{shares[-1][-1]:.0%}\n{words(plan.layout)}"
            if (name, nodes) in published:
                told = playbook.mfu(ten(), name, published[name, nodes])
                text += f"\nmeasured: {told:.0%}"
            axes.text(x, y, text, ha="center", va="center", fontsize=9,
                      color="white" if shares[-1][-1] < 0.38 else "black")
    axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0.15, vmax=0.5)
    axes.set_xticks(range(len(NODES)), [str(nodes) for nodes in NODES])
    axes.set_yticks(range(len(playbook.SHAPES)), playbook.SHAPES)
    axes.set(xlabel="nodes of 8 H100s", ylabel="model")
    axes.set_title("The fastest layout for 1 M tokens a step, sequences of 4,096, nothing "
                   "recomputed: MFU, degrees, micro-batches x their sequences. Measured: the best "
                   "of its runs")


def draw_speeds(axes, axis, title):
    told = playbook.THROUGHPUT[axis]
    for measured, style, label in ((False, "-", "planned, data sheet's network"),
                                   (True, "--", "planned, network as it measured")):
        axes.plot(list(told), [playbook.speed_over(ten(), axis, degree, measured)
                               for degree in told], style, color=BLUE, label=label)
    axes.plot(list(told), list(told.values()), "o", color=RED, label="measured")
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(list(told), list(told))
    axes.set(xlabel=axis, ylabel=SPEED, ylim=(0, None))
    axes.legend(fontsize=8, loc="lower left")
    axes.set_title(title)


def lost(axis):
    """From tp 8 to 16, in words: predicted, and measured."""
    ours = playbook.drop(lambda degree: playbook.speed_over(ten(), axis, degree), 8, 16)
    told = playbook.drop(playbook.THROUGHPUT[axis], 8, 16)
    return f"from 8 to 16 it loses {ours:.0%} (measured {told:.0%})"


def draw_bandwidths(axes):
    plan = ten()
    machine = plan.Machine(plan.CLUSTERS["h100"], plan.Software())
    planned = [(8 * nodes - 1) / (8 * nodes) * 0.256 / machine.ring(256e6, 8 * nodes, 1)
               for nodes in NODES]
    axes.plot(NODES, planned, color=BLUE, label="planned, a ring")
    for (name, told), color in zip(playbook.BANDWIDTH.items(), (RED, ORANGE)):
        axes.plot(list(told), list(told.values()), "o", color=color, label=f"{name}, measured")
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(NODES, NODES)
    axes.set(xlabel="nodes", ylabel="GB/s (busbw)", ylim=(0, 480))
    axes.legend(fontsize=8)
    axes.set_title("Collectives of 256 MB: its network\nis slower, the more nodes there are")


def draw_largest(axes):
    for (axis, told), color in zip(playbook.LARGEST.items(), (BLUE, RED)):
        axes.plot(list(told), [playbook.largest_that_fits(ten(), axis, tp) for tp in told],
                  color=color, label=f"{axis}, planned")
        axes.plot(list(told), list(told.values()), "o", color=color, label=f"{axis}, measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(list(told), list(told))
    axes.set_yticks([3, 10, 30, 100], [3, 10, 30, 100])
    axes.set(xlabel="tp", ylabel="sequences")
    axes.legend(fontsize=8)
    axes.set_title("Memory: the largest micro-batch of\nthe 3B that fits; sp makes room for more")


def draw_runs(axes):
    for name, color in COLORS.items():
        points = [(playbook.mfu(ten(), name, playbook.speed(ten(), name, layout)),
                   playbook.mfu(ten(), name, told))
                  for of, _, layout, told, _ in playbook.runs(ten()) if of == name]
        axes.plot(*zip(*points), "o", color=color, label=name, markersize=5)
    ends = [0, 0.55]
    axes.plot(ends, ends, color=GRAY, linewidth=1)
    axes.fill_between(ends, [0.8 * end for end in ends], [1.2 * end for end in ends],
                      color="lightgray", alpha=0.5, label="within 20%", linewidth=0)
    axes.set(xlabel="MFU, planned", ylabel="MFU, measured", xlim=ends, ylim=ends)
    axes.legend(fontsize=8)
    axes.set_title(f"{sum(1 for _ in playbook.runs(ten()))} of its runs: what lies below ran slower"
                   "\n(small kernels, full memory, the network)")


def draw_llama(axes, name):
    """Stacks of states and activations over sequences: a bar for each way to recompute."""
    for place, (how, color) in enumerate(HOW.items()):
        parts = [playbook.llama_bytes(ten(), name, seq, how) for seq in SEQUENCES]
        kept = [part["activations"] / playbook.GIB for part in parts]
        states = [sum(part.values()) / playbook.GIB - of for part, of in zip(parts, kept)]
        x = [group + 0.27 * (place - 1) for group in range(len(SEQUENCES))]
        axes.bar(x, states, 0.25, color="lightgray",
                 label=None if place else "weights, gradients, moments")
        axes.bar(x, kept, 0.25, bottom=states, color=color, label=f"activations, {how}")
    axes.set_xticks(range(len(SEQUENCES)), [f"{seq:,}" for seq in SEQUENCES])
    axes.set(xlabel="tokens of the sequence", ylabel="GiB")
    axes.legend(fontsize=8, loc="upper left")
    axes.set_title(f"{name}, by what is recomputed (as in its plot)")


def draw():
    """Ten pictures, in a few seconds."""
    figure = blank(15, 17)
    parts = figure.subplot_mosaic([["best"] * 3, ["dp", "tp", "tp + sp"],
                                   ["bandwidth", "largest", "runs"], ["8B", "70B", "405B"]],
                                  height_ratios=(1.25, 1, 1, 1))
    draw_best(parts["best"])
    draw_speeds(parts["dp"], "dp", "The 1B over dp: the batch is fixed,\nso each GPU has ever less "
                "to hide messages behind")
    draw_speeds(parts["tp"], "tp", f"The 3B over tp:\n{lost('tp')}")
    draw_speeds(parts["tp + sp"], "tp + sp", f"The 3B over tp with sp:\n{lost('tp + sp')}")
    draw_bandwidths(parts["bandwidth"])
    draw_largest(parts["largest"])
    draw_runs(parts["runs"])
    for name in ("8B", "70B", "405B"):
        draw_llama(parts[name], name)
    return figure
