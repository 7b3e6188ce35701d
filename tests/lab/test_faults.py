"""Ranks that are killed at random moments cost time, and not a bit of what is trained."""

import os
import random
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab import faults
from lab.bench import report
from lab.bench.ranks import CONTEXT
from lab.faults import Fault
from tests.conftest import TEXT, chapter, main, no_flags
from tests.support.programs import gloo_tells

SMALL = ("--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--batch=6",
         "--dtype=float64", "--device=cpu", f"--data={TEXT}", "--no-verify")  # fmt: skip
EVERY, SAVES = 3, 3  # steps between saves; how many a fault may take at most
LAYOUTS = [("02_data_parallel", 3, "--variant=overlap"), ("03_zero", 3, "--variant=zero3"),
           ("04_tensor_parallel", 2), ("09_5d", 4, "--pp=2", "--tp=2", "--zero=1")]  # fmt: skip


def quiet(name, *flags):
    """For a rank of the pool: an unbroken run."""
    return main(chapter(name), [*map(str, flags)])


def one_rank(rank, world, restarts, store, output, name, flags):
    """A process that torchrun could have started."""
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    dist.init_process_group("gloo", f"file://{store}", timedelta(minutes=5), world, rank)
    module = chapter(name)
    report.launch(module.__file__, module.__doc__, module.VARIANTS, module.requires,
                  getattr(module, "flags", no_flags), module.formulas, [*map(str, flags)])


def train(pool, folder, layout, kills, *flags):
    """Train with these faults, and start again after each. Returns how many left a save undone."""
    name, world, *own = layout
    flags, undone = [*SMALL, *own, *flags, f"--save={folder}", f"--resume={folder}"], 0
    flags.append(f"--save-every={EVERY}")
    for restarts, fault in enumerate([*kills, None]):
        store, output = pool.path("store"), pool.path("output")
        processes = [CONTEXT.Process(target=one_rank, args=(
            rank, world, restarts, store, output, name, flags), daemon=True)
            for rank in range(world)]  # fmt: skip
        since = time.time()
        for process in processes:
            process.start()
        pids = [process.pid for process in processes]
        try:
            if fault:
                faults.strike(fault, folder, lambda pids=pids: pids, since + 40,
                              lambda them=processes: not any(one.is_alive() for one in them))
            for process in processes:
                process.join(max(0, since + 60 - time.time()))
            codes = [process.exitcode for process in processes]
        except faults.Failed as why:
            pytest.fail(f"{why}:\n{Path(output).read_text()}")
        finally:
            for process in processes:
                process.kill()
        said = Path(output).read_text()
        assert None not in codes, f"after {fault}, rank {codes.index(None)} hangs:\n{said}"
        assert "Traceback" not in said, said
        if fault:
            undone += faults.is_saving(folder, since)
            expected = [-9 if rank == fault.rank else 1 for rank in range(world)]
            assert codes == expected, f"after {fault}:\n{said}"
    assert codes == [0] * world, said
    return undone


def drawn(kills, world, seed):
    """Every other one while a save is under way, the first as soon as it is."""
    draw = random.Random(seed)
    return [Fault(draw.randrange(world), draw.randint(1, 2 * EVERY - 1), not i % 2,
                  draw.uniform(0, 0.02) if i else 0) for i in range(kills)]  # fmt: skip


def hold_to_the_quiet_run(pool, tmp_path, layout, kills, seed):
    steps = EVERY * SAVES * kills
    name, world, *own = layout
    assert pool.call(world, 60, quiet, name, *SMALL, *own, f"--steps={steps}",
                     f"--save={tmp_path}/quiet")[0] == 0  # fmt: skip
    undone = train(pool, tmp_path / "faulty", layout, drawn(kills, world, seed), f"--steps={steps}")
    assert faults.compare(tmp_path / "faulty", tmp_path / "quiet", steps) == (0, 0)
    logged = [line["step"] for line in faults.log_of(tmp_path / "faulty")]
    starts = [after for before, after in pairwise(logged) if after != before + 1]
    assert starts and all(step % EVERY == 1 for step in starts)  # after what was saved
    return undone


@gloo_tells
def test_three_kills_cost_no_bit(pool, tmp_path):
    """One of them in a save: if none was, which a busy machine may bring about, once more."""
    layout = ("03_zero", 2, "--variant=zero3")
    assert any(hold_to_the_quiet_run(pool, tmp_path / str(seed), layout, 3, seed)
               for seed in range(4))  # fmt: skip


@gloo_tells
@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0])
def test_a_hundred_kills_cost_no_bit(pool, tmp_path, layout):
    assert hold_to_the_quiet_run(pool, tmp_path, layout, 25, seed=1) > 3


