"""Draws chapter 10: which layouts are best, what they take, and how right that has been.

    python -m lab.plans [--out figures/10_planner.png]

Nothing is measured here: it is what the planner computes, in a minute. Four pictures: the fastest
layout over model sizes and numbers of GPUs; bytes of a GPU as tp, pp and ZeRO share them out; the
seconds of the ten best layouts; what was published, over what is predicted.
"""

import sys
from pathlib import Path

from lab.chapters import rooms_with
from lab.cli import commands, refusals


def main(argv=None):
    parser = commands.Parser("-m lab.plans", description=__doc__)
    parser.add_argument("--out", type=commands.output("figures/10_planner.png"),
                        default=Path("figures/10_planner.png"))
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parser.parse_args, argv, alone=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rooms_with("figure")["10"].draw().savefig(args.out, dpi=110)
    print(args.out)
    return 0


if __name__ == "__main__":
    commands.program(main)
