"""A second configuration of a run: another batch, model, seed and number of ranks, which no student
has seen. What is right in general is right there, and a constant that fits the first run is not.

A seed, which may be any text, draws it: the same seed, the same configuration. The chapter accepts
each that is drawn. It is of the first one's kind: flags that choose a variant, a precision or a
schedule stay, and so does whether a rank has several micro-batches.
"""

import functools
import math
import random
import shlex
import threading

from lab import chapters
from lab.classroom import checks
from lab.classroom.exercise import SMALL, Run

OTHERS = {              # what is drawn for a flag that the run has
    "layers": range(1, 7), "seq": (8, 12, 16, 24, 32),
    "micro-batch": (1, 2, 3), "ignore": (0.2, 0.25, 0.35, 0.45), "clip": (0.07, 0.15, 0.2, 0.3),
    "experts": (2, 3, 4, 6, 8, 12), "top-k": (1, 2, 3), "nodes": (2, 3, 4),
    "window": range(2, 9), "documents": range(3, 9), "k": (1, 2, 3), "numbers": (6, 10, 25, 40),
    "balance-weight": (0.3, 0.6, 1.5), "bias-speed": (0.03, 0.05, 0.07),
    "dp": (2, 3, 4), "pp": (2, 3, 4), "cp": (2, 3, 4), "tp": (2, 3, 4), "ep": (2, 3, 4)}
WITHOUT_A_FLAG = "experts", "numbers"       # some have them by default
SHAPES = ((16, 2, 1), (16, 2, 2), (24, 6, 3), (24, 4, 1), (40, 4, 4), (48, 8, 2), (48, 8, 4),
          (48, 6, 6))                       # dim, heads, kv heads
AXES = "dp", "pp", "cp", "tp"               # of chapter 09, whose product are the ranks
LEFT_OPEN = f"--device=cpu --data={checks.TEXT} {SMALL}"
DRAWS = 400             # at most: some are refused
ENOUGH = 8              # configurations, of which those come first that differ most
MOST = 2                # times the work of the first run
ONE_AT_A_TIME = threading.Lock()            # of the threads that grade a student each


def varied(ranks, flags, chapter, seed, left_open=LEFT_OPEN):
    """Yield other configurations of a run, (ranks, flags): first those on another number of ranks,
    and of these and of the others those that differ most. chapter: "04_tensor_parallel".
    left_open: flags that stand before these, if it trains a model."""
    before = f"{left_open} {flags}" if chapters.trains(chapter) else flags
    first = accepted(chapter, ranks, before)
    given = {word.partition("=")[0] for word in shlex.split(before)}
    names = [name for name in OTHERS
             if f"--{name}" in given and not (name in AXES and getattr(first, name) == 1)
             or name in WITHOUT_A_FLAG and getattr(first, name, None)]
    has_several = sizes(first, ranks).get("micro-batches", 1) > 1
    draw, found = random.Random(f"{chapter} {ranks} {flags} {seed}"), {}
    for _ in range(DRAWS):
        drawn = {"seed": draw.randrange(1, 10_000)}
        drawn |= {name: draw.choice(OTHERS[name]) for name in names}
        count = draw.randint(2, max(4, ranks)) if ranks > 1 else 1
        if not drawn.keys().isdisjoint(AXES):
            count = math.prod(drawn.get(axis, 1) for axis in AXES)
        if hasattr(first, "model"):
            drawn |= zip(("dim", "heads", "kv-heads"), draw.choice(SHAPES))
            times = draw.randint(2, 8) if has_several or "micro-batch" not in drawn else 1
            drawn["batch"] = (drawn.get("micro-batch", 1) * times
                              * draw.choice((1, drawn.get("dp", count))))
        more = " ".join(f"--{name}={value}" for name, value in drawn.items())
        second = accepted(chapter, count, f"{before} {more}")
        if second and is_alike(sizes(first, ranks), sizes(second, count)):
            same = sizes(first, ranks).items() & sizes(second, count).items()
            found[count, f"{flags} {more}".strip()] = count == ranks, len(same)
        if len(found) == ENOUGH:
            break
    yield from sorted(found, key=found.get)


def dest(name):
    return name.replace("-", "_")


def accepted(chapter, ranks, flags):
    """The arguments of a run; None: the chapter refuses them."""
    import common
    from lab.cli import strict

    with ONE_AT_A_TIME:
        module = chapters.chapter(chapter[:2])
        try:
            args = strict.parse(module.__file__, module.__doc__, module.VARIANTS,
                                getattr(module, "flags", None), shlex.split(flags))
            module.requires(args, ranks)
        except common.Refused:
            return None
    return args


def sizes(args, ranks):
    """{what: how much of it}: the numbers that somebody could take for a constant."""
    found = {name: getattr(args, dest(name)) for name in OTHERS if getattr(args, dest(name), None)}
    found |= {"ranks": ranks}
    if hasattr(args, "model"):
        one = args.batch // args.shares
        found |= {
            "batch": args.batch, "of a rank": one, "micro-batches": one // args.micro_batch,
            "micro-batches of all": args.batch // args.micro_batch,
            "dim": args.model.dim, "heads": args.model.heads, "kv": args.model.kv_heads,
            "head dim": args.model.dim // args.model.heads,
            "group": args.model.heads // args.model.kv_heads}
    return found


def is_alike(first, second):
    """Whether two runs are of a kind, and differ in all that is divided by; and the second is not
    much dearer."""
    if second["ranks"] > max(6, first["ranks"]):
        return False
    if "batch" not in first:
        return True
    if (max(second.get("window", 0), second.get("documents", 0)) >= second["seq"]
            or second.get("experts", math.inf) <= second.get("top-k", 0)):
        return False                                    # as if there were none
    work = [found["layers"] * (50 * found["ranks"] + found["batch"] * found["seq"])
            for found in (first, second)]
    several = [found["micro-batches"] > 1 for found in (first, second)]
    counts = "batch", "of a rank", "micro-batches", "micro-batches of all"
    return (several[0] == several[1] and work[1] <= MOST * work[0]
            and not any(first[what] == second[what] > 1 for what in counts))


@functools.cache
def of(check, chapter, seed):
    """A second Run beside this one: the first one drawn that the solution passes; None: there is
    none."""
    from lab.classroom.exercises import solution

    source = solution(chapter)
    for ranks, flags in varied(check.ranks, check.flags, chapter, seed):
        second = Run(ranks, flags)
        if checks.outcome(chapter, source, source, second).right:
            return second
    return None
