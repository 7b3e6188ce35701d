"""Chapter 07's schedules, drawn, simulated and slept through, without a model.

    python -m lab.schedules 1f1b --ranks 4 --micro-batches 8
    python -m lab.schedules auto --ranks 4 --micro-batches 8 --memory 6 --times 10,12,8
    torchrun --nproc_per_node=4 -m lab.schedules zb-h1 --sleep 10

The first command draws the schedule as text, and counts from its lists what the closed forms say.
The second one searches for the best order of F, B and W, if they take so long and a stage has
memory for so many micro-batches (chapters/07/automatic.py). The third one executes a schedule with
stages that sleep in each F, B and W. That needs no cores, so a step takes as long as simulated, and
messages.
"""

import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import common
from common import Refused, environment
from lab import chapters
from lab.run import commands, refusals
from lab.run.about import as_check

CHAPTER = "07_pipeline_parallel"
SEARCHED = 256          # ranks x micro-batches that are searched, in some seconds
MOST = 2**15            # ranks x (ranks + micro-batches) that are drawn: some 200,000 letters
STEPS, WITHIN = 5, 0.3  # the best of so many steps may take longer than simulated by such a share


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


def drawing(schedule, recomputes=False, **times):
    """For a terminal: two lines a rank, with the kinds (in lower case, if not of its first stage)
    and the last digit of the micro-batch, as often as the units that they take."""
    lines = []
    for rank, actions in enumerate(timetable(schedule, **times)):
        kinds = digits = ""
        for kind, stage, i, start, end in actions:
            if recomputes:                              # in B, the forward that is computed again
                letters = (end - start - len(kind)) * "r" + kind
            else:
                letters = "".join(times.get(letter, 1) * letter for letter in kind)
            kind = letters if stage == rank else letters.replace(kind, kind.lower())
            kinds = kinds.ljust(start, ".") + kind
            digits = digits.ljust(start, ".") + str(i % 10) * len(kind)
        lines += [f"rank {rank:<3}{kinds}", f"{'':8}{digits}"]
    return "\n".join(lines)


def costs(chapter, args, schedule):
    """(What it is, counted or simulated from the lists, by the chapter's closed form) of what a
    schedule costs."""
    p, m, v = args.ranks, args.micro_batches, len(schedule.ranks) // args.ranks
    alive = [max(chapter.alive_over_time(actions)) for actions in schedule.actions]
    most = [chapter.most_alive(args.schedule, rank, p, m, v, args.breadth_first)
            for rank in range(p)]
    times = chapter.times(args.recompute)
    simulated = simulated_bubble(schedule, args.schedule, **times)
    formula = chapter.bubble(args.schedule, p, m, v, **times)
    return [("micro-batches alive, at the most", " ".join(map(str, alive)),
             " ".join(map(str, most))),
            (f"bubble over work if {in_words(**times)}", f"{simulated:.6g}",
             "-" if formula is None else f"{formula:.6g}")]


def automatic_schedule(chapter, args):
    """The Schedule of the least idle time among those that a rule builds."""
    p, m, schedules = args.ranks, args.micro_batches, []
    for orders in chapters.room("07", "automatic").build_all(p, m, min(args.memory, m), args.times):
        actions = [[chapter.Action(kind, rank, order[:place].count(kind))
                    for place, kind in enumerate(order)] for rank, order in enumerate(orders)]
        schedules.append(chapter.Schedule(actions, list(range(p)), p))
    return min(schedules, key=lambda schedule: bubbles(schedule, **args.times))


def bubbles(schedule, **times):
    """The longest idle time of a rank over its work: between its own first and last action, and
    until the last rank ends. The first counts if no rank waits for the others when it updates."""
    span = simulate(schedule, **times)
    own = max(span[actions[-1]][1] - span[actions[0]][0] for actions in schedule.actions)
    work = sum(end - start for action, (start, end) in span.items() if action.stage == 0)
    return own / work - 1, max(end for _, end in span.values()) / work - 1


def compare_with_fixed(chapter, args, schedule):
    """Rows of what a search has found, and of the schedules that know no times: a name, micro-
    batches alive at the most, and both bubbles."""
    made = {"auto": schedule}
    for name in ("1f1b", "zb-h1", "zb-h2"):
        made[name] = chapter.make_schedule(name, args.ranks, args.micro_batches)
    for name, one in made.items():
        alive = max(max(chapter.alive_over_time(actions)) for actions in one.actions)
        yield name, alive, *bubbles(one, **args.times)


# ----------------------------------------------------------------------------------- in real time

