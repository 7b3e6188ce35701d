"""The figure of what lab.faults has measured: what faults cost."""

from lab.drawing import BLUE, RED, blank, runs_of

OF = "faults"


def draw(runs):
    """Loss over the seconds of a run that was killed, above that of a quiet one; and over the
    steps, where both are the same."""
    [recorded] = [run["recorded"] for run in runs_of(runs, OF).values()]
    quiet, faulty = recorded["quiet"], recorded["faulty"]
    figure = blank(11, 5)
    over_time, over_steps = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    [one] = quiet["starts"]
    for axes, x in ((over_time, one["seconds"]), (over_steps, one["steps"])):
        axes.plot(x, one["losses"], color="darkgray", linewidth=4, label="the quiet run")

    starts = faulty["starts"]
    counts = {step: i for i, start in enumerate(starts) for step in start["steps"]}
    ended = 0
    for i, start in enumerate(starts):
        seconds, steps, losses = start["seconds"], start["steps"], start["losses"]
        kept = sum(counts[step] == i for step in steps)     # the first ones
        over_time.axvspan(ended, seconds[0], color="#ebebeb", label=once(over_time, "ranks start"))
        over_time.plot(seconds[:kept], losses[:kept], color=BLUE,
                       label=once(over_time, "the run with faults"))
        lost = slice(max(0, kept - 1), None)
        over_time.plot(seconds[lost], losses[lost], ":", color=RED,
                       label=once(over_time, "steps that were lost, and computed again"))
        over_steps.plot(steps[:kept], losses[:kept], color=BLUE)
        ended = seconds[-1]
    for at in faulty["kills"]:
        _, loss = max((t, loss) for start in starts
                      for t, loss in zip(start["seconds"], start["losses"]) if t <= at)
        over_time.plot(at, loss, "x", color=RED, markersize=10, markeredgewidth=2.5, linewidth=0,
                       label=once(over_time, "a rank is killed"))

    over_time.set(xlabel="seconds", ylabel="loss")
    over_time.set_title(f"{len(faulty['kills'])} faults, and a save after every "
                        f"{faulty['every']} steps")
    over_steps.set(xlabel="step")
    over_steps.set_title("over steps, both are the same")
    for axes in (over_time, over_steps):
        axes.margins(x=0.01)
    over_time.legend(loc="upper right", frameon=True, framealpha=1, edgecolor="white", fontsize=9)
    return figure


def once(axes, label):
    """`label`, but for the second thing that would bear it."""
    return label if label not in axes.get_legend_handles_labels()[1] else None
