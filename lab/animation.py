"""The README's moving picture: three schedules of chapter 07, played at the same time.

    python -m lab.animation [--out figures/pipeline.svg]

A box is an action of one of the chapter's lists, and lies where lab.schedules simulates it. Without
its style the SVG is the finished picture, which stands where nothing moves, or where a reader wants
it so. The style lets a cover slide off the boxes, and a lamp beside each GPU show what it does.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jinja2

from lab import schedules
from lab.chapters import chapter
from lab.cli import commands, refusals

P, M = 4, 8                             # GPUs, and micro-batches of a step
SCHEDULES = {                           # chapter 07's variants: their names, and what they do
    "afab": ("GPipe", "all forwards, then all backwards"),
    "1f1b": ("1F1B", "one forward, one backward in turn"),
    "zb-h1": ("Zero bubble (ZB-H1)", "weight gradients wait, and fill the gaps")}
COLORS = {"F": "#355070", "B": "#f6c7a4", "W": "#63967a", None: "#dcdad5"}  # None: of a GPU's lamp
SECONDS = 0.3                           # of a unit of time
PAUSE = 16                              # units in which the finished picture stands


class Panel(NamedTuple):
    """A schedule. lanes: of each GPU (kind, stage, micro-batch, start, end) of its actions. idle:
    the share of the step, the same on each GPU. alive: micro-batches on a GPU, at the most."""

    name: str
    words: str
    lanes: list
    end: float
    idle: float
    alive: int


def panel(variant: str) -> Panel:
    """Of one of SCHEDULES."""
    made = chapter("07").make_schedule(variant, P, M)
    lanes = schedules.timetable(made)
    bubble = schedules.simulated_bubble(made, variant)      # over the work
    alive = max(max(chapter("07").alive_over_time(actions)) for actions in made.actions)
    end = max(end for lane in lanes for *_, end in lane)
    return Panel(*SCHEDULES[variant], lanes, end, bubble / (1 + bubble), alive)


def waits(lane: list, end: float) -> Iterator[tuple]:
    """(Since when, until when) a GPU is idle."""
    free = 0
    for *_, start, then in [*lane, (end, end)]:
        if free < start:
            yield free, start
        free = then


def changes(lane: list, end: float) -> list[tuple]:
    """(When it begins, what a GPU does): a kind, of BW the first one, or None."""
    works = [(start, kind[0]) for kind, _, _, start, _ in lane]
    return sorted([*works, *((since, None) for since, _ in waits(lane, end))])


def draw() -> str:
    """The SVG."""
    panels = [panel(variant) for variant in SCHEDULES]
    until = max(one.end for one in panels)
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent),
                                     autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("animation.svg").render(
        panels=panels, waits=waits, changes=changes, colors=COLORS, p=P, m=M, until=until,
        seconds=SECONDS * (until + PAUSE), share=lambda time: 100 * time / (until + PAUSE))


def parse(argv):
    parser = commands.Parser("-m lab.animation", description=__doc__)
    parser.add_argument("--out", type=commands.output("pipeline.svg"),
                        default=Path("figures/pipeline.svg"), help="the file")
    return parser.parse_args(argv)


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(draw(), encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    commands.program(main)
