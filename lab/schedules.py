"""Chapter 07's schedules, drawn and simulated without a model.

    python -m lab.schedules 1f1b --ranks 4 --micro-batches 8
    python -m lab.schedules interleaved --ranks 8 --micro-batches 16 --chunks 2

It draws the schedule as text, and counts from its lists what the closed forms predict.
"""

import math
import sys
from collections.abc import Callable
from functools import partial

from common import Refused
from lab import chapters
from lab.run import commands, refusals

MOST = 2**15            # ranks x (ranks + micro-batches) that are drawn: some 200,000 letters


# ----------------------------------------------------------------------------- in simulated time

def simulate(schedule, F=1, B=1, W=1, as_one=False):
    """{action: (start, end)}, if each starts once its rank is free and what it needs is there.

    F, B, W: how long each takes; BW takes B + W. as_one: an F and the BW of another stage right
    after it start and end together (F&B). Raises ValueError if ranks wait for each other.
    """
    seconds = {"F": F, "B": B, "W": W, "BW": B + W}
    left, free = [list(actions) for actions in schedule.actions], [0] * len(schedule.actions)
    span, done = {}, {}                                 # done: when each output is there
    while any(left):
        before = len(span)
        for rank, actions in enumerate(left):
            while actions:
                unit = actions[:2] if as_one and are_one(*actions[:2]) else actions[:1]
                needs = [need for action in unit for need in schedule.needs(action)]
                if any(need not in done for need in needs):
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                free[rank] = start + sum(seconds[action.kind] for action in unit)
                for action in unit:
                    done[action.output], span[action] = free[rank], (start, free[rank])
                del actions[:len(unit)]
        if len(span) == before:
            waiting = [f"rank {rank} before {actions[0]}" for rank, actions in enumerate(left)
                       if actions]
            raise ValueError(f"ranks wait for each other: {', '.join(waiting)}")
    return span


def are_one(first, second=None):
    """Whether these two actions are an F&B."""
    return second and (first.kind, second.kind) == ("F", "BW") and first.stage != second.stage


def simulated_bubble(schedule, variant, F=1, B=1, W=1):
    """What the chapter's `bubble` has a closed form for, from the lists."""
    span = simulate(schedule, F, B, W, as_one=variant.startswith("dualpipe"))
    start, end, ratios = 0, max(end for _, end in span.values()), []
    for actions in schedule.actions:
        if variant == "zb-h2":
            start, end = span[actions[0]][0], span[actions[-1]][1]
        work = (F + B + W) * sum(action.kind == "F" for action in actions)
        ratios.append((end - start) / work - 1)
    return max(ratios)


def timetable(schedule, F=1, B=1, W=1):
    """For each rank [kind, stage, micro-batch, start, end] of its actions, as pictures want it."""
    span = simulate(schedule, F, B, W)
    return [[[*action, *span[action]] for action in actions] for actions in schedule.actions]


def hold_bubble(run, answer):
    """Hold the bubble of a run's schedule to the closed form that its chapter gave."""
    schedule, formula, times = answer["of all ranks"], answer["bubble"], answer["times"]
    run.check(("time", f"bubble over work if {in_words(**times)}", "simulated"),
              round(simulated_bubble(schedule, run.args.variant, **times), 6),
              None if formula is None else round(formula, 6), "")
    run.record(simulated=timetable(schedule, **times))


def in_words(F, B, W):
    """How long they take: with --recompute full, a B is twice as long."""
    return "F = B = W" if F == B == W else f"F = W = B/{B}"


def hold_messages(run, answer):
    """Hold what a rank has of messages to its program, and with all programs their order to a
    network that stores none: of that the report tells if it is wrong. Where steps overlap, of
    messages only the order is known."""
    programs = answer.get("programs", {run.rank: answer.get("program")})
    try:
        if "programs" in answer:
            check_rendezvous(programs, answer["needs"])
    except ValueError as error:
        run.note(str(error))
        run.judge(("sent", "ranks that can wait for ever", "on a strict network"), run.world, 0)
    if run.answer.get("versions", 1) == 1:
        most = max(messages_over_time(programs[run.rank], answer["needs"]))
        run.check(("kept", "messages kept", "at the most"), run.messages, most * answer["message"])


def check_rendezvous(programs: list[list], needs: Callable) -> None:
    """Raise ValueError if a rank would wait for ever on the strictest network there is, where a
    message passes once it is computed and both of its ranks have come to it. programs: of each
    rank, its actions and messages. needs(action): the outputs that it takes."""
    left, here = [list(program) for program in programs], [set() for _ in programs]
    while any(left):
        passing = []                                    # ranks that get beyond their next step
        for rank, program in enumerate(left):
            step = program[0] if program else None
            is_action = hasattr(step, "kind")
            if is_action and here[rank].issuperset(needs(step)):
                passing.append(rank)
            if step and not is_action and step.output in here[step.sender]:
                other = step.receiver if rank == step.sender else step.sender
                passing += [rank] if left[other][:1] == [step] else []
        if not passing:
            raise ValueError(f"ranks wait for ever before {[program[:1] for program in left]}")
        for rank in passing:
            here[rank].add(left[rank].pop(0).output)


