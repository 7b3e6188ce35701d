"""How a run that saves ends: by a signal, or because a rank dies or hangs."""

import contextlib
import functools
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import common
from lab.bench import meeting
from lab.checkpoints import saving, storage
from tests.conftest import CHAPTERS, sample
from tests.lab.checkpoints.test_saving import (
    QUICK,
    SMALL,
    SYNCED,
    at,
    names,
    status_of,
    tensors,
)
from tests.support import programs

# ---------------------------------------------------------------------------------- how a run ends


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def handlers():
    other = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(other)
    return signal.getsignal(signal.SIGTERM), other


@pytest.mark.parametrize("who", sample([[1], [0], [0, 1]]))
def test_sigterm_saves_and_ends(ranks, tmp_path, who):
    flags = "--steps=9", f"--save={tmp_path}"
    (status, out), (other, silent) = ranks(2)(status_of, QUICK, flags, [at(2, who, sigterm)])
    assert (status, other, silent) == (0, 0, "")
    step = int(re.search(r"  SIGTERM: saved after step (\d+); --resume \S+ goes on\n$", out)[1])
    assert step in (3, 4) and names(tmp_path) == ["log.jsonl", f"step-{step:06}"]
    (status, out), _ = ranks(2)(status_of, QUICK, [*flags, f"--resume={tmp_path}"])
    assert status == 0 and f"goes on after step {step} of" in out
    unbroken = "--steps=9", f"--save={tmp_path / 'unbroken'}"
    assert ranks(2)(status_of, QUICK, unbroken)[0][0] == 0
    last = "step-000009"
    assert tensors(tmp_path / last) == tensors(tmp_path / "unbroken" / last)


def test_sigterm_in_the_end_ends_nothing(run_chapter, monkeypatch, tmp_path):
    before, report = handlers(), saving.Saver.report
    monkeypatch.setattr(saving.Saver, "report", lambda self: (sigterm(), report(self)))
    monkeypatch.setattr(*at(2, [0], sigterm))
    flags = "--steps=3", "--save=saved", "--json=run.json"
    status, out, err = run_chapter(QUICK, *SMALL, *flags)
    assert status == 0 and "1 checkpoint in saved" in out and "SIGTERM" not in out, out + err
    assert names(tmp_path / "saved") == ["log.jsonl", "step-000003"]
    assert len(json.loads((tmp_path / "run.json").read_text())["loss"]) == 3
    assert handlers() == before


def test_handlers_are_put_back_when_a_run_fails(run_chapter, monkeypatch):
    def fail():
        raise ZeroDivisionError

    before, seen = handlers(), []
    monkeypatch.setattr(*at(1, [0], fail))
    with pytest.raises(ZeroDivisionError):
        run_chapter(QUICK, *SMALL, "--save=saved")
    assert handlers() == before
    monkeypatch.setattr(*at(1, [0], lambda: seen.append(handlers())))
    assert run_chapter(QUICK, *SMALL, "--steps=2")[0] == 0  # without --save: as ever
    assert run_chapter(QUICK, *SMALL, "--steps=2", "--save=other")[0] == 0
    assert seen[0] == before and seen[1] != before


class NotFinite:
    """In place of F.cross_entropy: the same, but not finite in one call, on some ranks."""

    right = staticmethod(torch.nn.functional.cross_entropy)

    def __init__(self, call, ranks, value):
        self.calls, self.call, self.ranks, self.value = 0, call, ranks, value

    def __call__(self, *args, **more):
        self.calls += 1
        wrong = self.calls == self.call and common.environment("RANK", 0) in self.ranks
        return NotFinite.right(*args, **more) * (self.value if wrong else 1)


