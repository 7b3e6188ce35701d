"""lab.rehearse beside the planner."""


import pytest

from lab import rehearse
from lab.rehearsal import rehearsal
from tests.conftest import SMALL, TEXT, chapter, sample

BF16 = ["--precision=bf16", "--attention=sdpa", "--batch=8"]


@pytest.fixture(scope="module", autouse=True)
def nine():
    chapter("09_5d")  # or skip


def runs(*flags):
    """The Run of the first rank of each stage."""
    argv = ["09_5d.py", "--ranks=8", *SMALL, f"--data={TEXT}", *BF16, *flags]
    module, args = rehearse.accepted(argv)
    places, found = module.places_of_ranks(args), []
    for stage in range(args.pp):
        args.rank = [place.pp for place in places].index(stage)
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
    assert first.recorded["activations"] == max(kept for *_, kept in first.spans)
