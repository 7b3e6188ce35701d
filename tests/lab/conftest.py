"""Runs whose JSON is drawn, each of which is run once."""

import copy

import pytest

from tests.conftest import TEXT, chapter, run_main

SMALL = ("--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--batch=4")
RUNS = {  # of each figure: chapter, ranks, and the variants that it compares
    "01_single_gpu": [("01_single_gpu", 1, "hand")],
    "02_data_parallel": [("02_data_parallel", 2, v) for v in ("naive", "overlap", "bucket")],
    "03_zero": [("03_zero", 2, v) for v in ("zero1", "zero2", "zero3")],
    "04_tensor_parallel": [("04_tensor_parallel", 4, "megatron")],
    "05_sequence_parallel": [("04_tensor_parallel", 4, "megatron"),
                             ("05_sequence_parallel", 4, "kept"),
                             ("05_sequence_parallel", 4, "megatron")],
    "06_context_parallel": [("06_context_parallel", 4, v) for v in ("ring", "zigzag")],
    "07_pipeline_parallel": [("07_pipeline_parallel", 2, "1f1b")],
    "08_expert_parallel": [("08_expert_parallel", 2, "dropless")],
    "09_5d": [("09_5d", 4, "hand", "--pp=2", "--tp=2", "--node-size=2"),
              ("09_5d", 4, "hand", "--dp=2", "--tp=2", "--ep=2", "--experts=4", "--zero=1")],
}  # fmt: skip


@pytest.fixture(scope="session")
def recorded(pool, tmp_path_factory):
    """recorded(figure): the JSON of its runs; each is run once."""
    known = {}

    def runs(figure):
        for name, world, variant, *more in RUNS[figure]:
            chapter(name)  # or skip
            if (name, variant, *more) not in known:
                flags = (*SMALL, "--steps=3", f"--data={TEXT}", f"--variant={variant}", *more)
                folder = tmp_path_factory.mktemp("run")
                (_, run, output), *_ = pool.call(world, 60, run_main, name, flags, folder)
                assert run, output
                known[name, variant, *more] = run
        return [known[name, *variant] for name, _, *variant in RUNS[figure]]

    return runs


def put(run, path, value):
    """A copy of the run, with that value in the place of another; ...: in no place."""
    run = part = copy.deepcopy(run)
    for key in path[:-1]:
        part = part[key]
    if value is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return run
