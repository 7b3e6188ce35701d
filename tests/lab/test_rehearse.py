"""lab.rehearse: a rank that is rehearsed measures what the same rank of a real run does."""

import importlib.util
import json
import math
from unittest import mock

import pytest

from lab import chapters, rehearse
from lab.rehearsal import fakes, rehearsal
from lab.run import report
from tests.conftest import FULL, SMALL, TEXT, chapter, edited, run_main, sample

LAYOUTS = [  # a chapter, ranks, and flags
    "09_5d 4 --dp=2 --pp=2 --zero=1 --precision=bf16 --attention=sdpa",
    "09_5d 4 --cp=2 --tp=2 --zero=3 --documents=6",
    "09_5d 8 --pp=2 --cp=2 --tp=2 --schedule=dualpipe-v --layers=4 --recompute=selective",
    "09_5d 8 --dp=2 --cp=2 --tp=2 --zero=3 --keep-gathered --block=llama",
    "09_5d 8 --dp=2 --pp=2 --tp=2 --order=tp,cp,dp,pp --zero=1 --optimizer=muon",
    "02_data_parallel 4 --variant=naive --precision=bf16",
    "02_data_parallel 4 --variant=bucket --block=llama --attention=sdpa --optimizer=muon",
    "03_zero 8 --variant=zero1 --optimizer=muon",
    "03_zero 2 --variant=zero3 --keep-gathered --recompute=full",
    "03_zero 4 --variant=zeropp --shard-size=2",
    "04_tensor_parallel 4 --variant=overlap --block=llama",
    "05_sequence_parallel 4 --variant=megatron --block=llama --attention=sdpa --precision=bf16",
    "06_context_parallel 4 --variant=ulysses --kv-heads=4",
    "06_context_parallel 4 --variant=zigzag --documents=6 --cut=document",
    "07_pipeline_parallel 2 --variant=dualpipe-v --layers=4",
    "07_pipeline_parallel 2 --variant=zb-h1 --precision=bf16",
    "08_expert_parallel 4 --variant=capacity --recompute=full --block=llama",
    "11_muon 4 --variant=owner"]


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


@pytest.mark.parametrize("layout", sample(LAYOUTS))
def test_a_rank_measures_what_it_does_in_a_real_run(layout, pool, tmp_path):
    """States, what is kept, traffic and FLOPs, and the most bytes alive, to the byte. gloo's thread
    may hold a message for longer: then it's tried again."""
    name, world, *flags = layout.split()
    world, flags = int(world), ["--batch=8", *flags]
    real = [*SMALL, f"--data={TEXT}", "--steps=2", "--no-verify", *flags]
    some = range(world) if FULL else (0, world - 1)
    runs, least = [rehearsed(name, world, rank, *flags) for rank in some], [math.inf for _ in some]
    for _ in range(10):
        everyone = pool.call(world, 60, measure_on_ranks, name, real, tmp_path)
        of_ranks = [everyone[rank] for rank in some]
        least = [min(peak, before) for (_, peak), before in zip(of_ranks, least)]
        if all(peak <= run.live.peak for run, peak in zip(runs, least)) or (
                "reduce_scatter" in runs[0].comm.total):
            break
    for run, (expected, _), peak in zip(runs, of_ranks, least):
        seen = measured(run)
        assert {key: seen[key] for key in expected} == expected
        assert run.problems == []
        assert run.live.peak == sum(run.peak.values())
        if "reduce_scatter" in seen["sent"]:            # gloo waits with a copy of it
            assert run.live.peak <= peak
        else:
            assert run.live.peak == peak


@pytest.mark.full
def test_a_mixture_chooses_its_experts_in_turn():
    """So each rank has as many rows. In a real run, the router decides."""
    flags, rows = ["--batch=8", "--dp=2", "--tp=2", "--ep=4", "--experts=8"], []
    for rank in (0, 3):
        run = rehearsed("09_5d", 4, rank, *flags)
        assert run.problems == []
        [of_stage] = run.answer["experts"]["seen"].values()
        [(sent, received)] = of_stage[0]
        assert sum(sent) == 2 * 4 * 16 // 2
        rows.append(sum(received))
    assert rows[0] == rows[1]


# ------------------------------------------------------------------------------------- the command


def from_a_file(folder, name, right, wrong):
    """A chapter with one piece replaced, as a module whose lines can be looked up."""
    path = folder / f"{name}.py"
    path.write_text(edited(name, right, wrong))
    spec = importlib.util.spec_from_file_location(f"edited_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(capsys, *flags, module=None):
    """Exit status, stdout and stderr of the command. module: of the chapter, if it's edited."""
    ours = chapters.chapter
    find = lambda number: module if module and number == flags[0][:2] else ours(number)
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
    assert all(":" in where for _, _, where, _ in record["recorded"]["lines"])


def test_a_line_that_asks_for_a_value_is_named(capsys, tmp_path):
    inner = "        x = self.inner(x)                               # now a partial sum\n"
    asks = f"{inner}        if x.abs().max() > 1e4:\n            x = x / 2\n"
    module = from_a_file(tmp_path, "04_tensor_parallel", inner, asks)
    status, output, errors = run(capsys, "04_tensor_parallel.py", "--ranks=2", module=module)
    assert (status, output) == (1, "")
    assert errors.startswith("error: 04_tensor_parallel.py:") and errors.count("\n") == 1
    assert "asks a tensor for its value" in errors


@pytest.mark.full
def test_a_gathered_tensor_that_is_kept_is_seen(capsys, tmp_path):
    gather = "        common.all_gather(parts.flatten(0, 1), x.contiguous(), group=group)\n"
    keeps = f"{gather}        ctx.save_for_backward(parts)\n"
    module = from_a_file(tmp_path, "09_5d", gather, keeps)
    status, output, _ = run(capsys, "09_5d.py", "--ranks=2", "--tp=2", module=module)
    assert status == 1 and "✗ activations, at the most: measured" in output


@pytest.mark.parametrize(("flags", "named"), [
    ("10_planner.py", "10_planner.py"), ("04_tensor_parallel.py --ranks=2 --rank=2", "--rank 1"),
    ("09_5d.py --ranks=6 --tp=4", "--ranks 4"), ("04_tensor_parallel.py --steps=3", "--steps"),
    ("04_tensor_parallel.py --ranks=2 --variant=torch", "--variant megatron"),
    ("06_context_parallel.py --kernels", "without --kernels"),
    ("04_tensor_parallel.py --plot=a.png", "without --plot"),
    ("09_5d.py --ranks=4 --cluster=mine", "mine")])
def test_a_bad_argument_costs_one_line(capsys, flags, named):
    status, output, errors = run(capsys, *flags.split())
    assert (status, output, errors.count("\n")) == (2, "", 1) and named in errors, errors
