"""The folder that students get: chapters with holes, and what grades them, without a solution.

    python -m lab.bundle                        write bundle/
    python -m lab.bundle --out handout          another folder
"""

import sys
from pathlib import Path

from common import Refused
from lab import ROOT
from lab.classroom import bundle, checks
from lab.run import commands, refusals


def parse(argv):
    parser = commands.Parser("-m lab.bundle", description=__doc__)
    parser.add_argument("--out", type=commands.output("bundle"), default=Path("bundle"),
                        metavar="FOLDER", help="default: bundle")
    parser.add_argument("--force", action="store_true", help="also over a bundle that is there")
    args = parser.parse_args(argv)
    if args.out.resolve() == ROOT:
        raise Refused(f"--out {args.out} is the course itself", "--out bundle")
    if (args.out / "common.py").exists() and not args.force:
        raise Refused(f"--out {args.out} has been written before", "--force")
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    checks.warm_up()
    bundle.write(args.out, say=lambda words: print(words, flush=True))
    print(f"{args.out} has chapters with holes, and what grades them; try: "
          f'cd {args.out}; make grade ONLY="00.2"')
    return 0


if __name__ == "__main__":
    commands.program(main)
