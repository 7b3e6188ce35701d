"""lab.rehearse, of runs that were published: the planner beside, all stages, memory over a step."""

import json
import os
import resource
import sys
import time
from dataclasses import replace

import pytest

from lab import rehearse
from lab.bench import anatomy, planned, rehearsal, rehearsed
from tests.conftest import SMALL, TEXT, chapter

FULL = pytest.mark.full
BF16 = ["--precision=bf16", "--attention=sdpa", "--batch=8"]


@pytest.fixture(scope="module", autouse=True)
def nine():
    chapter("09_5d")  # or skip


def runs(*flags, small=True):
    """The Run of each stage."""
    argv = ["09_5d.py", *(["--ranks=8", *SMALL, f"--data={TEXT}", *BF16] if small else []), *flags]
    module, args = rehearse.accepted([*argv, "--all-stages"])
    found = []
    for rank in rehearse.ranks_of(module, args):
        args.rank = rank
        found.append(rehearsal.rehearse(module, args))
    return found


@pytest.mark.parametrize("flags", [
    "--pp=2 --tp=2 --zero=1 --batch=4 --layers=4 --vocab=128",
    pytest.param("--pp=2 --tp=2 --zero=2 --schedule=interleaved --layers=4", marks=FULL),
    pytest.param("--pp=4 --cp=2 --layers=8", marks=FULL),
    pytest.param("--pp=4 --tp=2 --block=llama --kv-heads=2 --zero=3 --layers=8", marks=FULL),
    pytest.param("--pp=4 --tp=2 --attention=plain --layers=8", marks=FULL),
])  # fmt: skip
def test_the_planner_says_the_same_of_the_fullest_stage(flags):
    """But for the norm before the head, which the first stage lacks; for the step count of each
    tensor; and for what it leaves out of activations, to the byte."""
    stages = runs(*flags.split())
    first = stages[0]
    columns = [run.recorded["planner"] for run in stages]
    most = {what: max(column[what][0] for column in columns) for what in columns[0]}
    expected = {what: planned for what, (_, planned) in columns[0].items()}
    if "zero=3" not in flags:  # of which the planner has two layers as a whole
        assert most["parameters"] == expected["parameters"]
    assert most["gradients"] == pytest.approx(expected["gradients"], abs=2 * 4 * 32)
    assert 0 < most["optimizer states"] - expected["optimizer states"] < 4 * 100
    sent = [what for what in most if what.startswith("sent")]
    assert sent and all(most[what] == expected[what] > 0 for what in sent)
    off = columns[0]["activations"][0] - expected["activations"]
    assert off == first.recorded["left_out"] > 0
    assert first.recorded["activations"] == max(kept for *_, kept, _ in first.spans)


def test_a_gathered_tensor_that_is_not_kept_is_what_another_software_frees():
    run, *_ = runs("--pp=2", "--tp=2", "--block=llama", "--software=llama3", "--batch=4")
    plan, ten = planned.plan_of(run.args, 8), anatomy.planner()
    freed = {f"{name} {value}": size for name, value, size in planned.freed(
        plan, ten.SOFTWARE["llama3"], {"v": 2})}
    assert set(freed) == {"swiglu_kept 2", "keeps_gathered False", "whole_tables False", "v 2"}
    theirs = ten.memory(plan.asked[0], replace(plan.asked[1], v=2),
                        ten.SOFTWARE["llama3"], run.args.micro_batches)
    assert plan.bytes - sum(freed.values()) == sum(theirs.values())
    told = "\n".join(run.told())
    assert "llama3 frees what ours keeps" in told
    assert "llama3, without what lives shortly: fits on 80.00 GB" in told
    assert "does not fit" not in told and "  a step on 8 x h100 would take" in told


@pytest.mark.parametrize(("name", "flags"), [
    ("llama3-8192", "--pp=4 --ranks=2048 --layers=8 --batch=256"),
    pytest.param("llama3-8192", "--batch=2048", marks=FULL),
    pytest.param("llama3-16384", "--batch=2048", marks=FULL),
    pytest.param("llama3-128k", "--batch=128", marks=FULL),
])
def test_a_published_layout_is_as_planned(name, flags):
    """The first stage; in `make test` of a quarter of the stages, with two layers each."""
    module, args = rehearse.accepted(["09_5d.py", f"--published={name}", *flags.split()])
    begin = time.process_time()
    run = rehearsal.rehearse(module, args)
    assert run.problems == [] and run.world == args.ranks >= 2048
    if os.environ.get("FULL"):  # 2 minutes on two cores, and 4 GB
        assert time.process_time() - begin < 240
        unit = 1 if sys.platform == "darwin" else 1024
        assert unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e9
    found = run.recorded["planner"]
    missing = 2 * 16384                                 # the norm before the head
    assert found["parameters"][1] - found["parameters"][0] == missing
    assert found["gradients"][1] - found["gradients"][0] == 4 * 16384 // (args.dp * args.cp * 8)
    assert found["sent over tp"][0] == found["sent over tp"][1]
    assert found["activations"][0] - found["activations"][1] == run.recorded["left_out"] > 0
    assert "leaves the machine" in "\n".join(run.told())


