"""Every command of the project, for the trials of tests/support/trials.py.

The entry of a chapter follows from its name. `python -m lab.NAME` and files of benchmarks/ have
their lines in the table: legal arguments, what is called once nothing is refused, and what is read
and written.
"""

import functools
import gc
from functools import partial
from pathlib import Path

import torch.distributed as dist

from lab import chapters
from tests import conftest
from tests.conftest import CHAPTERS, ROOT, SMALL, TEXT, chapter_names, training_chapters
from tests.support import trials
from tests.support.trials import Command

SHORT = " ".join([*SMALL, "--steps=1", "--data=text", "--no-verify"])
FILES = {"text": Path(TEXT).read_bytes}

# ------------------------------------------------------------------------------------ the chapters


def run_chapter(name):
    """As a program."""
    try:
        return conftest.main(conftest.chapter(name), None)
    finally:
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()


def of_chapter(name):
    trains = name in training_chapters()
    reads, writes = {}, {"--json": "run.json", "--plot": "figure.png"}
    if trains:
        reads = {"--data": "text", "--resume": "ours"}
        writes |= {"--profile": "trace.json", "--save": "checkpoints"}
    return Command([f"{CHAPTERS / name}.py"], SHORT if trains else "--numbers=3",
                   "lab.launch.with_instruments" if trains else "lab.chapters.held",
                   partial(run_chapter, name), files=FILES, reads=reads, writes=writes)


def run_planner():
    from lab.planner import planning

    return planning.program(conftest.chapter("10_planner"))


PLANNER = Command([f"{CHAPTERS / '10_planner'}.py"], "--gpus=8",
                  "lab.planner.planning.print_plans", run_planner, writes={"--json": "plan.json"})
ON_RANKS = [of_chapter(name) for name in chapter_names()]

# --------------------------------------------------------------------------------- what others read


@functools.cache
def a_run():
    """The JSON of one."""
    two = Command(["02"], main=lambda: conftest.main(chapters.chapter("02"), None), files=FILES)
    with trials.working_folder(two):
        assert trials.call(two, [*SHORT.split(), "--json=run.json"], {}, None, None) == 0
        dist.destroy_process_group()
        return Path("run.json").read_bytes()


def a_hunt():
    """As lab.hunt writes it."""
    from lab import hunt

    return hunt.text_of(hunt.draw("06", 1), "06", 1).encode()


def an_exercise():
    """As lab.exercises writes it."""
    from lab.classroom import exercises

    return exercises.with_holes("04_tensor_parallel").encode()


# -------------------------------------------------------------------------------------- the table


def lab(name, legal="", stops_at="", **more):
    return Command(["-m", f"lab.{name}"], legal, stops_at, **more)


def benchmark(name, legal, stops_at, **more):
    path = f"{ROOT}/benchmarks/{name}.py"
    stops_at = " ".join(f"benchmarks.{function}" for function in stops_at.split())
    return Command([path], legal, stops_at, **more)


ON_A_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
EXERCISE = {"04_tensor_parallel.py": an_exercise}
LONG = {"starts": False}
OTHERS = [
    lab("bundle", "--out=bundle", "lab.classroom.bundle.write", writes={"--out": "bundle"}, **LONG),
    lab("exercises", "04"),
    lab("exercises", "--write=exercises", "lab.classroom.exercises.write",
        writes={"--write": "exercises"}),
    lab("faults", "--kills=1", "lab.faults.with_and_without", writes={"--json": "run.json"},
        starts_others=True),
    lab("formats", "--steps=1", "lab.formats.train", writes={"--out": "formats.png"}),
    lab("grade", ". --limit=1", "lab.grade.grade_all", files=EXERCISE,
        reads={"folder": "ours"},
        writes={"--csv": "grades.csv", "--json": "results.json"}),
    lab("hunt", "06 --seed=1", "lab.hunt.write", writes={"--out": "hunts"}, **LONG),
    lab("hunt", "--reveal=hunt.py", "lab.hunt.reveal", files={"hunt.py": a_hunt},
        reads={"--reveal": "ours"}, **LONG),
    lab("hunt", "--grade=hunt.py", "lab.hunt.print_grade",
        files={"hunt.py": a_hunt}, reads={"--grade": "ours"}, **LONG),
    lab("museum", "06", "lab.museum.__main__.play_all",
        writes={"--out": "museum.png"}),
    lab("notebook", "--repository=https://example.org/course", "lab.notebook.text_of",
        writes={"--out": "fivefold.ipynb"}, **LONG),
    lab("site", "--port=0", "lab.site.__main__.listen lab.site.build.write"),
    lab("site", "--out=site", "lab.site.build.write", writes={"--out": "site"}, **LONG),
    lab("pictures", "run.json", "lab.pictures.draw", files={"run.json": a_run},
        reads={"runs": "ours"}, writes={"--out": "figures"}),
    lab("predict", "02 --seed=1", "lab.predict.ask"),
    lab("rehearse", f"02_data_parallel.py --ranks=2 {' '.join(SMALL)} --data=text",
        "lab.rehearsal.rehearsal.rehearse", files=FILES, writes={"--json": "run.json"}),
    lab("report", "run.json", files={"run.json": a_run}, reads={"runs": "ours"}),
    lab("scaling", "", "lab.scaling.measure_all", writes={"--json": "scaling.json"}),
    lab("scaling", "rates", "common.join_ranks", environment=ON_A_RANK,
        writes={"--json": "scaling.json"}, **LONG),
    lab("schedules", "1f1b --ranks=2", "lab.schedules.simulate"),
    lab("schedules", "1f1b --ranks=1 --sleep=10", "lab.schedules.sleep_through",
        writes={"--json": "run.json"}),
    lab("sharding", "'A[I_X, J] B[J, K]' X=2", "lab.sharding.report"),
    lab("texts", "002", "lab.texts.__main__.print_texts lab.texts.__main__.draw",
        writes={"--draw": "drawn"}),
    lab("tour", "02 --first", "lab.tour.tour", **LONG),
    benchmark("draw_batch", "--largest=64", "draw_batch.train", writes={"--out": "batch.png"},
              **LONG),
    benchmark("gpu", "--device=cpu", "gpu.machine_of", **LONG),
    benchmark("time_chapters", "--only=01", "time_chapters.measure", starts_others=True),
    benchmark("time_kernels", "--only=fp8", "time_kernels.tables",
              pretends={"benchmarks.time_kernels.DEVICE": "cpu"}, **LONG),
    benchmark("time_muon", "--steps=4", "time_muon.measure"),
]
