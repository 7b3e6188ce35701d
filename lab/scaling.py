"""How the chapters scale on this machine, beside what chapter 10 and the lessons' formulas predict.

    python -m lab.scaling [--only dp pp overlap] [--ranks 8] [--json runs/scaling.json]

For each axis, tokens/s a rank on 1, 2, 4 and 8 ranks: in weak scaling the batch grows with them, in
strong scaling it stays. In the best case, weak scaling is a flat line. A number of ranks is first
calibrated, as lab.here does it: so a prediction knows how slow 8 ranks are that share 2 cores.

From there on cores are the limit, whatever the chapter does. So where the lesson is who waits for
whom, stages sleep in place of computing, which needs no core:

    pp              chapter 07's 1f1b. The stages sleep for as long as the model's forward and
                    backward take on one rank, over the number of ranks
    bubble          1f1b's efficiency, m / (m + p - 1). With p - 1 micro-batches half of the step is
                    bubble, on however many stages; with 32 it is little on few of them
    micro-batch     the size b that is best for a pipeline of p stages and B sequences. Larger ones
                    have better matmuls, and there are fewer to fill the pipeline with: a step takes
                    (B/b + p - 1) (t_f(b) + t_b(b)). The times of a stage are measured, awake
    overlap         lab.asleep: what chapters 02 and 03 hide, over a link of known speed

Sources: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021),
section 3; Ultra-Scale Playbook, "Pipeline Parallelism" (1f1b with m = p - 1 and with m = 32).
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import common
from common import Refused, environment
from lab import here, schedules, speed
from lab.bench import ranks
from lab.chapters import chapter
from lab.cli import commands, refusals
from lab.cli.words import count

TASK = here.Task({"layers": 8, "dim": 192, "heads": 8, "kv-heads": 8, "seq": 128, "vocab": 256},
                 batch=8, micro_batch=8, experts=8)
EACH = 2                        # sequences: a rank's in weak scaling, a micro-batch's of pp
AXES = {"dp": "02_data_parallel", "zero3": "03_zero", "tp": "04_tensor_parallel",
        "sp": "05_sequence_parallel", "cp": "06_context_parallel", "ep": "08_expert_parallel",
        "pp": None}             # asleep
PARTS = *AXES, "bubble", "micro-batch", "overlap"
SCALING = "weak", "strong"
STEPS = 3                       # asleep: the best of so many
NAP = 0.01                      # seconds of each F, B and W in `bubble`
MANY = 32                       # micro-batches that make a bubble small
STAGES, SEQUENCES = 4, 32       # in `micro-batch`, whose matmuls are thin if b is small
THIN = {"dim": 768, "seq": 16}


# ------------------------------------------------------------------------------- stages that sleep

class TimedStage(schedules.SleepingStage):
    """One whose backward, of inputs and weights together, sleeps for other seconds."""

    def __init__(self, forward, backward, out):
        super().__init__(forward, out)
        self.of_backward = backward

    def forward(self, micro_batch, *given):
        time.sleep(self.seconds)
        return self.out

    def backward(self, micro_batch, *given):
        time.sleep(self.of_backward)
        return self.out

    def weight_gradients(self, micro_batch):
        """Backward has slept for them, too."""


def sleep_through(pipelines):
    """On a rank of a pipeline, for each [micro-batches, seconds of a stage's forward, and of its
    backward]: the seconds of the best 1f1b step. Communication: the schedule's messages, of one
    number each."""
    seven, group, found = chapter("07"), dist.group.WORLD, []
    rank, p, out = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
    for m, forward, backward in pipelines:
        schedule = seven.make_schedule("1f1b", p, m)
        programs = seven.make_programs(schedule)
        schedules.check_rendezvous(programs, schedule.needs)
        step = partial(seven.execute, programs[rank], {rank: TimedStage(forward, backward, out)},
                       group, partial(torch.empty_like, out),
                       lambda *action: contextlib.nullcontext(), [(out, out)] * m, 1)
        found.append(min(speed.slowest(step, out.device) for _ in range(STEPS)))
    return found


def on_a_rank(pipelines):
    """The program of a rank: the first one prints what they have measured."""
    torch.set_num_threads(1)
    common.join_ranks(argparse.Namespace(device="cpu"), environment("RANK", 0))
    found = sleep_through(pipelines)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    return 0


def asleep(p, pipelines):
    """Seconds of the steps of these pipelines of p stages, each in a process."""
    printed = here.on_ranks(p, "-m", "lab.scaling", f"--asleep={json.dumps(pipelines)}")
    return json.loads(printed.splitlines()[-1])


def pipeline_seconds(p, m, forward, backward):
    """Of a 1f1b step, by the formula of Narayanan et al."""
    return (m + p - 1) * (forward + backward)


# ----------------------------------------------------------------------------------------- the axes

def cores_here():
    """Those that this process may use: what `nproc` prints."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def task_of(scaling, n):
    """What n ranks train."""
    return TASK._replace(batch=EACH * n) if scaling == "weak" else TASK


