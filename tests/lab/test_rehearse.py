"""lab.rehearse: a rank that is rehearsed measures what the same rank of a real run does."""

import importlib.util
import json
from unittest import mock

import pytest

from lab import chapters, rehearse
from lab.bench import fakes, rehearsal, report
from tests.conftest import CHAPTERS, SMALL, TEXT, chapter, run_main

FULL = pytest.mark.full
LAYOUTS = [  # chapter, ranks, flags
    pytest.param("02_data_parallel", 2, "--variant=bucket", marks=FULL),
    pytest.param("02_data_parallel", 4, "--variant=naive --precision=bf16", marks=FULL),
    pytest.param("03_zero", 2, "--variant=zero1", marks=FULL),
    pytest.param("03_zero", 4, "--variant=zero2 --precision=bf16", marks=FULL),
    ("03_zero", 2, "--variant=zero3"),
    pytest.param("04_tensor_parallel", 2, "", marks=FULL),
    pytest.param("04_tensor_parallel", 4, "--variant=overlap --block=llama", marks=FULL),
    pytest.param("05_sequence_parallel", 2, "--variant=megatron", marks=FULL),
    pytest.param("05_sequence_parallel", 4, "--variant=kept --recompute=full", marks=FULL),
    pytest.param("06_context_parallel", 2, "--variant=zigzag --attention=sdpa", marks=FULL),
    pytest.param("06_context_parallel", 4, "--variant=ulysses --kv-heads=4", marks=FULL),
    pytest.param("06_context_parallel", 2, "--variant=gather --documents=6", marks=FULL),
    pytest.param("07_pipeline_parallel", 2, "--variant=1f1b", marks=FULL),
    pytest.param("07_pipeline_parallel", 2, "--variant=dualpipe-v --layers=4", marks=FULL),
    pytest.param("07_pipeline_parallel", 2, "--variant=zb-h1 --precision=bf16", marks=FULL),
    pytest.param("08_expert_parallel", 2, "--variant=capacity", marks=FULL),
    pytest.param("09_5d", 4, "--pp=2 --tp=2 --attention=sdpa --recompute=selective", marks=FULL),
    ("09_5d", 4, "--dp=2 --pp=2 --zero=1 --precision=bf16 --attention=sdpa"),
    pytest.param("09_5d", 4, "--cp=2 --tp=2 --zero=3 --documents=6", marks=FULL),
    pytest.param("09_5d", 8, "--pp=2 --cp=2 --tp=2 --schedule=dualpipe-v --layers=4", marks=FULL),
    pytest.param("09_5d", 8, "--dp=2 --pp=2 --tp=2 --zero=2 --block=llama", marks=FULL),
    pytest.param("11_muon", 2, "", marks=FULL),
]  # fmt: skip


def measured(run):
    """What a run has measured, of itself, but the seconds."""
    seen = {check["name"]: check["measured"] for check in run.checks if "rank" not in check}
    return seen | {"FLOPs": run.flops.all, "kept": run.kept.most, "sent": run.comm.total}


def measure_on_ranks(name, flags, folder):
    """On a rank of the pool: what a real run measures, and its most bytes alive in that step."""
    module, peaks, seen = chapter(name), [], []
    live = fakes.LiveMeter({module.__file__})
    meter, log, judge = report.Run.meter, report.Run.log, report.Run.judge_and_report

    def meter_from_here(run, meters):
        live.begin()
        meter(run, meters)

    def log_and_tell(run, *args, **more):
        views = run.batch.tokens, run.batch.targets     # on a CPU, a rank's part is one of a whole
        peaks.append(live.peak - sum(x.nbytes for x in views) * (1 - 1 / run.args.shares))
        log(run, *args, **more)

    def judge_and_tell(run):
        status = judge(run)
        seen.append(measured(run))
        return status

    with (mock.patch.object(report.Run, "meter", meter_from_here),
          mock.patch.object(report.Run, "log", log_and_tell),
          mock.patch.object(report.Run, "judge_and_report", judge_and_tell), live):
        status, _, output = run_main(name, flags, folder)
    assert status == 0, output
    return seen[0], peaks[-1]


def rehearsed(name, world, rank, *flags, module=None):
    """The Run."""
    module = module or chapter(name)
    argv = [f"{name}.py", f"--ranks={world}", f"--rank={rank}", "--operators=cpu", *SMALL,
            f"--data={TEXT}", *flags]
    return rehearsal.rehearse(module, rehearse.parse(module, argv))


@pytest.mark.parametrize(("name", "world", "flags"), LAYOUTS)
def test_a_rank_measures_what_it_does_in_a_real_run(name, world, flags, pool, tmp_path):
    """States, what is kept, traffic and FLOPs of every rank, to the byte."""
    flags = ["--batch=8", *flags.split()]
    real = [*SMALL, f"--data={TEXT}", "--steps=2", "--no-verify", *flags]
    of_ranks = pool.call(world, 60, measure_on_ranks, name, real, tmp_path)
    for rank, (expected, peak) in enumerate(of_ranks):
        run = rehearsed(name, world, rank, *flags)
        seen = measured(run)
        assert {key: seen[key] for key in expected} == expected
        assert run.problems == []
        assert run.live.peak == sum(run.peak.values())
        if "reduce_scatter" in seen["sent"]:            # of which gloo's has a copy, while it waits
            assert run.live.peak <= peak
        else:
            assert run.live.peak == peak