def messages_over_time(program, needs):
    """How many messages a rank has in each of its actions: what has come, from a stage of its own,
    too, and is not used yet; and what it has sent, until one that was posted later has come."""
    used = {step: {need for need in needs(step) if need[1] != step.stage}
            for step in program if hasattr(step, "kind")}
    own, wanted = {action.output for action in used}, set().union(*used.values())
    here, under_way, over_time = set(), [], []
    for step in program:
        if step not in used:
            under_way.append(step.output)
        elif used[step]:
            *_, last = [0, *(1 + i for i, name in enumerate(under_way) if name in used[step])]
            here -= own.intersection(under_way[:last]) | used[step]
            del under_way[:last]
        if step in used:
            over_time.append(len(here))
        if step not in used or step.output in wanted:
            here.add(step.output)
    return over_time


def drawing(schedule):
    """For a terminal: two lines a rank, with the kinds (in lower case, if not of its first stage)
    and the last digit of the micro-batch. F, B and W take a letter each."""
    lines = []
    for rank, actions in enumerate(timetable(schedule)):
        kinds = digits = ""
        for kind, stage, i, start, _ in actions:
            letters = kind if stage == rank else kind.lower()
            kinds = kinds.ljust(start, ".") + letters
            digits = digits.ljust(start, ".") + str(i % 10) * len(kind)
        lines += [f"rank {rank:<3}{kinds}", f"{'':8}{digits}"]
    return "\n".join(lines)


# -------------------------------------------------------------------------------- the command line

def parse(chapter, argv):
    """The command line; raises Refused."""
    parser = commands.Parser("-m lab.schedules", description=__doc__)
    add, count = parser.add_argument, commands.number(int, 1, 4097, 2)
    add("schedule", choices=[name for name in chapter.VARIANTS if name != "torch"])
    add("--ranks", type=commands.number(int, 1, math.isqrt(MOST), 4), default=4, help="default: 4")
    add("--micro-batches", type=count, default=8, help="default: 8")
    add("--chunks", type=count, help="slices of the model on each rank; default: 2")
    add("--breadth-first", action="store_true", help="a slice takes all micro-batches in turn")
    args = parser.parse_args(argv)
    refuse_misfits(chapter, args)
    return args


def refuse_misfits(chapter, args):
    """Refuse what does not fit together; fill in args.chunks."""
    name, p, m = args.schedule, args.ranks, args.micro_batches
    if name != "interleaved" and (args.chunks or args.breadth_first):
        flag = "--chunks" if args.chunks else "--breadth-first"
        raise Refused(f"{flag} means nothing to {name}", f"without {flag}")
    args.chunks = (args.chunks or 2) if name == "interleaved" else 1
    in_turn = p if name == "naive" else 1
    if p * (p + m * args.chunks * in_turn) > MOST:
        raise Refused(f"--micro-batches {m} on {p} ranks is too much to draw",
                      "--micro-batches 8", "--ranks 4 --micro-batches 8")
    if name == "dualpipe" and p % 2:
        raise Refused(f"dualpipe pairs ranks, and {p} is an odd number", f"--ranks {p + 1}")
    fits = chapter.fitting(name, p, m, args.breadth_first)
    if fits != m:
        raise Refused(f"{name} on {p} ranks does not take {m} micro-batches",
                      f"--micro-batches {fits}")


def print_costs(chapter, args, schedule):
    """What the schedule costs, from its lists and by the chapter's closed forms."""
    name, p, m = args.schedule, args.ranks, args.micro_batches
    v = len(schedule.ranks) // p
    alive = [max(chapter.alive_over_time(actions)) for actions in schedule.actions]
    most = [chapter.most_alive(name, rank, p, m, v, args.breadth_first) for rank in range(p)]
    simulated, bubble = simulated_bubble(schedule, name), chapter.bubble(name, p, m, v)
    formula = "-" if bubble is None else f"{bubble:.6g}"
    print(f"\n{'':<34}from the lists / by the closed form")
    print(f"{'micro-batches alive, at the most':<34}{' '.join(map(str, alive))} / "
          f"{' '.join(map(str, most))}")
    print(f"{'bubble over work if F = B = W':<34}{simulated:.6g} / {formula}")


def main(argv=None):
    chapter = chapters.chapter("07")
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(partial(parse, chapter), argv, alone=True)
    schedule = chapter.make_schedule(args.schedule, args.ranks, args.micro_batches, args.chunks,
                                     args.breadth_first)
    print(drawing(schedule))
    print_costs(chapter, args, schedule)
    return 0


if __name__ == "__main__":
    commands.program(main)