def measure_chapter(axis, n, task, cluster):
    """Of a step: the ranks, tokens and seconds of a run, and {cause: seconds} as predicted."""
    run = here.recorded(AXES[axis], n, "cpu", task)
    return {"ranks": run["world_size"], "tokens": run["config"]["batch"] * run["config"]["seq"],
            "seconds": here.seconds_of_a_step(run), "asleep": False,
            "predicted": here.predicted_seconds(AXES[axis], n, cluster, task)}


def measure_pipeline(n, task, times):
    """The same of chapter 07, asleep. times: seconds of forward and of backward of a micro-batch in
    the whole model."""
    m, (forward, backward) = task.batch // EACH, (seconds / n for seconds in times)
    [seconds] = asleep(n, [[m, forward, backward]])
    working = m * (forward + backward)
    bubble = pipeline_seconds(n, m, forward, backward) - working
    return {"ranks": n, "tokens": task.batch * task.model["seq"], "seconds": seconds,
            "asleep": True, "predicted": {"computing": working, "bubble": bubble}}


def measure_axes(axes, worlds):
    """Yield for each number of ranks its cluster as calibrated, None if all is asleep, and then
    {axis, scaling: ..., and its point}. A step that is the same in both scalings is measured once.
    """
    times = stage_seconds(TASK.model, 1, 0, [EACH])[EACH] if "pp" in axes else None
    for n in worlds:
        cluster, known = here.calibrated(n) if {*axes} - {"pp"} else None, {}
        yield cluster
        for axis in axes:
            for scaling in SCALING:
                task = task_of(scaling, n)
                if (axis, task.batch) not in known:
                    known[axis, task.batch] = (
                        measure_pipeline(n, task, times) if axis == "pp" else
                        measure_chapter(axis, n, task, cluster))
                yield {"axis": axis, "scaling": scaling, **known[axis, task.batch]}


def rate(point, seconds=None):
    """Tokens/s of a rank, as measured, or if a step took so many seconds."""
    return point["tokens"] / point["ranks"] / (seconds or point["seconds"])


def predicted_rate(point):
    return rate(point, sum(point["predicted"].values()))


# ------------------------------------------------------------------------ bubbles and micro-batches

def measure_bubbles(worlds):
    """Yield for p stages and m micro-batches the efficiency: work over the time of a step."""
    for p in worlds:
        counts = p - 1, MANY
        for m, seconds in zip(counts, asleep(p, [[m, NAP, 2 * NAP] for m in counts])):
            yield {"ranks": p, "micro_batches": m, "seconds": seconds,
                   "measured": m * 3 * NAP / seconds, "predicted": m / (m + p - 1)}


