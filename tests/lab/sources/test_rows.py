"""Each number of the five texts is ours, or the row says why not."""

import pytest

from lab import questions
from lab.sources import SOURCES, lecture, megatron, playbook, scaling_book, tutorial

MODULES = {"000": playbook, "001": scaling_book, "002": megatron, "003": lecture, "004": tutorial}


@pytest.mark.parametrize("number", MODULES)
def test_a_row_agrees_or_says_why_not(number):
    wrong = []
    for row in MODULES[number].ROWS:
        value = row.ours()
        if row.agrees(value) == bool(row.why):          # a reason that nobody needs is wrong, too
            wrong.append(f"{row.where}, {row.what}: told {row.told}, ours {value}")
        first, *_ = lines = "\n".join(questions.of_row(row, value)).splitlines()
        if max(map(len, lines)) > questions.WIDTH or {first[57], first[75]} != {" "}:
            wrong.append(f"{row.where}, {row.what} does not fit its columns: {first}")
    assert not wrong


def test_every_source_has_its_module():
    assert {source.number: source.name for source in SOURCES} == {
        number: module.__name__.rpartition(".")[2] for number, module in MODULES.items()}


def test_what_is_left_out_is_short():
    assert sum(len(module.LEFT_OUT) for module in MODULES.values()) <= 10