@pytest.mark.full
def test_torchrun_starts_a_killed_rank_again(pool, tmp_path):
    """As a reader would: torchrun, which hands all of its attempts one store."""
    layout, flags = ("02_data_parallel", 2), ("--batch=2", "--steps=12", f"--data={TEXT}")
    flags_of_both = *faults.MODEL, *flags
    assert pool.call(2, 60, quiet, layout[0], *flags_of_both, f"--save={tmp_path}/quiet")[0] == 0
    folder, deadline = tmp_path / "faulty", time.time() + 100
    [(at, logged, _)] = faults.train(layout, folder, [Fault(1, 7, False, 0)], deadline, *flags,
                                     "--save-every=3")  # fmt: skip
    steps = [line["step"] for line in faults.log_of(folder)]
    assert 7 <= logged < len(steps) and steps[logged] % 3 == 1 and steps[-1] == 12
    assert steps[:logged] == list(range(1, logged + 1)) and 1 < steps[logged] <= logged + 1
    assert faults.compare(folder, tmp_path / "quiet", 12) == (0, 0)
    said = folder.with_suffix(".txt").read_text()
    assert "goes on after step" in said and "Traceback" not in said


def test_a_run_that_ends_too_early_or_too_late_is_no_success(tmp_path):
    fault = Fault(0, 1, False, 0)
    with pytest.raises(faults.Failed, match="the run ended before a kill"):
        faults.strike(fault, tmp_path, list, time.time() + 9, lambda: True)
    with pytest.raises(faults.Failed, match="no time left for a kill"):
        faults.strike(fault, tmp_path, list, time.time(), lambda: False)
    (tmp_path / ".step-000001").mkdir()  # left by a run before
    with pytest.raises(faults.Failed, match="no time left for a kill in a save"):
        later = fault._replace(steps=0, in_save=True)
        faults.strike(later, tmp_path, list, time.time() + 0.1, lambda: False)
    (tmp_path / faults.LOG).write_text('{"step": 1, "loss": 1, "time": 5}\n')
    with pytest.raises(faults.Failed, match="log.jsonl has 1 of 2 steps"):
        faults.compare(tmp_path, tmp_path, 2)


def test_young_and_daly():
    """Llama 3's rate of faults, and the examples of the lesson."""
    assert faults.LLAMA == pytest.approx(10_012, abs=1)
    for save, minutes, lost in ((60, 18.3, 0.109), (1, 2.36, 0.0141)):
        best = faults.best_interval(save, faults.LLAMA)
        assert best / 60 == pytest.approx(minutes, abs=0.05)
        assert save / best + best / 2 / faults.LLAMA == pytest.approx(lost, abs=5e-4)
        shares = [faults.expected_goodput(interval, save, 30, faults.LLAMA)
                  for interval in (best / 2, best, best * 2)]
        assert max(shares) == shares[1]
    # 10 s apart, 1 s each: 10%. In 100 s, one fault costs half of 10 s and a restart of 15 s: 20%.
    assert faults.expected_goodput(10, 1, 15, 100) == pytest.approx(0.8 / 1.1)


def test_goodput_counts_steps_that_were_not_computed_again():
    """Killed after step 4, and step 2 was saved; killed after step 6, which was saved."""
    first = [(1, 10.0), (2, 11.0), (3, 12.0), (4, 13.0)]
    second = [(3, 20.0), (4, 20.5), (5, 22.5), (6, 23.0)]
    third = [(7, 30.0), (8, 34.0)]
    assert faults.goodput([first, second, third], 40) == ((1 + 0.5 + 2 + 0.5 + 4) / 40, 2)
    assert faults.goodput([first], 20) == (3 / 20, 0)


def test_a_difference_is_seen(tmp_path):
    a, b = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.0 + 1e-6])
    assert faults.difference({"a": a, 1: 0.1}, {"a": a.clone(), 1: 0.1}) == 0
    assert faults.difference({"a": a}, {"a": b}) == pytest.approx(2.5e-7, rel=0.1)
    assert faults.difference({1: 0.1 + 2**-56}, {1: 0.1}) > 0
    with pytest.raises(faults.Failed, match="only one run has"):
        faults.difference({"a": a, "b": b}, {"a": a})


def test_arguments_that_cannot_be(capsys):
    for flags, what in ((["--kills=0"], "--kills: 0 is no whole number"), (["--seed=x"], "--seed")):
        with pytest.raises(SystemExit) as leaving:
            faults.main(flags)
        said = capsys.readouterr().err
        assert leaving.value.code == 2 and what in said and said.count("\n") == 1
