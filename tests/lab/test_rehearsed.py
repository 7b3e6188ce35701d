"""lab.rehearse: published runs and the planner, all stages, memory over a step."""

import json

import pytest

from lab import chapters, rehearse
from lab.rehearsal import planned, rehearsal, rehearsed
from tests.conftest import SMALL, TEXT, chapter, sample

BF16 = ["--precision=bf16", "--attention=sdpa", "--batch=8"]


@pytest.fixture(scope="module", autouse=True)
def nine():
    chapter("09_5d")  # or skip


def runs(*flags):
    """The Run of each stage."""
    argv = ["09_5d.py", "--ranks=8", *SMALL, f"--data={TEXT}", *BF16, *flags]
    module, args = rehearse.accepted([*argv, "--all-stages"])
    found = []
    for rank in rehearse.ranks_of(module, args):
        args.rank = rank
        found.append(rehearsal.rehearse(module, args))
    return found


@pytest.mark.parametrize("flags", sample([
    "--pp=2 --tp=2 --zero=1 --batch=4 --vocab=128",
    "--pp=2 --tp=2 --zero=2 --schedule=interleaved --layers=4",
    "--pp=4 --cp=2 --layers=8",
    "--pp=4 --tp=2 --block=llama --kv-heads=2 --zero=3 --layers=8",
    "--pp=4 --tp=2 --attention=plain --layers=8"]))
def test_the_planner_says_the_same_of_the_fullest_stage(flags):
    """To the byte, except for the norm before the head (the first stage has none), the step count
    of each tensor, and those activations that it leaves out."""
    stages = runs(*flags.split())
    first = stages[0]
    columns = [run.recorded["planner"] for run in stages]
    most = {what: max(column[what][0] for column in columns) for what in columns[0]}
    expected = {what: planned for what, (_, planned) in columns[0].items()}
    if "zero=3" not in flags:  # the planner has two layers as a whole
        assert most["parameters"] == expected["parameters"]
    assert most["gradients"] == pytest.approx(expected["gradients"], abs=2 * 4 * 32)
    assert 0 < most["optimizer states"] - expected["optimizer states"] < 4 * 100
    sent = [what for what in most if what.startswith("sent")]
    assert sent and all(most[what] == expected[what] > 0 for what in sent)
    off = columns[0]["activations"][0] - expected["activations"]
    assert off == first.recorded["left_out"] > 0
    assert first.recorded["activations"] == max(kept for *_, kept, _ in first.spans)


@pytest.mark.full
def test_what_other_software_frees_is_counted():
    run, *_ = runs("--pp=2", "--tp=2", "--block=llama", "--software=llama3", "--batch=4")
    plan, ten = planned.plan_of(run.args, 8), chapters.chapter("10")
    llama = ten.SOFTWARE["llama3"]
    freed = {name: size for name, _, size in planned.freed(plan, llama)}
    assert set(freed) == {"swiglu_kept", "keeps_gathered", "whole_tables"}
    model, layout, *_ = plan.asked
    theirs = ten.memory(model, layout, llama, run.args.micro_batches)
    assert plan.bytes - sum(freed.values()) == sum(theirs.values())
    assert "llama3" in "\n".join(run.told())


@pytest.mark.full
def test_all_stages_are_told_and_drawn(capsys, tmp_path):
    path, picture = tmp_path / "new/run.json", tmp_path / "newer/memory.png"
    assert rehearse.main([
        "09_5d.py", "--ranks=4", "--rank=3", *SMALL, f"--data={TEXT}", *BF16, "--pp=2", "--tp=2",
        "--batch=2", "--all-stages", f"--json={path}", f"--plot={picture}"]) == 0
    assert "all that is alive" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["rank"] == 3 and [stage["rank"] for stage in record["stages"]] == [1, 3]
    for stage in record["stages"]:
        at, *sizes = stage["recorded"]["over_time"]
        assert max(map(sum, zip(*sizes))) == sum(stage["recorded"]["peak"].values())
        top = max(zip(*sizes), key=sum)
        assert {name: size for name, size in zip(rehearsed.CLASSES, top) if size} == {
            name: size for name, size in stage["recorded"]["peak"].items() if size}
        assert at == sorted(at) and min(map(min, sizes)) >= 0
    assert picture.stat().st_size > 20_000 and len(rehearsed.draw(record["stages"]).axes) == 2