class SleepingStage:
    """In place of chapter 07's Stage: sleeps instead of computing, and gives `out` every time."""

    is_last = False

    def __init__(self, seconds, out):
        self.seconds, self.out = seconds, out
        self.kept_for_backward, self.kept_for_weights = {}, {}

    def weight_gradients(self, micro_batch):
        if self.out.is_cuda:                            # where the host does not wait for what the
            torch.cuda.current_stream().synchronize()   # action takes, its stream does
        time.sleep(self.seconds)

    def forward(self, micro_batch, *given):
        self.weight_gradients(micro_batch)
        return self.out

    backward = forward


def sleep_through(chapter, args, schedule):
    """Execute the schedule on as many ranks, with stages that sleep for args.sleep milliseconds in
    each F, B and W. Where others keep the machine busy, the best of five steps counts.

    Returns the milliseconds of the longest rank, and for each rank [kind, stage, micro-batch,
    start, end in seconds] of its actions.
    """
    rank, world = environment("RANK", 0), environment("WORLD_SIZE", 1)
    device = common.join_ranks(args, rank)
    out = torch.zeros(1, 128, 128, device=device)       # what goes from stage to stage
    programs = chapter.make_programs(schedule)
    check_rendezvous(programs, schedule.needs)
    stages = {stage: SleepingStage(args.sleep / 1e3, out)
              for stage, owner in enumerate(schedule.ranks) if owner == rank}
    best, best_actions, everyones = math.inf, [], [None] * world
    for _ in range(STEPS):
        actions = []
        dist.barrier()
        start = now(device)
        chapter.execute(programs[rank], stages, dist.group.WORLD,
                        functools.partial(torch.empty_like, out),
                        functools.partial(watch, actions, start, device),
                        [(out, out)] * args.micro_batches, 1)
        taken = torch.tensor(1e3 * (now(device) - start), device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if taken.item() < best:
            best, best_actions = taken.item(), actions
        if best <= (1 + WITHIN) * milliseconds(args, schedule):
            break
    dist.all_gather_object(everyones, best_actions)
    dist.destroy_process_group()
    return round(best), everyones


def now(device):
    """Seconds, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def watch(seen, since, device, action, *kept):
    """Around an action: note it, with its start and end in seconds."""
    start = now(device) - since
    yield
    seen.append([*action, start, now(device) - since])


def milliseconds(args, schedule):
    """Of a step of sleeping stages, simulated."""
    span = simulate(schedule, args.sleep, args.sleep, args.sleep)
    return max(end for _, end in span.values())


# -------------------------------------------------------------------------------- the command line

def three_times(text):
    """An argparse type: "10,12,8" to how long F, B and W take. Raises Refused."""
    with contextlib.suppress(ValueError):
        times = dict(zip("FBW", map(int, text.split(",")), strict=True))
        if all(1 <= time < 100 for time in times.values()):
            return times
    raise Refused(f"{text or repr(text)} is not F,B,W, whole numbers in [1, 100)", "10,12,8")


def parse(chapter, argv):
    """The command line; raises Refused."""
    parser = commands.Parser("-m lab.schedules", description=__doc__)
    add, count = parser.add_argument, commands.number(int, 1, 4097, 2)
    known = [name for name in chapter.VARIANTS if name != "torch"]
    add("schedule", choices=[*known, "auto"], help="auto: the best order that a search finds")
    add("--ranks", type=commands.number(int, 1, math.isqrt(MOST), 4),
        help="default: torchrun's, or 4")
    add("--micro-batches", type=count, default=8, help="default: 8")
    add("--chunks", type=count, help="slices of the model on each rank; default: 2")
    add("--breadth-first", action="store_true", help="a slice takes all micro-batches in turn")
    add("--memory", type=count, help="auto: micro-batches that may be alive; default: the ranks")
    add("--times", type=three_times, metavar="F,B,W", help="auto: how long they take")
    add("--recompute", choices=("none", "full"), default="none", help="full: B computes F again")
    add("--sleep", type=commands.number(int, 1, 10_000, 10), metavar="MS",
        help="under torchrun: execute it with stages that sleep in each F, B and W")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--json", type=commands.output("run.json"), help="with --sleep: write when each action ran")
    args = parser.parse_args(argv)
    refuse_misfits(chapter, args)
    return args


def refuse_misfits(chapter, args):
    """Refuse what does not fit together; fill in args.ranks and args.chunks."""
    name, world = args.schedule, environment("WORLD_SIZE", 0)
    if name != "interleaved" and (args.chunks or args.breadth_first):
        flag = "--chunks" if args.chunks else "--breadth-first"
        raise Refused(f"{flag} means nothing to {name}", f"without {flag}")
    args.chunks = (args.chunks or 2) if name == "interleaved" else 1
    p = args.ranks = args.ranks or world or 4
    if (args.sleep or world) and p != (world or 1):
        raise Refused(f"--ranks {p} is not what torchrun has started",
                      f"--nproc_per_node {p}")
    if name == "auto":
        refuse_search(args)
    for flag in ("memory", "times"):
        if getattr(args, flag) and name != "auto":
            raise Refused(f"--{flag} means nothing to {name}", f"without --{flag}")
    if args.sleep and args.recompute == "full":
        raise Refused("--recompute full is drawn, and stages sleep as long in each F, B and W",
                      "without --recompute")
    if args.json and not args.sleep:
        raise Refused(f"--json {args.json} means nothing without --sleep", "--sleep 10")
    m, in_turn = args.micro_batches, p if name == "naive" else 1
    if p * (p + m * args.chunks * in_turn) > MOST:
        raise Refused(f"--micro-batches {m} on {p} ranks is too much to draw",
                      "--micro-batches 8", "--ranks 4 --micro-batches 8")
    if name == "dualpipe" and p % 2:
        raise Refused(f"dualpipe pairs ranks, and {p} is an odd number", f"--ranks {p + 1}")
    fits = chapter.fitting(name, p, m, args.breadth_first)
    if fits != m:
        raise Refused(f"{name} on {p} ranks does not take {m} micro-batches",
                      f"--micro-batches {fits}")


def refuse_search(args):
    """Refuse what a search does not take; fill in args.memory and args.times."""
    p, m = args.ranks, args.micro_batches
    if p * m > SEARCHED:
        raise Refused(f"--micro-batches {m} on {p} ranks is too much to search",
                      "--micro-batches 8", "--ranks 4 --micro-batches 8")
    if args.recompute == "full":
        raise Refused("--recompute full means nothing to auto: --times says how long B takes",
                      "without --recompute")
    if args.sleep and args.times and len(set(args.times.values())) > 1:
        raise Refused("stages sleep as long in each F, B and W", "without --times")
    args.memory, args.times = args.memory or p, args.times or dict(F=1, B=1, W=1)


def main(argv=None):
    chapter = chapters.chapter("07")
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(functools.partial(parse, chapter), argv)
    if args.schedule == "auto":
        schedule = automatic_schedule(chapter, args)
    else:
        schedule = chapter.make_schedule(args.schedule, args.ranks, args.micro_batches, args.chunks,
                                         args.breadth_first)
    if args.sleep:
        measured, asleep = sleep_through(chapter, args, schedule)
        return report_sleep(args, schedule, measured, asleep) if environment("RANK", 0) == 0 else 0
    if environment("RANK", 0) == 0:
        print_costs(chapter, args, schedule)
    return 0


def print_costs(chapter, args, schedule):
    """The drawing, and below it what the schedule costs."""
    if args.schedule == "auto":
        settings = chapters.room("07", "automatic").SETTINGS
        print(drawing(schedule, **args.times))
        print(f"\nauto: the best of {len(settings)} that a rule builds")
        print("bubble over work   alive   of a rank   of the step")
        for name, alive, own, step in compare_with_fixed(chapter, args, schedule):
            print(f"    {name:<14}{alive:>6}{own:>12.4f}{step:>14.4f}")
    else:
        print(drawing(schedule, args.recompute == "full", **chapter.times(args.recompute)))
        print(f"\n{'':<34}from the lists / by the closed form")
        for what, computed, formula in costs(chapter, args, schedule):
            print(f"{what:<34}{computed} / {formula}")


def report_sleep(args, schedule, measured, asleep):
    """Print what was measured beside what was simulated, and write it. Returns the exit status."""
    expected = milliseconds(args, schedule)
    ok = measured <= (1 + WITHIN) * expected
    check = as_check(("time", "a step of sleeping stages", "simulated"), measured, expected, ok)
    print(f"{args.schedule} on {args.ranks} ranks, {args.micro_batches} micro-batches, stages that "
          f"sleep for {args.sleep} ms in each F, B and W:\n"
          f"a step takes {measured} ms, simulated {expected} ms   {'✓' if ok else '✗'}")
    if args.json:
        config = {key: value for key, value in vars(args).items() if key != "json"}
        record = {"chapter": CHAPTER, "variant": args.schedule, "world_size": args.ranks,
                  "device": "cuda" if common.on_cuda(args) else "cpu", "config": config,
                  "checks": [check], "problems": [],
                  "recorded": {"simulated": timetable(schedule), "asleep": asleep}}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    commands.program(main)