@pytest.mark.parametrize(("name", "ranks_", "value"), sample([
    (QUICK, [1], math.nan), (QUICK, [0], math.inf), ("07_pipeline_parallel", [1], math.nan),
]))  # fmt: skip
def test_a_loss_that_is_not_finite_ends_the_run_in_that_step(ranks, tmp_path, name, ranks_, value):
    flags = ["--layers=2", "--micro-batch=2", "--steps=6", f"--json={tmp_path / 'run.json'}"]
    flags += ["--save-every=1", f"--save={tmp_path / 'saved'}", f"--plot={tmp_path / 'run.png'}"]
    call = 3 if name == QUICK else 5  # two micro-batches a step, or one
    wrong = [("torch.nn.functional.cross_entropy", NotFinite(call, ranks_, value))]
    (status, out), (other, _) = ranks(2)(status_of, name, flags, wrong)
    assert (status, other) == (1, 0), out
    step = int(re.search(r"✗ step (\d), rank 0: loss (nan|inf), gradient norm nan", out)[1])
    assert step == 3 and names(tmp_path / "saved") == ["log.jsonl", "step-000001", "step-000002"]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["loss"][-1] is None and len(record["loss"]) == step
    assert "run.png is not written" in out and out.count("✗") == 2


def whose_gradients(bad):
    from lab.bench import report
    from lab.cli import strict
    from tests.conftest import arguments

    run = report.Run(arguments("--no-verify", parse=strict.parse))
    p = torch.nn.Parameter(torch.zeros(2))
    run.optimizers.append(torch.optim.SGD([p], 1))
    p.grad = torch.tensor([1.0, math.inf if run.rank in bad else 1.0])
    nan = torch.tensor(math.nan)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for batch in run.batches():
            run.seconds.append(0.5)
            try:
                run.log(batch, nan, nan, torch.nn.Module())
            except SystemExit:
                return output.getvalue()


def test_the_rank_whose_gradients_are_not_finite_is_named(ranks):
    for bad, named in ([1, 2], 1), ([], 0):
        out, *_ = ranks(3)(whose_gradients, bad)
        assert f"✗ step 1, rank {named}: loss nan, gradient norm nan\n" in out


# ------------------------------------------------------------------------------------------- hangs

# A rank may be late on a busy machine. So nobody is impatient before step 2, and then one rank is.
LONG = (*SMALL, "--kv-heads=2", "--layers=2", "--micro-batch=2", "--steps=100000", "--timeout=90")


def impatient(rank):
    return at(2, [rank], functools.partial(meeting.set_timeout, 5))


def until_there(path):
    while not path.exists():
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path):
    """start(chapter, *flags, **more): its two Ranks, which end with the test."""
    started = []

    def ranks(name, *flags, **more):
        started.append(programs.Ranks(CHAPTERS / f"{name}.py", *flags, world=2, cwd=tmp_path,
                                      **more))
        return started[-1]

    yield ranks
    for each in started:
        each.stop()


@programs.gloo_tells
@pytest.mark.parametrize(("name", "rank"), sample([(QUICK, 0), ("04_tensor_parallel", 1)]))
def test_a_rank_that_hangs_is_named(start, tmp_path, name, rank):
    """It hangs until the other one has ended."""
    ended, other = tmp_path / "ended", 1 - rank
    ranks = start(name, *LONG, patches={
        rank: [at(2, [rank], functools.partial(until_there, ended))], other: [impatient(other)]})
    ranks.processes[other].join(100)
    ended.touch()
    assert ranks.wait() == [1, 1]
    said = f"error: step 3: rank {rank} did not answer within 5 s\n"
    assert ranks.err() == ranks.err(other) == said


def hang_or_sync(ended, path, data=None):
    if "step-000003" in str(path):
        until_there(ended)
    SYNCED(path, data)


