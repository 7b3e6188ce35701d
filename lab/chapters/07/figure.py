"""The figure of chapter 07: who works, and who waits."""

from itertools import chain

from lab import schedules
from lab.chapters import chapter
from lab.drawing import BLUE, ORANGE, PURPLE, RED, blank

OF = "07_pipeline_parallel"
GREEN, IDLE = "#81a88d", "#e9e9e9"
ACTIONS = {"F": (BLUE, "F: forward"), "B": (ORANGE, "B: backward, input"),
           "W": (GREEN, "W: backward, weights"), "BW": (RED, "BW: backward, input and weights")}
BUBBLES = {"afab": (ORANGE, "-", 5), "1f1b": (BLUE, "-", 1.5), "interleaved": (RED, "o-", 1.5),
           "zb-h1": ("#c9bfd3", "-", 5), "zb-h2": (PURPLE, "-", 1.5),
           "dualpipe": ("black", "-", 1), "dualpipe-v": ("black", ":", 1.5)}


def draw(runs):
    """Rank by rank, the schedule of the last run: as simulated, and as computed; and the bytes that
    each rank keeps. At the bottom: the bubbles of all schedules, simulated."""
    pipeline = chapter("07")
    known = [run for run in runs if run["chapter"] == OF and "simulated" in run["recorded"]]
    run = known[-1] if known else {"recorded": {}}
    shown = [of for of in ("simulated", "executed") if of in run["recorded"]]
    p = len(run["recorded"].get("simulated", []))
    inches = {of: 0.7 + 0.3 * p for of in shown}
    inches |= {"kept": 2.4} if "executed" in shown else {}
    inches["bubbles"] = 3.2
    figure = blank(12, 0.3 + sum(inches.values()))
    panels = figure.subplot_mosaic([[name] for name in inches],
                                   height_ratios=list(inches.values()))

    for of in shown:
        actions = timeline(run, of)
        draw_actions(panels[of], actions)
        panels[of].set_title(title_of(run, of, actions))
        if of == "executed":
            draw_kept(panels["kept"], actions)
            panels["kept"].sharex(panels[of])
    if shown:
        draw_legend(figure, run["recorded"]["simulated"])
    draw_bubbles(panels["bubbles"], pipeline)
    return figure


def timeline(run, of):
    """The actions of each rank; of a real step in ms."""
    unit = 1 if of == "simulated" else 1e3
    return [[[kind, stage, i, unit * start, unit * end, *kept]
             for kind, stage, i, start, end, *kept in of_rank] for of_rank in run["recorded"][of]]


def title_of(run, of, actions):
    every = [*chain.from_iterable(actions)]
    m = len({action[2] for action in every})
    end = max(action[4] for action in every)
    work = sum(action[4] - action[3] for action in every)
    turns = ", where ranks take turns if cores are fewer" if run["device"] == "cpu" else ""
    times = schedules.in_words(**chapter("07").times(run["config"].get("recompute", "none")))
    what = {"simulated": f"{run['variant']}, p = {len(actions)}, m = {m}, as simulated, {times}",
            "executed": f"the same in ms, as computed on {run['device']}{turns}"}
    return f"{what[of]}: idle over work {len(actions) * end / work - 1:.2f}"


def draw_actions(axes, actions):
    """A row for each rank: grey, and on it a box for each action."""
    end = max(action[4] for action in chain.from_iterable(actions))
    points = 72 * 11.3 / end                            # of paper, for a unit of time
    for rank, of_rank in enumerate(actions):
        axes.barh(rank, end, height=0.86, color=IDLE)
        for kind, stage, i, start, stop, *_ in of_rank:
            color, width = shade(kind, stage == rank), points * (stop - start)
            axes.barh(rank, stop - start, left=start, height=0.86, color=color, edgecolor="white",
                      linewidth=min(0.6, 0.1 * width))
            size = min(7, 1.4 * width / len(str(i)))    # of a number that fits into the box
            if size > 4.5:
                is_dark = kind in ("F", "BW") and stage == rank
                axes.text((start + stop) / 2, rank, i, ha="center", va="center_baseline",
                          fontsize=size, color="white" if is_dark else "black")
    axes.set_yticks(range(len(actions)), [f"rank {rank}" for rank in range(len(actions))])
    axes.set_ylim(len(actions) - 0.5, -0.5)
    axes.set_xlim(0, 1.003 * end)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def shade(kind, is_first):
    """The color of an action, which is lighter in a stage that is not its rank's first."""
    from matplotlib.colors import to_hex, to_rgb

    color, _ = ACTIONS[kind]
    return color if is_first else to_hex([1 - 0.5 * (1 - part) for part in to_rgb(color)])


def draw_legend(figure, simulated):
    from matplotlib.patches import Patch

    there = set()
    for rank, of_rank in enumerate(simulated):
        there |= {(action[0], action[1] == rank) for action in of_rank}
    boxes = [Patch(color=color, label=label) for kind, (color, label) in ACTIONS.items()
             if kind in {kind for kind, _ in there}]
    if not all(is_first for _, is_first in there):
        boxes.append(Patch(color=shade("F", False), label="lighter: the rank's further stages"))
    boxes.append(Patch(color=IDLE, label="idle"))
    figure.legend(handles=boxes, loc="outside upper right", ncols=6, fontsize=9)


def draw_kept(axes, actions):
    """Over the same time: MB after each action."""
    import matplotlib

    colors = matplotlib.colormaps["plasma"]
    for rank, of_rank in enumerate(actions):
        axes.step([action[4] for action in of_rank], [action[5] / 1e6 for action in of_rank],
                  where="post", color=colors(0.9 * rank / len(actions)), linewidth=1.4,
                  label=f"rank {rank}")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.set_title("activations in MB that each rank keeps for backward, after each of its actions")
    axes.set_xlabel("ms since the step began", fontsize=9)
    axes.legend(loc="upper center", ncols=8, fontsize=8)


def draw_bubbles(axes, pipeline, p=8, v=2):
    """Of each schedule, against the micro-batches with which it can be."""
    for variant, (color, style, width) in BUBBLES.items():
        first = 2 * p if variant.startswith("dualpipe") else p
        counts = range(first, 8 * p + 1, p if variant == "interleaved" else 2)
        ratios = [schedules.simulated_bubble(pipeline.make_schedule(variant, p, m, v), variant)
                  for m in counts]
        label = {"interleaved": f"interleaved, {v} slices each",
                 "zb-h2": "zb-h2, between a rank's first and last action"}.get(variant, variant)
        axes.plot(counts, ratios, style, color=color, linewidth=width, markersize=3, label=label)
    naive = schedules.simulated_bubble(pipeline.make_schedule("naive", p, p), "naive")
    axes.plot([], [], " ", label=f"naive: {naive:g}, however many micro-batches")
    axes.set_xscale("log", base=2)
    axes.set_xticks([p, 2 * p, 4 * p, 8 * p], [p, 2 * p, 4 * p, 8 * p])
    axes.set_ylim(bottom=-0.02)
    axes.margins(x=0.01)
    axes.set_xlabel("micro-batches")
    axes.set_title(f"the bubble over work of all schedules, simulated: {p} ranks, F = B = W")
    axes.legend(loc="upper right", fontsize=8)
