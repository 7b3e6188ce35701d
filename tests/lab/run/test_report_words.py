"""What a run says, and what it leaves behind."""

import contextlib
import io
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import common
from common import gpt, loss_sum
from lab import launch
from lab.run import report, strict
from tests.conftest import arguments, sample
from tests.lab.run.test_report import bare

# ------------------------------------------------------------------------------------ what it says


def run_of_numbers(Run, parse, numbers):
    """A run whose steps come to these (loss, norm, skipped) on rank 0, and on the others."""
    flags, steps = [f"--steps={len(numbers[0])}"], numbers[dist.get_rank()]
    flags += ["--no-verify"] if Run is report.Run else []
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run = Run(arguments(*flags, parse=parse))
        try:
            for batch, (loss, norm, skipped) in zip(run.batches(), steps):
                if Run is report.Run:
                    run.seconds.append(0.5)
                run.log(batch, torch.tensor(loss), torch.tensor(norm), torch.nn.Module(),
                        skipped=skipped)
            status = run.finish() if hasattr(run, "finish") else run.status
        except SystemExit as leaving:  # lab's run ends with such a step, on all ranks
            status = leaving.code
    return status, [line.strip() for line in output.getvalue().splitlines() if "✗" in line]


NAN, INF, GOOD = math.nan, math.inf, (5.0, 1.0, False)


@pytest.mark.parametrize(("rank_0", "rank_1", "says"), [
    ([GOOD, (5.0, INF, True)], [GOOD, (5.0, NAN, True)], None),  # fp16 skips those
    ([GOOD, (5.0, INF, False)], [GOOD, GOOD], "step 2, rank 0: loss 5.0000, gradient norm inf"),
    ([GOOD, (NAN, 1.0, False)], [(INF, 1.0, False)] * 2,
     "step 1, rank 1: loss inf, gradient norm 1.0000"),
])
def test_what_is_not_finite_on_any_rank_fails_the_run(ranks, rank_0, rank_1, says):
    two = ranks(2)
    bad, expected = int(bool(says)), [f"✗ {says}"] if says else []
    (status, lines), (other, _) = two(run_of_numbers, report.Run, strict.parse, (rank_0, rank_1))
    assert (status, other, lines) == (bad, 0, expected)
    statuses, _ = zip(*two(run_of_numbers, common.Run, common.parse, (rank_0, rank_1)))
    losses = [loss for loss, *_ in rank_0 + rank_1]
    assert max(statuses) == (not all(map(math.isfinite, losses)))  # without lab, the loss alone


def skipped_steps(skip):
    args = arguments("--optimizer=momentum", "--steps=2", parse=strict.parse)
    run = report.Run(args, lambda args, *rest: {"parameters": args.model.parameters()})
    model = run.draw(gpt(run.args.model, seed=None))
    optimizer, output = run.optimizer(model.parameters()), io.StringIO()
    with contextlib.redirect_stdout(output):
        for batch in run.batches():
            with run.measure():
                optimizer.zero_grad()
                loss = loss_sum(model(batch.tokens), batch.targets) / batch.valid
                loss.backward()
                norm = common.grad_norm(model.parameters())
                if batch.step not in skip:
                    optimizer.step()
            run.log(batch, loss.detach(), norm, model, skipped=batch.step in skip)
        status = run.finish()
    [states] = [check for check in run.checks if check["name"] == "optimizer states"]
    return status, run.references, states, output.getvalue()


def test_one_gpu_takes_no_step_that_was_skipped(ranks):
    [(status, references, states, output)] = ranks(1)(skipped_steps, [0])
    assert status == 0 and references[0] == (None, None) and references[1][0] > 5, output
    assert states["ok"] and states["measured"] > 0
    [(status, _, states, output)] = ranks(1)(skipped_steps, [0, 1])
    assert status == 1 and "✗ no step was compared with one GPU" in output
    assert output.count("✗") == 1 and states["measured"] == 0  # no states, and nothing wrong in it


def a_rare_high_token(file):
    run = bare(f"--data={file}", "--batch=1", "--steps=2000")
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(common.Refused) as refused:
        list(run.batches())
    return refused.value.args[0]


def test_a_high_token_of_a_bin_is_refused_when_its_batch_is_made(ranks, tmp_path):
    tokens = np.zeros(2000, "<u2")
    tokens[1000] = 300
    tokens.tofile(tmp_path / "rare.bin")
    [why] = ranks(1)(a_rare_high_token, tmp_path / "rare.bin")
    assert why.startswith("--vocab 256 is too small for token 300 of ")


# ------------------------------------------------------------------------------- what it leaves


def run_that_writes(folder, target, how):
    """A run that is to write all it can, with one function replaced. Returns its status, the lines
    after its table, and the files that are new."""
    files = {"--json": "run.json", "--plot": "figure.png", "--profile": "trace.json"}
    (folder / "trace.json").write_text("{}")  # of an earlier run
    run = bare("--no-verify", "--steps=1", *[f"{flag}={folder}/{files[flag]}" for flag in files])
    draw = lambda runs, chapter, path: path.write_bytes((folder / "run.json").read_bytes())
    run.draw_record = launch.draw
    with (contextlib.redirect_stdout(io.StringIO()) as output,
          mock.patch("lab.pictures.draw", draw), mock.patch(target, **how)):
        for batch in run.batches():
            with run.measure():
                torch.ones(3) + 1
            run.log(batch, torch.ones(()), torch.ones(()), run.model)
        status = run.finish()
    _, lines = output.getvalue().split("formula\n")
    written = [name for name in files.values()
               if (folder / name).exists() and (folder / name).stat().st_size > 2]
    return status, lines.splitlines(), written


@pytest.mark.parametrize(("target", "how", "file", "written"), sample([
    ("pathlib.Path.write_text", {"side_effect": OSError(28, "No space left on device")},
     "run.json", "trace.json"),
    ("math.tau", {"new": 6.28}, None, "run.json figure.png trace.json"),  # nothing goes wrong
    ("lab.pictures.draw", {"side_effect": ImportError("No module named 'matplotlib'")},
     "figure.png", "run.json trace.json"),
], 2))
def test_a_file_that_cannot_be_written_costs_a_line(ranks, tmp_path, target, how, file, written):
    [(status, lines, files)] = ranks(1)(run_that_writes, tmp_path, target, how)
    problems = [line.strip() for line in lines if "✗" in line]
    assert status == int(bool(file)) and files == written.split()
    assert (f"{tmp_path}/{file} is not written: " in problems[0]) if file else not problems