@pytest.mark.full
def test_deepseek_v3_is_rehearsed_as_far_as_a_chapter_goes():
    module, args = rehearse.accepted(["09_5d.py", "--published=deepseek-v3", "--layers=32",
                                      "--batch=4096"])
    run = rehearsal.rehearse(module, args)
    assert run.problems == [] and run.peak["kept for backward"] > 1e9
    found = run.recorded["planner"]                     # two layers, and both tables
    for what in ("parameters", "gradients"):
        assert found[what][0] == found[what][1], what
    assert 0 < found["optimizer states"][0] - found["optimizer states"][1] < 4 * 100


# ------------------------------------------------------------------------------------- the command


def command(capsys, *flags):
    """Exit status, stdout and stderr."""
    try:
        status = rehearse.main([*flags])
    except SystemExit as leaving:
        status = leaving.code
    return status, *capsys.readouterr()


def one_after_the_other(argv, ranks):
    return [rehearse.rehearse(argv, rank) for rank in ranks]


def test_all_stages_are_told_and_drawn(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(rehearse, "rehearse_all", one_after_the_other)
    path, picture = tmp_path / "new/run.json", tmp_path / "newer/memory.png"
    status, output, errors = command(
        capsys, "09_5d.py", "--ranks=4", "--rank=3", *SMALL, f"--data={TEXT}", *BF16, "--pp=2",
        "--tp=2", "--batch=2", "--all-stages", f"--json={path}", f"--plot={picture}")
    assert (status, errors) == (0, "") and "rank 3 of 4, rehearsed" in output
    rows = [line.split() for line in output.rpartition("all that is alive\n")[2].splitlines()]
    assert [row[0] for row in rows] == ["1", "3", "most", "planner"]
    record = json.loads(path.read_text())
    assert record["rank"] == 3 and [stage["rank"] for stage in record["stages"]] == [1, 3]
    assert picture.stat().st_size > 20_000
    for stage in record["stages"]:
        at, *sizes = stage["recorded"]["over_time"]
        assert max(map(sum, zip(*sizes))) == sum(stage["recorded"]["peak"].values())
        top = max(zip(*sizes), key=sum)
        assert {name: size for name, size in zip(rehearsed.CLASSES, top) if size} == {
            name: size for name, size in stage["recorded"]["peak"].items() if size}
        assert at == sorted(at) and min(map(min, sizes)) >= 0
        kinds = [kind for kind, *_ in stage["recorded"]["actions"]]
        assert kinds.count("F") == kinds.count("BW") == 2
    figure = rehearsed.draw(record["stages"])
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == [
        f"rank {rank} of 4" for rank in (1, 3)]


def test_what_does_not_fit_is_said(capsys):
    status, output, _ = command(capsys, "02_data_parallel.py", "--ranks=2", "--preset=llama-8b",
                                "--layers=8", "--precision=bf16", "--batch=8")
    assert status == 0 and "alive, and a GPU has 80.00 GB" in output
    assert "  if it fitted, a step on 2 x h100 would take" in output


def test_a_picture_alone_takes_the_first_the_middle_and_the_last_stage():
    module, args = rehearse.accepted(["09_5d.py", "--ranks=16", "--rank=1", "--pp=8", "--tp=2",
                                      "--layers=8", "--batch=8", "--plot=x.png"])
    assert rehearse.ranks_of(module, args) == [1, 9, 15]
    args.plot = None
    assert rehearse.ranks_of(module, args) == [1]


@FULL
def test_several_ranks_are_rehearsed_at_once(capsys):
    status, output, errors = command(capsys, "07_pipeline_parallel.py", "--ranks=4", *SMALL,
                                     "--layers=4", f"--data={TEXT}", "--all-stages")
    assert (status, errors) == (0, "") and "\n  3   " in output


@pytest.mark.parametrize(("flags", "why"), [
    ("04_tensor_parallel.py --published=llama3-8192", "is a run of 09_5d.py; without --published"),
    ("04_tensor_parallel.py --all-stages", "a pipeline's, and 04 has none; without --all-stages"),
    ("04_tensor_parallel.py --ranks=2 --software=llama3", "--precision bf16 would work"),
    ("09_5d.py --published=llama4", "invalid choice: 'llama4'"),
    ("09_5d.py --published", "--published"),
    ("09_5d.py --ranks=4 --software=mine", "invalid choice: 'mine'"),
    ("09_5d.py --ranks=4 --cluster=mine", "invalid choice: 'mine'"),
])  # fmt: skip
def test_what_is_refused(capsys, flags, why):
    status, output, errors = command(capsys, *flags.split())
    assert (status, output, errors.count("\n")) == (2, "", 1) and why in errors, errors
