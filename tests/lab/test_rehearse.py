"""lab.rehearse: a rank that is rehearsed measures what the same rank of a real run does."""

import importlib.util
import json
import math
from unittest import mock

import pytest
import torch

from lab import chapters, rehearse
from lab.bench import fakes, rehearsal, report
from tests.conftest import CHAPTERS, SMALL, TEXT, chapter, run_main

LAYOUTS = {  # of each chapter: ranks, and flags
    "02_data_parallel": """
        2 --variant=bucket
        4 --variant=naive --precision=bf16
        8 --variant=overlap --recompute=selective
        4 --variant=bucket --block=llama --attention=sdpa --optimizer=muon""",
    "03_zero": """
        2 --variant=zero3
        2 --variant=zero1
        4 --variant=zero2 --precision=bf16
        8 --variant=zero1 --optimizer=muon
        2 --variant=zero2 --block=llama --recompute=full
        2 --variant=zero3 --keep-gathered --precision=bf16
        4 --variant=hsdp --shard-size=2
        4 --variant=zeropp --shard-size=2""",
    "04_tensor_parallel": """
        2
        4 --variant=overlap --block=llama
        2 --precision=bf16 --recompute=full
        4 --optimizer=muon --attention=sdpa""",
    "05_sequence_parallel": """
        2 --variant=megatron
        4 --variant=kept --recompute=full
        2 --variant=ring
        4 --variant=megatron --block=llama --attention=sdpa --precision=bf16""",
    "06_context_parallel": """
        2 --variant=zigzag --attention=sdpa
        4 --variant=ulysses --kv-heads=4
        2 --variant=gather --documents=6
        4 --variant=ring --window=5
        8 --variant=zigzag --inner=2
        4 --variant=zigzag --documents=6 --cut=document
        2 --variant=ring --precision=bf16 --recompute=full""",
    "07_pipeline_parallel": """
        2 --variant=1f1b
        2 --variant=dualpipe-v --layers=4
        2 --variant=zb-h1 --precision=bf16
        2 --variant=interleaved --layers=4
        4 --variant=1f1b --layers=4 --recompute=full""",
    "08_expert_parallel": """
        2 --variant=capacity
        4 --variant=capacity --recompute=full --block=llama
        2 --variant=capacity --precision=bf16 --shared-expert --balance=bias""",
    "09_5d": """
        4 --dp=2 --pp=2 --zero=1 --precision=bf16 --attention=sdpa
        4 --pp=2 --tp=2 --attention=sdpa --recompute=selective
        4 --cp=2 --tp=2 --zero=3 --documents=6
        8 --pp=2 --cp=2 --tp=2 --schedule=dualpipe-v --layers=4
        8 --dp=2 --pp=2 --tp=2 --zero=2 --block=llama
        8 --dp=2 --cp=2 --tp=2 --zero=3 --keep-gathered
        8 --dp=2 --pp=2 --cp=2 --zero=1 --schedule=interleaved --layers=4
        4 --dp=4 --zero=2 --recompute=full --attention=sdpa
        8 --dp=2 --pp=2 --tp=2 --order=tp,cp,dp,pp --zero=1 --optimizer=muon
        2 --pp=2 --preset=gpt2 --vocab=256""",
    "11_muon": """
        2
        4 --variant=owner
        2 --variant=gather""",
}
EVERY = [pytest.param(name, int(line.split()[0]), " ".join(line.split()[1:]),
                      marks=[] if i == 0 and name in ("03_zero", "09_5d") else pytest.mark.full)
         for name, lines in LAYOUTS.items() for i, line in enumerate(lines.split("\n")[1:])]


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


@pytest.mark.parametrize(("name", "world", "flags"), EVERY)
def test_a_rank_measures_what_it_does_in_a_real_run(name, world, flags, pool, tmp_path):
    """States, what is kept, traffic and FLOPs of every rank, and the most that is alive, to the
    byte. (gloo's thread may hold a message a little longer: the least of three tries counts.)"""
    flags = ["--batch=8", *flags.split()]
    real = [*SMALL, f"--data={TEXT}", "--steps=2", "--no-verify", *flags]
    runs = [rehearsed(name, world, rank, *flags) for rank in range(world)]
    least = world * [math.inf]
    for _ in range(3):
        of_ranks = pool.call(world, 60, measure_on_ranks, name, real, tmp_path)
        least = [min(peak, before) for (_, peak), before in zip(of_ranks, least)]
        if least <= [run.live.peak for run in runs] or "reduce_scatter" in runs[0].comm.total:
            break
    for run, (expected, _), peak in zip(runs, of_ranks, least):
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


def test_experts_that_are_drawn_leave_ranks_unlike():
    """By Zipf's law: the first rank of those that share them gets most. The formulas hold."""
    rows = []
    for rank in (0, 3):
        run = rehearsed("09_5d", 4, rank, "--batch=8", "--dp=2", "--tp=2", "--ep=4", "--experts=8",
                        "--routing=zipf", "--recompute=full")
        assert run.problems == []
        [of_stage] = run.answer["experts"]["seen"].values()
        assert len({str(of_block) for of_block in of_stage}) == 1       # one draw for all
        [(sent, received)] = of_stage[0]
        assert sum(sent) == 2 * 4 * 16 // 2 and received == 4 * [sent[rank]]
        rows.append(sum(received))
    assert rows[0] > 2 * rows[1]


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", "--variant=overlapped --micro-batch=1",
                                   "--variant=two-hops --nodes=2", "--variant=capacity"])
def test_each_exchange_takes_experts_that_are_drawn(flags):
    for rank in (0, 3):
        run = rehearsed("08_expert_parallel", 4, rank, "--batch=8", "--experts=8",
                        "--routing=zipf", *flags.split())
        assert run.problems == [] and len(run.checks) > 5


def test_zipf_draws_a_tokens_experts_without_putting_back():
    draws = [fakes.Zipf(seed)(torch.empty(64, 32, 3), torch.empty(64, 32, 8)) for seed in (1, 1, 2)]
    assert torch.equal(*draws[:2]) and not torch.equal(*draws[1:])
    assert all(len({*token}) == 3 for token in draws[0].flatten(0, 1).tolist())
    counts = draws[0].flatten().bincount(minlength=8).tolist()
    assert counts == sorted(counts, reverse=True) and counts[0] > 3 * counts[-1]


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


def test_a_machine_of_the_cluster_has_eight_ranks():
    """Which is what hsdp shards over, if nothing else is asked for."""
    argv = ["03_zero.py", "--ranks=64", "--batch=64", "--variant=hsdp"]
    assert rehearse.parse(chapter("03_zero"), argv).shard_size == 8


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
    ("04_tensor_parallel.py --routing=zipf", "without --routing would work"),
    ("09_5d.py --routing=zipf", "--experts 8 would work"),
    ("08_expert_parallel.py --routing=zipf --nodes=2 --node-limit=1", "--routing balanced would"),
    ("06_context_parallel.py --kernels", "without --kernels would work"),
])  # fmt: skip
def test_what_is_refused(capsys, flags, why):
    status, output, errors = run(capsys, *flags.split())
    assert (status, output, errors.count("\n")) == (2, "", 1) and why in errors, errors
