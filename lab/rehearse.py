r"""A chapter's run, rehearsed: as one rank of a cluster that is not there, at its full size.

    python -m lab.rehearse 09_5d.py --ranks 16384 --rank 5 --preset llama-405b --tp 8 --pp 16 \
        --zero 1 --precision bf16 --batch 2048
    python -m lab.rehearse 03_zero.py --ranks 64 --preset llama-8b --variant zero3 --batch 64

The chapter's own code takes two steps. No weight is drawn and no number computed: each tensor has
its shape, and no memory. So a report says what this rank would hold, keep, send and compute, beside
the chapter's formulas and the planner's; how many bytes are alive at the peak, what they are, and
which lines have made them. What the seconds of a machine are, it cannot say: those are the
planner's. Experts are picked in turn.

A ✗ names the line of what no small run shows (lab/rehearsal/growth.py): an integer too large for
its int32; scores in memory, where --attention sdpa is to make none; and, from 1,024 ranks on, what
a step has more of with more ranks. For this one step is rehearsed with half of them as well.

Behind the chapter come its own flags, and those of a rehearsal. Further presets are llama-70b,
llama-405b and deepseek-v3.
"""

import functools
import sys
from pathlib import Path

import torch

import common
from common import Config, Refused
from lab import chapters
from lab.rehearsal import fakes, growth, rehearsal
from lab.run import commands, refusals, strict
from lab.run.bench import wrote

PRESETS = {             # as published
    "llama-70b": Config(80, 8192, 64, 8, 8192, 128256, False, "sdpa", True, 28672),
    "llama-405b": Config(126, 16384, 128, 8, 8192, 128256, False, "sdpa", True, 53248),
    # Its attention has whole heads here, of 56 numbers, and no latents.
    "deepseek-v3": Config(61, 7168, 128, 128, 4096, 129280, False, "sdpa", True, 2048),
}
common.PRESETS.update(PRESETS)
WITHOUT = "01", "10"    # one GPU's, and the planner
OF_TRAINING = ("--steps", "--verify", "--no-verify", "--profile", "--save", "--save-every",
               "--keep", "--resume", "--timeout", "--noise-scale", "--plot")


def files():
    """{what is typed: number} of the chapters that can be rehearsed."""
    return {f"{name}.py": name[:2] for name in chapters.NAMES
            if chapters.trains(name) and name[:2] not in WITHOUT}


def flags(chapter, parser):
    """The chapter's, and those of a rehearsal."""
    add = parser.add_argument
    if chapter:
        parser.prog = f"-m lab.rehearse {Path(chapter.__file__).name}"
    add("file", choices=[*files()], help="the chapter")
    add("--ranks", type=commands.number(int, 1, 2**20, 8), default=8,
        help="of the cluster; default: 8")
    add("--rank", type=commands.number(int, 0, 2**20, 0), default=0,
        help="the one of them that is rehearsed; default: 0")
    add("--operators", choices=("gpu", "cpu"), default="gpu",
        help="whose: of a GPU RMSNorm is one, which keeps less for backward; default: gpu")
    add("--cluster", choices=chapters.chapter("10").CLUSTERS, default="h100",
        help="whose rates and memory the planner takes; default: h100")
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
    """The arguments of a chapter's rehearsal; raises Refused."""
    name = Path(chapter.__file__).stem
    args = strict.parse(chapter.__file__, chapter.__doc__, chapter.VARIANTS,
                        functools.partial(flags, chapter), argv, chapters.about(name),
                        fits_here=False)
    refuse_misfits(chapter, args, {word.partition("=")[0] for word in argv})
    try:
        with fakes.as_rank(args.rank, args.ranks):
            chapter.requires(args, args.ranks)
    except Refused as refused:                          # torchrun's flag is --ranks here
        why, *changes = refused.args
        changes = [change.replace(refusals.RANKS, "--ranks") for change in changes]
        raise Refused(why, *changes) from None
    args.verify, args.steps = False, rehearsal.STEPS
    return args


def refuse_misfits(chapter, args, given):
    """Refuse flags that mean nothing without numbers, or to one rank."""
    if "--cluster" in given and args.precision != "bf16":
        raise Refused("--cluster is the planner's, which plans --precision bf16",
                      "--precision bf16", "without --cluster")
    for flag in OF_TRAINING:
        if flag in given:
            raise Refused(f"{flag} means nothing to a rehearsal", f"without {flag}")
    if args.rank >= args.ranks:
        raise Refused(f"--rank {args.rank} is not below --ranks = {args.ranks}",
                      f"--rank {args.ranks - 1}")
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


def rehearse(chapter, args, argv):
    """The Run of the rank that these flags name; its step is counted in half the cluster as well.
    Raises NeedsValues, or growth.Found."""
    return rehearsal.rehearse(chapter, args, growth.halved(chapter, args, argv, parse))


def problems_of(chapter, argv):
    """What is found in a chapter's module, whose flags these are, in sentences."""
    args = parse(chapter, argv)
    try:
        return rehearse(chapter, args, argv).problems
    except growth.Found as found:
        return [*found.args]


def main(argv=None):
    """Rehearse, and print and write the report. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    chapter, args = refusals.accepted(accepted, argv, alone=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    try:
        run = rehearse(chapter, args, argv)
    except rehearsal.NeedsValues as error:
        where, source = error.args
        refusals.fail(f"{where} asks a tensor for its value, and a rehearsal has no numbers: "
                      f"{source}", status=1)
    except growth.Found as found:                       # then an error came of it
        print(*(f"  ✗ {sentence}" for sentence in found.args), sep="\n")
        return 1
    print("\n".join(run.told()))
    is_written = wrote(args, "json", run.write_json)
    return int(not is_written or bool(run.problems))


if __name__ == "__main__":
    commands.program(main)
