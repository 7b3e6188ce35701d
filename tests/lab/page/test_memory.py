"""What a rank keeps under ZeRO, as the page is told it."""

import json

import pytest

from lab.page import memory, server, tools
from tests.conftest import chapter


def kept_in(told, stage):
    return next(one for one in told["stages"] if one["name"] == stage)


def test_the_bytes_of_the_lesson():
    """Of 7 billion parameters in fp32: 112 GB, on 8 ranks 63, 38.5 and 14."""
    told = memory.memory({"billions": "7", "ranks": "8"})
    assert sum(told["whole"]) == 112e9
    assert [sum(one["kept"]) for one in told["stages"]] == [112e9, 63e9, 38.5e9, 14e9]
    lesson = chapter("03_zero").__doc__
    assert all(words in lesson for words in ("112 GB", "63 GB (zero1)", "38.5 GB (zero2)",
                                             "14 GB (zero3)"))


@pytest.mark.parametrize("precision", memory.PRECISIONS)
def test_they_are_the_chapters(precision):
    held, stages = chapter("03_zero").held, chapter("03_zero").STAGES
    told = memory.memory({"billions": "0.5", "ranks": "6", "precision": precision})
    assert told["whole"] == held(5e8, 1, 1, precision)
    for one in told["stages"]:
        assert one["kept"] == (held(5e8, stages[one["name"]], 6, precision)
                               if one["name"] in stages else told["whole"])


def test_the_fewest_ranks_that_fit():
    for billions in (7, 70, 1000):
        told = memory.memory({"billions": str(billions), "ranks": "1"})
        for stage, (cluster, room) in ((stage, one) for stage in memory.STAGES
                                       for one in told["rooms"].items()):
            n = kept_in(told, stage)["least"][cluster]
            last = n or memory.RANKS
            bytes_on = {ranks: sum(memory.kept(billions * 1e9, stage, ranks, "fp32"))
                        for ranks in (last - 1, last) if ranks}
            assert (bytes_on[last] <= room) == (n is not None)
            assert last == 1 or bytes_on[last - 1] > room
    assert kept_in(memory.memory({}), "zero1")["least"]["h100"] == 3      # 56 + 56/3 GB
    assert kept_in(memory.memory({}), "02")["least"]["h100"] is None


def test_what_the_page_asks_first_is_among_the_stored_answers():
    first = tools.asked_first("memory", tools.TOOLS["memory"].begins)
    assert ("memory", first) in list(memory.examples())


def test_the_script_offers_what_is_stored():
    script = (tools.FILES / "memory.js").read_text()
    for name, values in (("const STAGES =", memory.STAGES), ("billions:", memory.BILLIONS),
                         ("precision:", memory.PRECISIONS)):
        assert f"{name} {json.dumps(values)}" in script
    assert f"ranks: powers({memory.RANKS})" in script and f"up to {memory.RANKS:,}." in script


@pytest.mark.parametrize(("question", "line"), [
    ("memory?ranks=0", "ranks = '0' is no whole number from 1 to 4096"),
    ("memory?billions=x", "billions = 'x' is no number"),
    ("memory?billions=nan", "billions = 'nan' is no number"),
    ("memory?precision=fp8", "precision = 'fp8' is none of fp32, bf16"),
    ("memory?stage=zero1", "there is no parameter 'stage'")])
def test_a_bad_question_costs_one_line(question, line):
    status, told = server.answer(*question.split("?"))
    assert status == 400 and told["error"].startswith(line)
