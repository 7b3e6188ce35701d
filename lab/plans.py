"""Draws what is planned, not measured.

    python -m lab.plans                 all pictures, into figures/
    python -m lab.plans 10_planner      one
    python -m lab.plans --out folder    into another folder

    10_planner      the fastest layout over model sizes and numbers of GPUs; bytes of a GPU as tp,
                    pp and ZeRO share them out; the seconds of the ten best layouts; what was
                    published, over what is predicted
    megatron        the tables and figures of Megatron's paper, predicted
    playbook        the playbook's heat map of best layouts, its plots over dp and tp, its runs, and
                    memory of Llama models by what is recomputed, predicted beside what it measured
    rooflines       from which batch on compute hides messages: of each axis, of both, between pods,
                    and on each cluster
"""

import sys
from pathlib import Path

from lab.bench.drawing import save
from lab.chapters import rooms_with
from lab.cli import commands, refusals
from lab.cli.refusals import refusal
from lab.sources import megatron_figure, playbook_figure, scaling_book_figure


def draw_planner():
    return rooms_with("figure")["10"].draw()


PICTURES = {"10_planner": draw_planner, "megatron": megatron_figure.draw,
            "playbook": playbook_figure.draw, "rooflines": scaling_book_figure.draw}


def a_picture(text):
    """An argparse type."""
    if text in PICTURES:
        return text
    raise refusal()(f"there is no picture {text!r}", *PICTURES)


def parse(argv):
    parser = commands.Parser("-m lab.plans", description=__doc__)
    parser.add_argument("picture", nargs="*", type=a_picture, help="default: all")
    parser.add_argument("--out", type=commands.output("figures"), default=Path("figures"),
                        help="the folder")
    return parser.parse_args(argv)


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.picture or PICTURES:
        path = args.out / f"{name}.png"
        save(PICTURES[name](), path, dpi=110)
        print(path)
    return 0


if __name__ == "__main__":
    commands.program(main)
