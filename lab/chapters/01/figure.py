"""The figure of chapter 01: the memory of the first steps."""

from lab.drawing import BLUE, ORANGE, PURPLE, RED, new_figure, runs_of

OF = "01_single_gpu"


def draw(runs):
    """Bytes of each kind over the first steps, stacked."""
    *_, run = runs_of(runs, OF).values()
    seconds, parameters, gradients, states, activations = run["recorded"]["memory"]
    figure, axes = new_figure(10, 4.5)
    kinds = {"parameters": (parameters, BLUE), "optimizer states": (states, PURPLE),
             "gradients": (gradients, RED),
             "activations, and what an operator needs for a moment": (activations, ORANGE)}
    heights = [[b / 1e6 for b in y] for y, _ in kinds.values()]
    axes.stackplot([1e3 * t for t in seconds], heights,
                   labels=list(kinds), colors=[color for _, color in kinds.values()])
    config = run["config"]
    precision = config["dtype"] if config["precision"] == "fp32" else config["precision"]
    how = f"{precision}, attention {config['attention']}, recompute {config['recompute']}"
    on_cuda = run["device"].startswith("cuda")          # where the host does not wait for them
    axes.set(xlabel=f"time {'to launch' if on_cuda else 'in'} operators (ms)", ylabel="MB",
             title=f"The first steps ({how}): optimizer states come with the first")
    axes.margins(x=0)
    axes.set_ylim(top=1.15 * axes.get_ylim()[1])
    axes.legend(loc="upper center", ncols=4)
    return figure
