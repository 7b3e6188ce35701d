"""How a run that saves ends: by a signal, or because a rank dies or hangs."""

import contextlib
import functools
import io
import json
import math
import os
import re
import signal
import time

import pytest
import torch

import common
from lab.run import meeting, report, strict
from tests.conftest import CHAPTERS, arguments, sample
from tests.lab.checkpoints.test_saving import QUICK, SMALL, at, names, status_of, tensors
from tests.lab.run.test_meeting import start  # noqa: F401  (a fixture)
from tests.support import programs

# ---------------------------------------------------------------------------------- how a run ends


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


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


def test_the_signal_handler_is_put_back_when_a_run_fails(run_chapter, monkeypatch):
    def fail():
        raise ZeroDivisionError

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(*at(1, [0], fail))
    with pytest.raises(ZeroDivisionError):
        run_chapter(QUICK, *SMALL, "--save=saved")
    assert signal.getsignal(signal.SIGTERM) == before


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
    (QUICK, [1], math.nan), ("07_pipeline_parallel", [1], math.inf),
]))  # fmt: skip
def test_a_loss_that_is_not_finite_ends_the_run_in_that_step(ranks, tmp_path, name, ranks_, value):
    flags = ["--layers=2", "--micro-batch=2", "--steps=6", f"--json={tmp_path / 'run.json'}"]
    flags += ["--save-every=1", f"--save={tmp_path / 'saved'}"]
    call = 3 if name == QUICK else 5  # two micro-batches a step, or one
    wrong = [("torch.nn.functional.cross_entropy", NotFinite(call, ranks_, value))]
    (status, out), (other, _) = ranks(2)(status_of, name, flags, wrong)
    assert (status, other) == (1, 0), out
    step = int(re.search(r"✗ step (\d), rank 0: loss (nan|inf), gradient norm nan", out)[1])
    assert step == 3 and names(tmp_path / "saved") == ["log.jsonl", "step-000001", "step-000002"]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["loss"][-1] is None and len(record["loss"]) == step


def whose_gradients(bad):
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


@programs.gloo_tells
@pytest.mark.parametrize(("name", "rank"), sample([(QUICK, 0), ("04_tensor_parallel", 1)]))
def test_a_rank_that_hangs_is_named(start, tmp_path, name, rank):
    """It hangs until the other one has ended."""
    ended, other = tmp_path / "ended", 1 - rank
    ranks = start(CHAPTERS / f"{name}.py", *LONG, world=2, patches={
        rank: [at(2, [rank], functools.partial(until_there, ended))], other: [impatient(other)]})
    ranks.processes[other].join(100)
    ended.touch()
    assert ranks.wait() == [1, 1]
    said = f"error: step 3: rank {rank} did not answer within 5 s\n"
    assert ranks.err() == ranks.err(other) == said


# The clock that Sigterm reads when a signal has come.
SECOND = """
import threading, types
from lab.run import meeting

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


def test_a_second_sigterm_ends_at_once(start, tmp_path):
    """Unless it comes so soon that torchrun has passed on the first one."""
    (tmp_path / "second.py").write_text(SECOND)
    ranks = start("second.py")
    ranks.until("waits")
    for moment in (100, 100 + meeting.Sigterm.SAME):
        ranks.send(signal.SIGTERM, 0)
        ranks.until(f"SIGTERM at {moment}")
    ranks.send(signal.SIGTERM, 0)
    assert ranks.wait() == [128 + signal.SIGTERM]
    assert f"SIGTERM at {101 + meeting.Sigterm.SAME}" in ranks.out()
