"""The figure of chapter 07: who works, and who waits."""

from itertools import chain

from lab import schedules
from lab.chapters import chapter
from lab.drawing import BLUE, ORANGE, RED, blank, draw_losses, runs_of

OF = "07_pipeline_parallel"
GREEN, IDLE = "#81a88d", "#e9e9e9"
ACTIONS = {"F": (BLUE, "F: forward"), "B": (ORANGE, "B: backward, input"),
           "W": (GREEN, "W: backward, weights"), "BW": (RED, "BW: backward, input and weights")}


def draw(runs):
    """Rank by rank, the schedule of the last run: as simulated, and as computed; and the bytes that
    each rank keeps."""
    known = [run for run in runs if run["chapter"] == OF and "simulated" in run["recorded"]]
    if not known:
        return draw_losses(runs_of(runs, OF)["torch"])  # PyTorch's run records no schedule
    *_, run = known
    shown = [of for of in ("simulated", "executed") if of in run["recorded"]]
    inches = dict.fromkeys(shown, 0.7 + 0.3 * len(run["recorded"]["simulated"]))
    inches |= {"kept": 2.4} if "executed" in shown else {}
    figure = blank(12, 0.3 + sum(inches.values()))
    panels = figure.subplot_mosaic([[name] for name in inches],
                                   height_ratios=list(inches.values()))
    for of in shown:
        actions = timeline(run, of)
        draw_actions(panels[of], actions)
        panels[of].set_title(title_of(run, of, actions))
    if "kept" in panels:
        draw_kept(panels["kept"], timeline(run, "executed"))
        panels["kept"].sharex(panels["executed"])
    draw_legend(figure, run["recorded"]["simulated"])
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
