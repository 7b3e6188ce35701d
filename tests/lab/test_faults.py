"""lab/faults.py: ranks that are killed at random cost time, and not a bit of what is trained."""

import json
import signal
import subprocess

import pytest
import torch

from lab import faults
from lab.faults import Fault
from tests.support.programs import gloo_tells


@gloo_tells
@pytest.mark.full
def test_torchrun_starts_killed_ranks_again_and_nothing_is_lost(capsys, tmp_path):
    """Every other kill comes while a checkpoint is being saved."""
    path = tmp_path / "faults.json"
    assert faults.main(["--kills=2", f"--json={path}"]) == 0, capsys.readouterr().out
    first, second, third = json.loads(path.read_text())["recorded"]["faulty"]["starts"]
    assert first["steps"][0] == 1 and third["steps"][-1] == faults.STEPS
    for before, after in ((first, second), (second, third)):
        assert after["steps"][0] <= before["steps"][-1] + 1
        assert after["steps"][0] % faults.EVERY == 1


def test_a_kill_comes_when_the_log_has_so_many_steps(tmp_path):
    (tmp_path / faults.LOG).write_text("")
    others = [subprocess.Popen(["sleep", "3600"]) for _ in range(2)]

    def pids():
        assert len(faults.read_log(tmp_path)) == 2
        return [one.pid for one in others]

    def ended():
        with (tmp_path / faults.LOG).open("a") as log:
            log.write('{"step": 1}\n')
        return False

    try:
        faults.strike(Fault(1, 2, False, 0), tmp_path, pids, ended)
        assert others[1].wait(100) == -signal.SIGKILL and others[0].poll() is None
    finally:
        for one in others:
            one.kill()


def test_a_run_that_ends_too_early_or_too_late_is_no_success(tmp_path, monkeypatch):
    fault = Fault(0, 1, False, 0)
    with pytest.raises(faults.Failed, match="ended before"):
        faults.strike(fault, tmp_path, list, lambda: True)
    monkeypatch.setattr(faults, "PATIENCE", 0.1)
    with pytest.raises(faults.Failed, match="no time left"):
        faults.strike(fault, tmp_path, list, lambda: False)
    (tmp_path / ".step-000001").mkdir()  # left by an earlier run
    with pytest.raises(faults.Failed, match="no time left for a kill in a save"):
        later = fault._replace(steps=0, in_save=True)
        faults.strike(later, tmp_path, list, lambda: False)
    (tmp_path / faults.LOG).write_text('{"step": 1, "loss": 1, "time": 5}\n')
    with pytest.raises(faults.Failed, match="1 of 2 steps"):
        faults.compare(tmp_path, tmp_path, 2)


def test_young_and_daly():
    """Llama 3's rate of faults, and the examples of the lesson."""
    for save, minutes in ((60, 18.3), (1, 2.36)):
        best = faults.best_interval(save, faults.LLAMA)
        assert best / 60 == pytest.approx(minutes, abs=0.05)
    # 10 s apart, 1 s each: 10%. In 100 s, one fault costs half of 10 s and a restart of 15 s: 20%.
    assert faults.expected_goodput(10, 1, 15, 100) == pytest.approx(0.8 / 1.1)


def test_goodput_counts_steps_that_were_not_computed_again():
    """Killed after step 4, when step 2 was saved. Killed after step 6, which was saved."""
    first = [(1, 10.0), (2, 11.0), (3, 12.0), (4, 13.0)]
    second = [(3, 20.0), (4, 20.5), (5, 22.5), (6, 23.0)]
    third = [(7, 30.0), (8, 34.0)]
    assert faults.goodput([first, second, third], 40) == ((1 + 0.5 + 2 + 0.5 + 4) / 40, 2)


def test_a_difference_is_seen():
    a, b = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.0 + 1e-6])
    assert faults.unequal({"a": a, 1: 0.1}, {"a": a.clone(), 1: 0.1}) == []
    assert faults.unequal({"a": a, "b": b}, {"a": b}) == ["a", "b"]
