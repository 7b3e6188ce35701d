r"""A chapter's run, rehearsed: as one rank of a cluster that is not there, at its full size.

    python -m lab.rehearse 09_5d.py --ranks 16384 --rank 5 --preset llama-405b --tp 8 --pp 16 \
        --zero 1 --precision bf16 --batch 2048
    python -m lab.rehearse 03_zero.py --ranks 64 --preset llama-8b --variant zero3 --batch 64

The chapter's own code takes two steps. No weight is drawn and no number computed: each tensor has
its shape, and no memory. So a report says what this rank would hold, keep, send and compute, beside
the chapter's formulas; how many bytes are alive at the peak, what they are, and which lines have
made them. A mixture chooses its experts in turn. What a machine's seconds are, it cannot say.

Behind the chapter come its own flags, and --ranks, --rank and --json; further presets are
llama-70b and llama-405b.
"""

import functools
import sys
from unittest import mock

import torch

import common
from common import Config, Refused
from lab import chapters
from lab.bench import anatomy, rehearsal
from lab.cli import commands, refusals, strict

PRESETS = {             # as published
    "llama-70b": Config(80, 8192, 64, 8, 8192, 128256, False, "sdpa", True, 28672),
    "llama-405b": Config(126, 16384, 128, 8, 8192, 128256, False, "sdpa", True, 53248),
}
WITHOUT = "01", "10"    # one GPU's, and the planner
MEANINGLESS = ("--steps", "--verify", "--no-verify", "--plot", "--profile", "--save",
               "--save-every", "--keep", "--resume", "--timeout")


def files():
    """{what is typed: number} of the chapters that can be rehearsed."""
    return {f"{name}.py": name[:2] for name in chapters.NAMES
            if chapters.trains(name) and name[:2] not in WITHOUT}


def flags(chapter, parser):
    """The chapter's, and those of a rehearsal."""
    add = parser.add_argument
    add("file", choices=[*files()], help="the chapter")
    add("--ranks", type=commands.number(int, 1, 2**20, 8), default=8,
        help="of the cluster; default: 8")
    add("--rank", type=commands.number(int, 0, 2**20, 0), default=0,
        help="the one of them that is rehearsed; default: 0")
    add("--operators", choices=("gpu", "cpu"), default="gpu",
        help="whose: of a GPU RMSNorm is one, which keeps less for backward; default: gpu")
    add("--cluster", choices=anatomy.planner().CLUSTERS, default="h100",
        help="whose rates and memory the planner takes; default: h100")
    add("--software", choices=anatomy.planner().SOFTWARE,
        help="say what this one frees that ours keeps, by the planner")
    getattr(chapter, "flags", lambda parser: None)(parser)


def accepted(argv):
    """(A chapter's module, the arguments of its rehearsal); raises Refused."""
    typed = [word for word in argv if word in files()]
    if not typed:                                       # which says what is missing
        parser = commands.Parser("-m lab.rehearse", description=__doc__)
        flags(None, parser)
        parser.add_argument("--json", type=commands.output("run.json"), help="write the rehearsal")
        parser.parse_args(argv)
    chapter = chapters.chapter(files()[typed[0]])
    return chapter, parse(chapter, argv)


def parse(chapter, argv):
    with (mock.patch.dict(common.PRESETS, PRESETS),
          mock.patch("lab.cli.strict.refuse_sizes")):   # what this machine has is no limit
        args = strict.parse(chapter.__file__, chapter.__doc__, chapter.VARIANTS,
                            functools.partial(flags, chapter), argv)
    refuse_misfits(chapter, args, {word.partition("=")[0] for word in argv})
    try:
        chapter.requires(args, args.ranks)
    except Refused as refused:                          # torchrun's flag, by the name it has here
        why, *changes = refused.args
        raise Refused(why, *(change.replace(refusals.RANKS, "--ranks") for change in changes)
                      ) from None
    args.verify, args.steps, args.planned = False, rehearsal.STEPS, {}
    return args


def refuse_misfits(chapter, args, given):
    for flag in MEANINGLESS:
        if flag in given:
            raise Refused(f"{flag} means nothing to a rehearsal", f"without {flag}")
    if args.rank >= args.ranks:
        raise Refused(f"--rank {args.rank} is not below --ranks = {args.ranks}",
                      f"--rank {args.ranks - 1}", f"--ranks {args.rank + 1}")
    if args.variant == "torch":
        raise Refused("--variant torch is PyTorch's code, and a rehearsal is of a chapter's own",
                      f"--variant {next(iter(chapter.VARIANTS))}")
    if args.device == "cuda":
        raise Refused("--device cuda: a rehearsal needs no device", "--device cpu")
    if getattr(args, "kernels", False):
        raise Refused("--kernels are run, and a rehearsal computes nothing", "without --kernels")
    if getattr(args, "matmul", "loop") == "grouped" and common.rounded(args) != torch.bfloat16:
        raise Refused("--matmul grouped has its shapes, where there are no numbers, in bfloat16 "
                      "alone", "--precision bf16", "--matmul loop")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    chapter, args = refusals.accepted(accepted, argv, alone=True)
    try:
        run = rehearsal.rehearse(chapter, args)
    except rehearsal.NeedsValues as error:
        where, source = error.args
        refusals.fail(f"{where} asks a tensor for its value, and a rehearsal has no numbers: "
                      f"{source}", status=1)
    run.tell()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    return 0 if run.wrote("json", run.write_json) and not run.problems else 1


if __name__ == "__main__":
    commands.program(main)
