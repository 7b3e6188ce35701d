"""The figure of chapter 08: who is chosen, and what hides behind what."""

import itertools

from lab.drawing import BLUE, ORANGE, PURPLE, RED, above_overlap, few

OF = "08_expert_parallel"
LAST = 20       # steps, of which the largest load is a mean
BALANCES = {"none": (ORANGE, 5), "loss": (BLUE, 2.2), "bias": (RED, 1)}


def draw(runs):
    """Left: how many rows each rank sends to each, if possible without balance. Right, of the last
    run of each balance: every expert's share of the picks over the steps; and below, the training
    losses, or what they differ by from the one without balance; and of the last run of each
    variant, what hides behind what."""
    runs = [run for run in runs if run["chapter"] == OF]
    variants = {run["variant"]: run for run in runs}
    runs.sort(key=lambda run: "loads" in run["recorded"])           # rather one that has loads
    last = {run["config"]["balance"]: run for run in runs}
    shown = {balance: last[balance] for balance in BALANCES if balance in last}
    columns = [balance for balance in shown if "loads" in shown[balance]["recorded"]] or ["losses"]
    with_rows = [run for run in runs if run["recorded"].get("rows")]
    with_rows.sort(key=lambda run: (run["world_size"], run["config"]["balance"] == "none"))

    left = ["rows"] if with_rows else []
    widths = [5.0] * len(left) + [10 / max(len(columns), 2)] * len(columns)
    figure, upper = above_overlap(sum(widths), 3 if columns == ["losses"] else 6.4, variants)
    panels = upper.subplot_mosaic([left + columns, left + ["losses"] * len(columns)],
                                  width_ratios=widths, height_ratios=(3, 2))
    for run in with_rows[-1:]:
        draw_rows(panels["rows"], run)
    for balance in columns:
        if balance != "losses":
            draw_shares(panels[balance], shown[balance])
            panels[balance].set_yticks([])
    if columns != ["losses"]:
        panels[columns[0]].set_ylabel("each expert's share of the picks in the first layer\n"
                                      "(dotted: if all were chosen alike)", fontsize=9)
    draw_losses(panels["losses"], shown)
    return figure


def draw_rows(axes, run):
    """From each rank (down) to each (across): darker where more rows go."""
    from matplotlib.colors import LinearSegmentedColormap

    rows, n = run["recorded"]["rows"], few(run["world_size"], "ranks")
    most = max(map(max, rows))
    axes.imshow(rows, cmap=LinearSegmentedColormap.from_list("", ["white", BLUE]), vmin=0)
    size = min(9, 120 / n)                              # of a number that fits into its cell
    for sender, sent in enumerate(rows):
        for receiver, count in enumerate(sent):
            axes.text(receiver, sender, f"{count:.0f}", ha="center", va="center", fontsize=size,
                      color="white" if count > 0.7 * most else "black")
    received = [f"{rank}\n{sum(column):.0f}" for rank, column in enumerate(zip(*rows))]
    axes.set_xticks(range(n), received, fontsize=size)
    axes.set_yticks(range(n), range(n), fontsize=size)
    axes.tick_params(length=0)
    axes.spines[:].set_color("#cccccc")
    axes.set_ylabel("from rank", fontsize=9)
    axes.set_xlabel("to rank; below: the rows that it receives from all", fontsize=9)
    axes.set_title("how many rows go from rank to rank in the step that is metered\n"
                   f"(first layer, first micro-batch, balance: {run['config']['balance']})")


def draw_shares(axes, run):
    """Stacked: expert 0 is at the bottom."""
    from matplotlib.colors import LinearSegmentedColormap

    loads = [layers[0] for layers in run["recorded"]["loads"]]
    shares = zip(*[[load / sum(step) for load in step] for step in loads])
    shares = [smooth(of_expert) for of_expert in shares]
    steps, n = len(loads), len(shares)
    thin = min(0.8, 8 / n)
    colors = LinearSegmentedColormap.from_list("", [BLUE, PURPLE, RED, ORANGE], N=n)
    edges = [step + 0.5 for step in range(steps + 1)]               # between steps
    axes.stackplot(edges, [[*share, share[-1]] for share in shares], step="post",
                   edgecolor="white", linewidth=thin, colors=[colors(i) for i in range(n)])
    bottom = 0
    for i, share in enumerate(shares):
        if share[-1] > 0.035:                           # where its number fits
            axes.text(edges[-1], bottom + share[-1] / 2, f" {i}", va="center", fontsize=8)
        bottom += share[-1]
    axes.hlines([i / n for i in range(1, n)], edges[0], edges[-1], color="black", linestyle=":",
                linewidth=thin)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1)
    axes.spines[:].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("step", fontsize=9)
    axes.set_title(f"balance: {run['config']['balance']}; largest over mean load\n"
                   f"(all layers, last {min(steps, LAST)} steps): {largest_load(run):.2f}")


def largest_load(run):
    """Largest over mean load of a layer in a step; the mean of it over the last steps' layers."""
    loads = list(itertools.chain(*run["recorded"]["loads"][-LAST:]))
    return sum(max(layer) * len(layer) / sum(layer) for layer in loads) / len(loads)


def alike_but_for_balance(run):
    """What two runs of which one is balanced otherwise have in common."""
    differs = {"balance", "balance_weight", "bias_speed", "json", "plot", "profile"}
    flags = [str(value) for flag, value in run["config"].items() if flag not in differs]
    return run["variant"], run["world_size"], *flags


def smooth(values):
    """Of many, each becomes the mean of itself and its neighbours."""
    reach = len(values) // 40
    near = [values[max(0, i - reach):i + reach + 1] for i in range(len(values))]
    return [sum(some) / len(some) for some in near]


def draw_losses(axes, shown):
    """If there are others like the run without balance, what their losses differ by from its."""
    without, kinds = shown.get("none"), {alike_but_for_balance(run) for run in shown.values()}
    compared = without and len(shown) > 1 and len(kinds) == 1
    for balance, run in shown.items():
        (color, width), last = BALANCES[balance], run["loss"][-LAST:]
        heights = run["loss"]
        if compared:
            heights = [loss - other for loss, other in zip(heights, without["loss"])]
        axes.plot(range(1, len(heights) + 1), smooth(heights), color=color,
                  linewidth=width, marker="o", markersize=4 if len(heights) < LAST else 0,
                  label=f"{balance}: {sum(last) / len(last):.4f} "
                        f"(mean of the last {len(last)} steps)")
    axes.set_xlim(0.5, max(len(run["loss"]) for run in shown.values()) + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("step", fontsize=9)
    what = "training loss, minus that of balance: none" if compared else "training loss, by balance"
    axes.set_title(what)
    axes.legend(fontsize=9, title="the loss itself" if compared else None)
