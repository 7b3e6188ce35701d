"""Today's whole step, in each chapter: Llama 3's 8B, 64 times narrower (four queries to a key, an
MLP of 3.5 times the width), in bf16 with masters, recomputed in full, of several micro-batches with
ignored targets, clipped."""

import pytest

from tests.conftest import SMALL, TEXT, chapter, run_main, sample

TODAY = ("--block=llama", "--precision=bf16", "--recompute=full", "--ignore=0.3", "--clip=0.1",
         "--dim=64", "--heads=8", "--kv-heads=2", "--ffn=224", "--steps=2")  # fmt: skip
RUNS = [  # chapter, number of ranks, and what it needs besides
    ("03_zero", 4, ("--variant=zero2",)), ("03_zero", 8, ("--variant=zero3",)),
    ("02_data_parallel", 4, ()), ("02_data_parallel", 8, ()),
    ("04_tensor_parallel", 4, ()), ("04_tensor_parallel", 8, ()),
    ("05_sequence_parallel", 4, ()), ("05_sequence_parallel", 8, ("--variant=kept",)),
    ("06_context_parallel", 4, ()),
    ("06_context_parallel", 8, ("--variant=ulysses", "--kv-heads=8")),
    ("07_pipeline_parallel", 4, ("--variant=1f1b", "--layers=4")),
    ("07_pipeline_parallel", 8, ("--layers=8",)),
    ("08_expert_parallel", 4, ()), ("08_expert_parallel", 8, ("--ep=4",)),
    ("09_5d", 4, ("--tp=2", "--pp=2", "--zero=1")),
    ("09_5d", 8, ("--dp=2", "--tp=2", "--pp=2", "--zero=3")),
]  # fmt: skip


@pytest.mark.parametrize("dtype", sample(["float32", "float64"]))
@pytest.mark.parametrize(("name", "world", "more"), sample(RUNS))
def test_todays_step_is_one_gpus(ranks, tmp_path, name, world, more, dtype):
    """And all bytes are those of the formulas."""
    chapter(name)
    shares = 1 if name[:2] in ("04", "05", "06", "07") else world  # of the batch, at most
    flags = [*SMALL, f"--data={TEXT}", f"--dtype={dtype}", *TODAY, f"--batch={2 * shares}",
             "--micro-batch=1", *more]  # fmt: skip
    (status, run, output), *_ = ranks(world, timeout=120)(run_main, name, flags, tmp_path)
    assert status == 0 and not run["problems"], output
    assert all(check["ok"] is not False for check in run["checks"]), output
    assert f"masters in {dtype}" in output
    if dtype == "float64":
        assert max(run["max_loss_diff"], run["max_grad_diff"], run["max_param_diff"]) < 1e-10


@pytest.mark.parametrize(("name", "more"), sample([
    ("05_sequence_parallel", "--variant=ring"), ("04_tensor_parallel", "--variant=overlap"),
    ("02_data_parallel", "--variant=bucket --batch=6 --micro-batch=1")]))
def test_the_same_run_gives_the_same_bits(ranks, tmp_path, name, more):
    flags = (*SMALL, "--layers=1", "--heads=6", "--dim=24", "--kv-heads=3", "--seq=15", "--steps=2",
             f"--data={TEXT}", *more.split())  # fmt: skip
    one, other = [ranks(3)(run_main, name, flags, tmp_path)[0][1] for _ in range(2)]
    assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