def test_a_mixture_chooses_its_experts_in_turn():
    """So each rank has as many rows, and formulas hold. (In a real run, the router decides.)"""
    run = rehearsed("09_5d", 4, 1, "--batch=8", "--dp=2", "--tp=2", "--ep=4", "--experts=4")
    assert run.problems == []
    tokens, [of_stage] = 4 * 16 // 2, run.answer["experts"]["seen"].values()
    for of_block in of_stage:
        for sent, received in of_block:
            assert sent == received == [2 * tokens // 4] * 4


# ------------------------------------------------------------------------------------- the command


def planted(tmp_path, name, right, wrong):
    """The module of a chapter with that change in its source, in a file of the same name."""
    chapter(name)  # or skip
    source, path = (CHAPTERS / f"{name}.py").read_text(), tmp_path / f"{name}.py"
    assert source.count(right) == 1
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(f"planted_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(capsys, *flags, module=None):
    """Exit status, stdout and stderr of the command, of a chapter as it is or as it was planted."""
    find = (lambda number: module) if module else chapters.chapter
    with mock.patch.object(rehearse.chapters, "chapter", find):
        try:
            status = rehearse.main([*flags[:1], *SMALL, f"--data={TEXT}", *flags[1:]])
        except SystemExit as leaving:
            status = leaving.code
    return status, *capsys.readouterr()


def test_a_rank_is_reported(capsys, tmp_path):
    chapter("04_tensor_parallel")  # or skip
    path = tmp_path / "run.json"
    status, output, errors = run(capsys, "04_tensor_parallel.py", "--ranks=4", "--rank=3",
                                 f"--json={path}")
    assert (status, errors) == (0, "") and "rank 3 of 4, rehearsed" in output
    assert "✗" not in output and output.count("✓") > 5
    record = json.loads(path.read_text())
    assert record["world_size"] == 4 and record["problems"] == []
    [peak] = [check["measured"] for check in record["checks"] if "alive" in check["name"]]
    assert peak == sum(record["recorded"]["peak"].values())
    assert set(record["recorded"]["peak"]) >= {"parameters", "optimizer states",
                                               "kept for backward"}
    assert all(":" in where for _, _, where, _ in record["recorded"]["lines"])


def test_a_line_that_asks_for_a_value_is_named(capsys, tmp_path):
    inner = "        x = self.inner(x)                               # now a partial sum\n"
    asks = f"{inner}        if x.abs().max() > 1e4:\n            x = x / 2\n"
    module = planted(tmp_path, "04_tensor_parallel", inner, asks)
    status, output, errors = run(capsys, "04_tensor_parallel.py", "--ranks=2", module=module)
    assert (status, output) == (1, "")
    assert errors.startswith("error: 04_tensor_parallel.py:") and errors.count("\n") == 1
    assert "asks a tensor for its value" in errors


def test_a_gathered_tensor_that_is_kept_is_seen(capsys, tmp_path):
    gather = "        common.all_gather(parts.flatten(0, 1), x.contiguous(), group=group)\n"
    module = planted(tmp_path, "09_5d", gather, f"{gather}        ctx.save_for_backward(parts)\n")
    status, output, _ = run(capsys, "09_5d.py", "--ranks=2", "--tp=2", module=module)
    assert status == 1 and "✗ activations, at the most: measured" in output


def test_scores_are_seen_where_a_core_makes_them(capsys):
    """By their line: seq 512 has scores that are larger than all else."""
    chapter("04_tensor_parallel")  # or skip
    for attention, where in (("plain", True), ("sdpa", False)):
        status, output, _ = run(capsys, "04_tensor_parallel.py", "--ranks=2", "--batch=1",
                                f"--attention={attention}", "--seq=512")
        assert status == 0 and ("softmax" in output) == where


@pytest.mark.parametrize(("flags", "why"), [
    ("", "file"),
    ("10_planner.py", "invalid choice: '10_planner.py'"),
    ("04_tensor_parallel.py --ranks=2 --rank=2", "--rank 2 is not below --ranks = 2; --rank 1"),
    ("04_tensor_parallel.py --ranks=3", "do not fit 3 tensor-parallel ranks; --ranks 2 would work"),
    ("09_5d.py --ranks=6 --tp=4", "is 4 ranks, not 6; --ranks 4 would work"),
    ("04_tensor_parallel.py --steps=3", "--steps means nothing to a rehearsal"),
    ("04_tensor_parallel.py --ranks=2 --variant=torch", "--variant megatron would work"),
    ("04_tensor_parallel.py --ranks=2 --device=cuda", "--device cpu would work"),
    ("08_expert_parallel.py --matmul=grouped", "--precision bf16 would work"),
    ("06_context_parallel.py --kernels", "without --kernels would work"),
])  # fmt: skip
def test_what_is_refused(capsys, flags, why):
    status, output, errors = run(capsys, *flags.split())
    assert (status, output, errors.count("\n")) == (2, "", 1) and why in errors, errors
