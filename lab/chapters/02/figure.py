"""The figure of chapter 02: what overlaps with backward."""

import math

from lab.drawing import ORANGE, draw_overlap, explain_overlap, new_figure, runs_of
from lab.run.overlap import hidden_share

OF = "02_data_parallel"


def draw(runs):
    """One row per variant: the step, with a tick per gradient in backward; below it its
    all_reduces, from start to end, with the time for which they queued behind each other."""
    shown = runs_of(runs, OF, "naive", "overlap", "bucket") or runs_of(runs, OF)
    figure, rows = new_figure(10, 1.6 * len(shown) + 1, len(shown), sharex=True, squeeze=False)
    for [axes], (variant, run) in zip(rows, shown.items()):
        timeline = run["recorded"]["timeline"]
        draw_overlap(axes, run, variant, tall=2.5, separate=math.inf)
        begin, _ = timeline["backward"][-1]
        ready = [1e3 * t for t in timeline["gradients"] if t >= begin]
        axes.vlines(ready, 0.05, 0.75, color=ORANGE, linewidth=0.8)
        axes.set_title(f"{variant}: {len(timeline['collectives'])} all_reduces, "
                       f"{hidden_share(timeline):.0%} of their time hidden "
                       "(a thin line: a gradient is ready)")
    explain_overlap(figure, axes, shown.values())
    figure.suptitle(f"{run['world_size']} ranks, {run['device']}", x=0.01, ha="left")
    return figure