def stage_seconds(model, stages, stage, sizes):
    """{b: seconds of forward, and of backward} of b sequences in a stage of this model, awake. All
    sizes in turns, the best of some: others that keep a core busy only make it longer."""
    seven = chapter("07")
    cfg = common.Config(**{name.replace("-", "_"): value for name, value in model.items()})
    modules = common.gpt(cfg, seed=None)[slice(*seven.cut(cfg, stages)[stage])]
    part = seven.Stage(common.draw_weights(modules, seed=0), in_halves=False)
    found = {b: [] for b in sizes}
    for _ in range(2 + 3 * STEPS):                      # the first ones allocate
        for b in sizes:
            tokens, x = torch.zeros(b, cfg.seq, dtype=torch.int64), torch.randn(b, cfg.seq, cfg.dim)
            begin = time.perf_counter()
            out = part.forward(0, x if stage else tokens, tokens, 1)
            middle = time.perf_counter()
            part.backward(0, None if part.is_last else torch.ones_like(out))
            part.weight_gradients(0)
            found[b].append((middle - begin, time.perf_counter() - middle))
    return {b: tuple(map(min, zip(*seconds))) for b, seconds in found.items()}


def measure_sizes(p):
    """For each size b of a micro-batch its stage's times, and a step's seconds: by the formula, and
    asleep in p stages for such times."""
    sizes = [2**k for k in range(SEQUENCES.bit_length() - 1)]
    times = stage_seconds(TASK.model | THIN, p, p // 2, sizes)
    pipelines = [[SEQUENCES // b, *times[b]] for b in sizes]
    return [{"b": b, "forward": pipeline[1], "backward": pipeline[2], "seconds": seconds,
             "predicted": pipeline_seconds(p, *pipeline)}
            for b, pipeline, seconds in zip(sizes, pipelines, asleep(p, pipelines))]


def best_size(sizes, key):
    return min(sizes, key=lambda size: size[key])["b"]


def measure_overlap(n):
    """What lab.asleep prints on n ranks, and its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        _, printed, errors = ranks.run("-m", "lab.asleep", f"--json={file}", world=n, timeout=None)
        if not file.exists():
            refusals.fail(f"lab.asleep has failed: {errors.strip()[-500:]}", status=1)
        return printed, json.loads(file.read_text())


# ----------------------------------------------------------------------------------------- in words

def header(n, cores, cluster):
    """Of the table of n ranks: what they were calibrated to be, and whether cores are enough."""
    line = here.in_words(cluster) if cluster else count(n, "rank")
    return f"\n{line}" + f"\nmore than nproc = {cores}: they share cores" * (n > cores)


def row(point):
    """Measured and predicted tokens/s a rank."""
    measured, predicted = rate(point), predicted_rate(point)
    causes = here.planner().largest(point["predicted"], 3) + "   (asleep)" * point["asleep"]
    return (f"  {point['axis']:<6}{point['scaling']:<7}{measured:>7,.0f} / {predicted:>6,.0f}"
            f"{measured / predicted - 1:>+6.0%}   {causes}")


def lines_of_bubbles(bubbles):
    """Yield the table of 1f1b's efficiency."""
    yield "\n1f1b, asleep. Efficiency: work over the time of a step / m / (m + p - 1)"
    for bubble in bubbles:
        p, m = bubble["ranks"], bubble["micro_batches"]
        yield (f"  p = {p}, m = {m:<4} bubble over work {(p - 1) / m:>7.1%}   efficiency "
               f"{bubble['measured']:>6.1%} / {bubble['predicted']:>6.1%}")


def lines_of_sizes(sizes, p):
    """Yield the table of micro-batch sizes, and which is best."""
    yield (f"\nsize b of a micro-batch: {p} stages, {SEQUENCES} sequences of {THIN['seq']} tokens, "
           f"dim {THIN['dim']}")
    yield "  the times of a stage are measured awake, and slept in the step: measured / predicted"
    best = {name: best_size(sizes, key) for name, key in (
        ("measured", "seconds"), ("predicted", "predicted"))}
    for size in sizes:
        t_f, t_b, seconds, predicted = (1e3 * size[key] for key in (
            "forward", "backward", "seconds", "predicted"))
        marks = " and ".join(name for name, b in best.items() if b == size["b"])
        yield (f"  b = {size['b']:<3} t_f {t_f:>6.1f} ms   t_b {t_b:>6.1f} ms   a step "
               f"{seconds:>6.0f} / {predicted:>5.0f} ms" + f"   best as {marks}" * bool(marks))
    [chosen] = [size["seconds"] for size in sizes if size["b"] == best["predicted"]]
    lost = chosen / min(size["seconds"] for size in sizes) - 1
    yield ("  the best size is the one that is predicted" if lost == 0 else
           f"  the size that is predicted as the best takes {lost:.1%} more than the best one")


# -------------------------------------------------------------------------------- the command line

def pipelines(text):
    """An argparse type: of [[micro-batches, seconds, seconds], ...] in JSON."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        found = [[m, float(forward), float(backward)] for m, forward, backward in json.loads(text)]
        if found and all(isinstance(m, int) and 0 < m <= 4096 and min(seconds) >= 0
                         and max(seconds) < 60 for m, *seconds in found):
            return found
    raise Refused(f"{text} is no JSON of [[micro-batches, seconds, seconds], ...]",
                  "[[4, 0.01, 0.02]]")


def parse(argv):
    parser = commands.Parser("-m lab.scaling", description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all of them")
    add("--ranks", type=int, choices=(2, 4, 8), default=8, help="the most; default: 8")
    add("--json", type=commands.output("runs/scaling.json"), default=Path("runs/scaling.json"),
        help="default: runs/scaling.json")
    add("--asleep", type=pipelines, help="what a rank that this starts is to sleep through")
    return parser.parse_args(argv)


def measure(only, worlds, cores):
    """Print each part as it is measured. Returns what is recorded of all, and the checks."""
    recorded, checks = {"nproc": cores}, []
    axes = [axis for axis in AXES if axis in only]
    if axes:
        print("\ntokens/s a rank: measured / predicted, how far off that is, what it is made of.\n"
              "pp is asleep: it needs no cores, as if each rank had one of its own")
        recorded["axes"], left = [], iter(worlds)
        for found in measure_axes(axes, worlds):
            if isinstance(found, dict):
                recorded["axes"].append(found)
                print(row(found), flush=True)
            else:
                print(header(next(left), cores, found), flush=True)
    if "bubble" in only:
        recorded["bubbles"] = [*measure_bubbles(worlds[1:])]
        print(*lines_of_bubbles(recorded["bubbles"]), sep="\n", flush=True)
    if "micro-batch" in only:
        p = min(STAGES, worlds[-1])
        recorded["sizes"] = {"stages": p, "sequences": SEQUENCES, "points": measure_sizes(p)}
        print(*lines_of_sizes(recorded["sizes"]["points"], p), sep="\n", flush=True)
    if "overlap" in only:
        printed, run = measure_overlap(min(STAGES, worlds[-1]))
        recorded["overlap"], checks = run["recorded"], run["checks"]
        print(f"\n{printed}", end="", flush=True)
    return recorded, checks


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    if args.asleep:
        return on_a_rank(args.asleep)
    torch.set_num_threads(1)
    worlds, cores = [n for n in (1, 2, 4, 8) if n <= args.ranks], cores_here()
    shape = ", ".join(f"{name} {value}" for name, value in TASK.model.items())
    print(f"{shape}, float32, AdamW\nbatch: {EACH} a rank (weak scaling) or {TASK.batch} (strong)")
    recorded, checks = measure(args.only, worlds, cores)
    record = {"chapter": "scaling", "variant": "scaling", "world_size": worlds[-1],
              "backend": "gloo", "config": {"only": " ".join(args.only)} | TASK.model,
              "checks": checks, "problems": [], "recorded": recorded}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(check["ok"] for check in checks))


if __name__ == "__main__":
    commands.program(main)
