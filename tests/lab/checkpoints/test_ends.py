"""How a run that saves ends: by a signal, by a rank that dies or hangs."""

import contextlib
import functools
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import common
from lab.bench import meeting
from lab.checkpoints import saving, storage
from tests.conftest import CHAPTERS
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


@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
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


def test_sigterm_of_a_run_without_ranks(run_chapter, tmp_path, monkeypatch):
    before = handlers()
    monkeypatch.setattr(*at(1, [0], sigterm))
    status, out, err = run_chapter(QUICK, *SMALL, "--steps=50", "--save=saved")
    assert status == 0 and "  SIGTERM: saved after step " in out, out + err
    assert handlers() == before


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


@pytest.mark.parametrize(("name", "ranks_", "value"), [
    (QUICK, [1], math.nan), (QUICK, [0], math.inf), ("07_pipeline_parallel", [1], math.nan),
    ("03_zero", [0], math.nan),
])  # fmt: skip
def test_what_is_not_finite_ends_the_run_in_that_step(ranks, tmp_path, name, ranks_, value):
    flags = ["--layers=2", "--micro-batch=2", "--steps=6", f"--json={tmp_path / 'run.json'}"]
    flags += ["--save-every=1", f"--save={tmp_path / 'saved'}", f"--plot={tmp_path / 'run.png'}"]
    call = 3 if name == QUICK or name == "03_zero" else 5  # two micro-batches a step, or one
    wrong = [("torch.nn.functional.cross_entropy", NotFinite(call, ranks_, value))]
    (status, out), (other, _) = ranks(2)(status_of, name, flags, wrong)
    assert (status, other) == (1, 0), out
    step = int(re.search(r"✗ step (\d), rank 0: loss (nan|inf), gradient norm nan", out)[1])
    assert step == 3 and names(tmp_path / "saved") == ["log.jsonl", "step-000001", "step-000002"]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["loss"][-1] is None and len(record["loss"]) == step
    assert "run.png is not written: ValueError: the run has stopped before it was measured" in out
    assert out.count("✗") == 2


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


@pytest.mark.parametrize(("bad", "named"), [([2], 2), ([1, 2], 1), ([], 0), ([0, 1, 2], 0)])
def test_the_rank_whose_gradients_are_not_finite_is_named(ranks, bad, named):
    out, *_ = ranks(3)(whose_gradients, bad)
    assert f"✗ step 1, rank {named}: loss nan, gradient norm nan\n" in out


# ------------------------------------------------------------------------------------------- hangs

LONG = (*SMALL, "--layers=2", "--micro-batch=2", "--steps=100000", "--timeout=5")
TORCHRUN = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"


def hang(folder, name, rank):
    """A rank that hangs until the other one has ended, which waits for 5 s; not so before, since
    on a busy machine any rank may be late. Returns all that they leave."""
    ended, other = folder / "ended", 1 - rank
    patches = {rank: [at(2, [rank], functools.partial(until_there, ended))],
               other: [at(2, [other], functools.partial(meeting.set_timeout, 5))]}
    flags = *SMALL, "--kv-heads=2", "--steps=4", "--timeout=90"
    ranks = programs.Ranks(CHAPTERS / f"{name}.py", *flags, world=2, cwd=folder, patches=patches)
    ranks.processes[other].join(100)
    ended.touch()
    return ranks.wait(), ranks.out() + ranks.err(), ranks.err(other)


def until_there(path):
    while not path.exists():
        time.sleep(0.1)


def hang_or_sync(path, data=None):
    if "step-000001" in str(path):
        time.sleep(9)
    SYNCED(path, data)


def hang_while_saving(folder):
    """The second rank does, in its thread."""
    ranks = programs.Ranks(
        CHAPTERS / f"{QUICK}.py", *SMALL, "--steps=4", "--timeout=5", "--save-every=1",
        "--save=saved", world=2, cwd=folder, patches={1: [("lab.checkpoints.storage.synced",
                                                           hang_or_sync)]})
    statuses, said = ranks.wait(), ranks.out() + ranks.err()
    return statuses, said, storage.checkpoints_in(folder / "saved")


def strike(folder, name, number, rank, **more):
    """Send a signal to a rank after its fifth step. Returns what the other one says, its status,
    and after how many seconds it ends."""
    ranks = programs.Ranks(CHAPTERS / f"{name}.py", *LONG, world=2, cwd=folder, **more)
    try:
        ranks.until("     5 ")
        ranks.send(number, rank)
        start, other = time.monotonic(), ranks.processes[1 - rank]
        other.join(60)
        return ranks.err(), other.exitcode, time.monotonic() - start
    finally:
        ranks.stop()


