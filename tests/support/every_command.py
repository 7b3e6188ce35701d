"""Every command of the project, for the trials of tests/support/trials.py.

The entry of a chapter follows from its name. `python -m lab.NAME` and files of benchmarks/ have
theirs in commands.toml.
"""

import functools
import gc
import tomllib
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

    return hunt.text_of("06", 1).encode()


def an_exercise():
    """As lab.exercises writes it."""
    from lab.classroom import exercises

    return exercises.with_holes("04_tensor_parallel").encode()


# -------------------------------------------------------------------------------------- the table


MADE = {"text": FILES["text"], "a run": a_run, "a hunt": a_hunt, "an exercise": an_exercise}
ON_A_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip


def command_of(program, files=None, on_a_rank=False, **more):
    """The Command of an entry of commands.toml."""
    words = program.split() if program.startswith("-m ") else [f"{ROOT}/{program}"]
    files = {name: MADE[content] for name, content in (files or {}).items()}
    return Command(words, files=files, environment=ON_A_RANK if on_a_rank else {}, **more)


TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
OTHERS = [command_of(**entry) for entry in TABLE["commands"]]
