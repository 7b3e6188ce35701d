"""The figure of chapter 02: what overlaps with backward."""

from lab.bench.drawing import BLUE, ORANGE, RED, new_figure, runs_of
from lab.bench.overlap import hidden_share

OF = "02_data_parallel"


def draw(runs):
    """One row per variant: backward with a tick per gradient; below it its all_reduces, from start
    to end, with the time for which they queued behind each other."""
    shown = runs_of(runs, OF, "naive", "overlap", "bucket") or runs_of(runs, OF)
    figure, rows = new_figure(10, 1.6 * len(shown) + 1, len(shown), sharex=True, squeeze=False)
    for [axes], (variant, run) in zip(rows, shown.items()):
        timeline = run["recorded"]["timeline"]
        begin, end = timeline["backward"][-1]
        since = lambda t, begin=begin: 1e3 * (t - begin)
        ready = [since(t) for t in timeline["gradients"] if t >= begin]
        sent = [(since(a), since(b)) for _, _, a, b, _ in timeline["collectives"]]
        axes.barh(0.5, since(end), height=0.8, left=0, color=BLUE, label="backward")
        axes.vlines(ready, 0.1, 0.9, color=ORANGE, linewidth=0.8, label="a gradient is ready")
        lane = lanes(sent)
        height = 2 / (1 + max(lane, default=0))                     # all lanes share two units
        for i, (start, stop) in enumerate(sent):
            axes.barh(1.1 + height * (lane[i] + 0.5), stop - start, left=start,
                      height=0.9 * min(height, 1), color=RED, edgecolor="white",
                      linewidth=0.5 * (height > 0.2), label="an all_reduce" if i == 0 else None)
        axes.set_title(f"{variant}: {len(sent)} all_reduces, {hidden_share(timeline):.0%} of their "
                       "time hidden")
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.margins(x=0)
    rows[-1][0].set_xlabel("ms since backward began")
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    figure.suptitle(f"Rank 0 of {run['world_size']}, {run['device']}", x=0.01, ha="left")
    return figure


def lanes(spans):
    """A lane for each span (start, end), such that spans of one lane do not overlap."""
    free_from, chosen = [], []
    for start, end in spans:
        lane = next((i for i, t in enumerate(free_from) if t <= start), len(free_from))
        free_from[lane:lane + 1] = [end]
        chosen.append(lane)
    return chosen