def without_torchrun(folder, number, rank):
    """Rank 0 keeps the store."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return strike(folder, QUICK, number, rank, meet_at=port)


def sigterm_to_torchrun(folder):
    """In a session of its own, and a reader's environment."""
    flags = *SMALL, "--steps=100000", f"--save={folder}"
    process = subprocess.Popen(
        [*TORCHRUN, f"{QUICK}.py", *flags], cwd=CHAPTERS, start_new_session=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = []
    while "     5 " not in "".join(lines[-1:]):
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines) + process.stderr.read()
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=60)


SECOND = """
import threading
from lab.bench.meeting import Sigterm
Sigterm.SAME = 0.5
Sigterm()
print("waits", flush=True)
lock = threading.Lock()
lock.acquire()
while True:  # as in a collective, from which no signal calls back
    try:
        lock.acquire()
    except KeyboardInterrupt:
        pass
"""


def second_sigterm(folder):
    """Returns the status after two at once, of which torchrun has passed on one; and at the end."""
    (folder / "second.py").write_text(SECOND)
    ranks = programs.Ranks("second.py", cwd=folder)
    try:
        ranks.until("waits")
        ranks.send(signal.SIGTERM, 0)
        ranks.send(signal.SIGTERM, 0)
        before = ranks.wait(1)
        ranks.send(signal.SIGTERM, 0)
        return before, ranks.wait(5)
    finally:
        ranks.stop()


STORIES = {
    "a replica hangs": (hang, QUICK, 0),
    "a part of a layer hangs": (hang, "04_tensor_parallel", 1),
    "hangs while it saves": (hang_while_saving,),
    "a stage is stopped": (strike, "07_pipeline_parallel", signal.SIGSTOP, 0),
    "rank 0 is stopped": (without_torchrun, signal.SIGSTOP, 0),
    "rank 1 is killed": (without_torchrun, signal.SIGKILL, 1),
    "rank 0 is killed": (without_torchrun, signal.SIGKILL, 0),
    "torchrun is told to end": (sigterm_to_torchrun,),
    "told to end twice": (second_sigterm,),
}


@pytest.fixture(scope="module", autouse=True)
def stories(request, tmp_path_factory):
    """{name: a Future}: most of what these take is time in which ranks wait for others, so they
    begin with the first test of this file, and go on beside the next ones."""
    told = [item for item in request.session.items if item.path == Path(__file__)]
    told = {item.callspec.params.get("story") for item in told if hasattr(item, "callspec")}
    programs.folder()                                       # before several threads ask for it
    with ThreadPoolExecutor(4) as threads:
        yield {name: threads.submit(story, tmp_path_factory.mktemp("story"), *args)
               for name, (story, *args) in STORIES.items() if name in told}


@programs.gloo_tells
@pytest.mark.parametrize(("story", "rank"), [("a replica hangs", 0),
                                             ("a part of a layer hangs", 1)])
def test_a_rank_that_hangs_is_named(stories, story, rank):
    statuses, said, others = stories[story].result()
    assert statuses == [1, 1], said
    assert said.count("error: ") == 1 and "Traceback" not in said, said
    assert others == f"error: step 3: rank {rank} did not answer within 5 s\n"


@pytest.mark.parametrize("story", ["hangs while it saves"])
def test_a_rank_that_hangs_while_it_saves_is_named(stories, story):
    statuses, said, checkpoints = stories[story].result()
    assert statuses[0] == 1 and re.search(
        r"^error: step [23]: rank 1 did not answer within 5 s$", said, re.M), said
    assert "Traceback" not in said and not checkpoints


@pytest.mark.parametrize(("story", "says"), [
    pytest.param("a stage is stopped", "rank 0 did not answer within 5 s",  # others wait for its
                 marks=pytest.mark.full),                                   # messages
    ("rank 0 is stopped", "rank 0 did not answer within 5 s"),
    ("rank 1 is killed", "rank 1 has ended"),
    pytest.param("rank 0 is killed", "rank 0 has ended", marks=pytest.mark.full),  # and the store
])
def test_a_rank_that_is_stopped_or_killed_is_named(stories, story, says):
    said, status, seconds = stories[story].result()
    assert re.search(rf"^error: step \d+: {says}$", said, re.M), said
    assert status == 1 and seconds < 15 and "Traceback" not in said and "gloo" not in said, said


@pytest.mark.parametrize("story", ["torchrun is told to end"])
def test_torchrun_passes_sigterm_on(stories, story):
    out, err = stories[story].result()
    step, folder = re.search(r"SIGTERM: saved after step (\d+); --resume (\S+)", out).groups()
    assert storage.read_index(Path(folder, f"step-{int(step):06}"))
    assert f"{QUICK}.py" not in err, err


@pytest.mark.parametrize("story", ["told to end twice"])
def test_a_second_sigterm_ends_at_once(stories, story):
    assert stories[story].result() == ([None], [128 + signal.SIGTERM])


def test_the_timeout_is_put_back(run_chapter):
    before, c10d = meeting.USUAL, meeting.c10d
    assert run_chapter(QUICK, *SMALL, "--timeout=2", "--steps=1")[0] == 0
    assert (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout) == before
