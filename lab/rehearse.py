r"""A chapter's run, rehearsed: as one rank of a cluster that is not there, at its full size.

    python -m lab.rehearse 09_5d.py --ranks 16384 --rank 5 --preset llama-405b --tp 8 --pp 16 \
        --zero 1 --precision bf16 --batch 2048
    python -m lab.rehearse 03_zero.py --ranks 64 --preset llama-8b --variant zero3 --batch 64
    python -m lab.rehearse 07_pipeline_parallel.py --ranks 16 --preset llama-8b --plot memory.png

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
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import common
from common import Config, Refused
from lab import chapters
from lab.drawing import save
from lab.rehearsal import fakes, growth, rehearsal, rehearsed
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
    add("--software", choices=chapters.chapter("10").SOFTWARE,
        help="say what this one frees that ours keeps, by the planner")
    add("--all-stages", action="store_true", help="a rank of each stage of the pipeline, which "
        "takes as many times as long; --plot alone takes the first, the middle and the last")
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
    name = Path(chapter.__file__).stem
    args = strict.parse(chapter.__file__, chapter.__doc__, chapter.VARIANTS,
                        functools.partial(flags, chapter), argv, chapters.about(name),
                        fits_here=False)
    refuse_misfits(chapter, args, {word.partition("=")[0] for word in argv})
    with strict.ranks_by_flag(), fakes.as_rank(args.rank, args.ranks):
        chapter.requires(args, args.ranks)
    args.verify, args.steps = False, rehearsal.STEPS
    return args


def refuse_misfits(chapter, args, given):
    if args.all_stages and not args.chapter.startswith(("07", "09")):
        raise Refused(f"--all-stages are a pipeline's, and {args.chapter[:2]} has none",
                      "without --all-stages")
    for flag in ("--software", "--cluster"):            # of the planner
        if flag in given and args.precision != "bf16":
            raise Refused(f"{flag} is the planner's, which plans --precision bf16",
                          "--precision bf16", f"without {flag}")
    strict.refuse_as_one_rank(args, given, "to a rehearsal")
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


def ranks_of(chapter, args):
    """The ranks that are rehearsed, by their stage: those beside --rank that differ from it in
    their stage alone."""
    stages = [args.rank]
    if args.chapter.startswith("07"):
        stages = [*range(args.ranks)]
    if args.chapter.startswith("09"):
        places = chapter.places_of_ranks(args)
        mine = [(place.pp, rank) for rank, place in enumerate(places)
                if place._replace(pp=0) == places[args.rank]._replace(pp=0)]
        stages = [rank for _, rank in sorted(mine)]
    if args.all_stages:
        return stages
    shown = {stages[0], stages[len(stages) // 2], stages[-1]} if args.plot else {}
    return [rank for rank in stages if rank in shown or rank == args.rank]


def rehearse(argv, rank=None):
    """The lines and the record of one rank; None: the one of the flags, whose step is counted in
    half the cluster as well. Raises NeedsValues, or growth.Found."""
    chapter, args = accepted(argv)
    half = growth.halved(chapter, args, argv, parse) if rank is None else None
    args.rank = args.rank if rank is None else rank
    run = rehearsal.rehearse(chapter, args, half)
    return run.told(), run.as_json()


def problems_of(chapter, argv):
    """What is found in a chapter's module, whose flags these are, in sentences."""
    args = parse(chapter, argv)
    try:
        return rehearsal.rehearse(chapter, args,
                                  growth.halved(chapter, args, argv, parse)).problems
    except growth.Found as found:
        return [*found.args]


def rehearse_all(argv, ranks):
    """The same of several, at once on all cores. ranks: None is the one of the flags."""
    workers = min(len(ranks), os.cpu_count())
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return [*pool.map(functools.partial(rehearse, argv), ranks)]


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    chapter, args = refusals.accepted(accepted, argv, alone=True)
    for path in filter(None, (args.json, args.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    ranks = [None if rank == args.rank else rank for rank in ranks_of(chapter, args)]
    try:
        told = [rehearse(argv)] if ranks == [None] else rehearse_all(argv, ranks)
    except rehearsal.NeedsValues as error:
        where, source = error.args
        refusals.fail(f"{where} asks a tensor for its value, and a rehearsal has no numbers: "
                      f"{source}", status=1)
    except growth.Found as found:                       # then an error came of it
        print(*(f"  ✗ {sentence}" for sentence in found.args), sep="\n")
        return 1
    lines, record = told[ranks.index(None)]
    records = [record for _, record in told]
    if len(ranks) > 1:
        lines += ["", *rehearsed.table(records)]
        record = record | {"stages": records}
    print("\n".join(lines))
    outputs = {"json": lambda path: path.write_text(json.dumps(record, indent=1)),
               "plot": lambda path: save(rehearsed.draw(records), path)}
    written = [wrote(args, flag, write) for flag, write in outputs.items()]
    return int(not all(written) or any(record["problems"] for record in records))


if __name__ == "__main__":
    commands.program(main)
