"""The figure of chapter 08: who is chosen, and what hides behind what."""

import itertools

from lab.drawing import BLUE, ORANGE, PURPLE, RED, above_overlap, draw_losses, few

OF = "08_expert_parallel"
LAST = 20       # steps, of which the largest load is a mean
BALANCES = "none", "loss", "bias"


def draw(runs):
    """How many rows each rank sends to each, if possible without balance; and of the last run of
    each balance, every expert's share of the picks over the steps. Below, of the last run of each
    variant, what hides behind what."""
    runs = [run for run in runs if run["chapter"] == OF]
    variants = {run["variant"]: run for run in runs}
    last = {run["config"]["balance"]: run for run in runs if "loads" in run["recorded"]}
    shares = [balance for balance in BALANCES if balance in last]
    with_rows = [run for run in runs if run["recorded"].get("rows")]
    if not shares and not with_rows:
        return draw_losses(runs[-1])

    with_rows.sort(key=lambda run: (run["world_size"], run["config"]["balance"] == "none"))
    names = ["rows"] * bool(with_rows) + shares
    figure, upper = above_overlap(5 * len(names), 5, variants)
    panels = upper.subplot_mosaic([names])
    for run in with_rows[-1:]:
        draw_rows(panels["rows"], run)
    for balance in shares:
        draw_shares(panels[balance], last[balance])
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
    axes.set_yticks([])
    axes.set_ylabel("share of the picks in the first layer (dotted: all alike)", fontsize=9)
    axes.set_xlabel("step", fontsize=9)
    axes.set_title(f"balance: {run['config']['balance']}; largest over mean load\n"
                   f"(all layers, last {min(steps, LAST)} steps): {largest_load(run):.2f}")


def largest_load(run):
    """Largest over mean load of a layer in a step; the mean of it over the last steps' layers."""
    loads = list(itertools.chain(*run["recorded"]["loads"][-LAST:]))
    return sum(max(layer) * len(layer) / sum(layer) for layer in loads) / len(loads)


def smooth(values):
    """Of many, each becomes the mean of itself and its neighbours."""
    reach = len(values) // 40
    near = [values[max(0, i - reach):i + reach + 1] for i in range(len(values))]
    return [sum(some) / len(some) for some in near]
