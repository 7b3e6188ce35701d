"""What the rehearsed ranks of a run say together: a table of them, and memory over the step."""

from collections.abc import Iterator

from lab.drawing import BLUE, GRAY, ORANGE, PURPLE, RED, legend, new_figure
from lab.run.words import quantity

# Of what is alive, from the bottom; and of a schedule's actions.
CLASSES = {"parameters": BLUE, "gradients": PURPLE, "optimizer states": "#b8b3c6",
           "kept for backward": ORANGE, "all else": "#e3e3e3"}
ACTIONS = {"F": ("#81a88d", "forward"), "B": ("#d9822b", "backward, input"),
           "BW": (RED, "backward"), "W": ("#a05fb4", "backward, weights")}
COLUMNS = "parameters", "gradients", "optimizer states", "activations", "all that is alive"


def table(records: list[dict]) -> Iterator[str]:
    """Yield a line for each rank, the most of each column, and what the planner says."""
    rows = {f"{record['rank']:,}": bytes_of(record) for record in records}
    rows["most"] = [max(column) for column in zip(*rows.values())]
    planned = records[0]["recorded"].get("planner")
    if planned:                                         # which does not say what is alive
        rows["planner"] = [planned[column][1] for column in COLUMNS[:-1]]
    yield f"  {'rank':<10}" + "".join(f"{column:>20}" for column in COLUMNS)
    for name, sizes in rows.items():
        yield f"  {name:<10}" + "".join(f"{quantity(size):>20}" for size in sizes)


def bytes_of(record):
    """Those of the COLUMNS, the last two at their most."""
    measured = {check["name"]: check["measured"] for check in record["checks"]}
    recorded = record["recorded"]
    return [*(measured[column] for column in COLUMNS[:3]), recorded["activations"],
            sum(recorded["peak"].values())]


def draw(records: list[dict]) -> object:
    """For each rank, what is alive over the metered step, by class, and below it the actions."""
    figure, panels = new_figure(11, 0.9 + 2.3 * len(records), len(records), squeeze=False,
                                sharey=True)
    for [axes], record in zip(panels, records):
        draw_rank(axes, record)
    top = axes.get_ylim()[1]
    for [axes], record in zip(panels, records):
        draw_actions(axes, record["recorded"]["actions"], top / 14)
    axes.set_ylim(-top / 14, top)
    axes.set_xlabel("allocations and releases of the step, in their order", fontsize=9)
    there = {kind for record in records for kind, *_ in record["recorded"]["actions"]}
    colors = {words: color for kind, (color, words) in ACTIONS.items() if kind in there}
    legend(figure, CLASSES | colors, 5, "upper center")
    return figure


def draw_rank(axes, record):
    at, *sizes = record["recorded"]["over_time"]
    axes.stackplot(at, *[[size / 1e9 for size in of_class] for of_class in sizes],
                   colors=CLASSES.values(), step="post", linewidth=0)
    most = sum(record["recorded"]["peak"].values())
    if most > record["memory"] / 2:                     # what a GPU has
        axes.axhline(record["memory"] / 1e9, color=GRAY, linewidth=0.8, linestyle=":")
    axes.margins(x=0)
    axes.set_ylabel("GB")
    axes.set_title(f"rank {record['rank']:,} of {record['world_size']:,}: {quantity(most)} at the "
                   f"most, of a GPU's {quantity(record['memory'])}")


def draw_actions(axes, actions, height):
    for kind, _, _, begin, end, *_ in actions:
        axes.broken_barh([(begin, end - begin)], (-height, height), facecolor=ACTIONS[kind][0],
                         edgecolor="white", linewidth=0.3)