@pytest.mark.full
def test_a_rank_that_hangs_while_it_saves_is_named(start, tmp_path):
    """Rank 1 does, in its thread."""
    hangs = functools.partial(hang_or_sync, tmp_path / "ended")
    ranks = start(QUICK, *SMALL, "--steps=9", "--timeout=90", "--save-every=3", "--save=saved",
                  patches={0: [impatient(0)], 1: [("lab.checkpoints.storage.synced", hangs)]})
    ranks.processes[0].join(100)
    (tmp_path / "ended").touch()
    assert ranks.wait()[0] == 1
    assert re.search(r"^error: step \d: rank 1 did not answer within 5 s$", ranks.err(), re.M)
    assert "Traceback" not in ranks.err() and not storage.checkpoints_in(tmp_path / "saved")


@pytest.mark.full
@pytest.mark.parametrize(("number", "rank", "says"), [
    (signal.SIGSTOP, 0, "rank 0 did not answer within 5 s"),  # it keeps the store
    (signal.SIGKILL, 1, "rank 1 has ended"),
    (signal.SIGKILL, 0, "rank 0 has ended"),
])  # fmt: skip
def test_a_rank_that_is_stopped_or_killed_is_named(start, number, rank, says):
    other = 1 - rank
    ranks = start(QUICK, *LONG, meet_at=programs.unused_port(), patches={other: [impatient(other)]})
    strike(ranks, number, rank, says)


@pytest.mark.full
def test_a_stage_that_is_stopped_is_named(start):
    """The other one waits for its message, with the timeout of the whole run."""
    ranks = start("07_pipeline_parallel", *LONG, "--timeout=10")
    strike(ranks, signal.SIGSTOP, 0, "rank 0 did not answer within 10 s")


def strike(ranks, number, rank, says):
    """Send a signal to a rank after step 5: the other one ends and names it."""
    other = ranks.processes[1 - rank]
    ranks.until("     5 ")
    ranks.send(number, rank)
    other.join(100)
    said = ranks.err()
    assert other.exitcode == 1 and re.search(rf"^error: step \d+: {says}$", said, re.M), said
    assert "Traceback" not in said and "gloo" not in said, said


@pytest.mark.full
def test_torchrun_passes_sigterm_on(tmp_path):
    """In a session of its own, and a reader's environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               f"{QUICK}.py", *SMALL, "--steps=100000", f"--save={tmp_path}"]
    process = subprocess.Popen(
        command, cwd=CHAPTERS, start_new_session=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stdout:
        if "     5 " in line:
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=100)
    step = int(re.search(r"SIGTERM: saved after step (\d+)", out)[1])
    assert storage.read_index(Path(tmp_path, f"step-{step:06}"))
    assert f"{QUICK}.py" not in err, err


# The clock that Sigterm reads when a signal has come.
SECOND = """
import threading, types
from lab.bench import meeting

moments = iter([100, 100 + meeting.Sigterm.SAME, 101 + meeting.Sigterm.SAME])

def monotonic():
    moment = next(moments)
    print("SIGTERM at", moment, flush=True)
    return moment

meeting.time = types.SimpleNamespace(monotonic=monotonic)
meeting.Sigterm()
print("waits", flush=True)
lock = threading.Lock()
lock.acquire()
while True:  # as in a collective, from which no signal calls back
    lock.acquire()
"""


def test_a_second_sigterm_ends_at_once(tmp_path):
    """Unless it comes so soon that torchrun has passed on the first one."""
    (tmp_path / "second.py").write_text(SECOND)
    ranks = programs.Ranks("second.py", cwd=tmp_path)
    try:
        ranks.until("waits")
        for moment in (100, 100 + meeting.Sigterm.SAME):
            ranks.send(signal.SIGTERM, 0)
            ranks.until(f"SIGTERM at {moment}")
        ranks.send(signal.SIGTERM, 0)
        assert ranks.wait() == [128 + signal.SIGTERM]
        assert f"SIGTERM at {101 + meeting.Sigterm.SAME}" in ranks.out()
    finally:
        ranks.stop()


def test_the_timeout_is_put_back(run_chapter):
    before, c10d = meeting.USUAL, meeting.c10d
    assert run_chapter(QUICK, *SMALL, "--timeout=2", "--steps=1")[0] == 0
    assert (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout) == before
