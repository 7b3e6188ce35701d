"""The collectives that play: each round is the classroom's, and what is drawn of it adds up."""

import itertools
import json
import re

import pytest
import torch

from common import Refused
from lab.bench import collectives as bench
from lab.chapters import chapter
from lab.classroom import simulate
from lab.page import answers, collectives, tools
from lab.page.source import Source
from lab.page.typeset import typeset

NAMES = list(chapter("00").BY_HAND)
EVERY = [(name, n) for name in NAMES for n in range(2, 9)]
SUMS = "reduce", "reduce_scatter", "all_reduce_naive", "all_reduce_tree", "all_reduce_ring", \
    "all_reduce_doubling"


def told(name, n):
    return collectives.collective({"collective": name, "ranks": str(n)})


@pytest.mark.parametrize(("name", "n"), EVERY)
def test_what_was_sent_is_what_the_formulas_say(name, n):
    rounds, row, sent = (value for _, value, _, _ in told(name, n)["costs"])
    for _, played, _, by_formula in told(name, n)["costs"]:
        assert played == by_formula
    assert len(told(name, n)["rounds"]) == rounds and row > 0 and sent > 0


@pytest.mark.parametrize(("name", "n"), EVERY)
def test_the_messages_are_those_of_the_classroom(name, n):
    _, _, nets, passed = simulate.play(chapter("00").BY_HAND[name], [torch.zeros(4 * n)] * n)
    of_nets = bench.in_rounds([net.rounds for net in nets])
    played = [[(sender, receiver) for sender, receiver, *_ in messages]
              for messages in told(name, n)["rounds"]]
    assert passed == len(played)
    assert played == [[(sender, receiver) for sender, receiver, _ in messages]
                      for messages in of_nets]


@pytest.mark.parametrize(("name", "n"), EVERY)
def test_a_round_changes_what_its_messages_bring_and_nothing_else(name, n):
    """A sum has what was there and what came. all_reduce_naive adds up what it has beside x, which
    no message brings: on all ranks, and only rank 0 has gathered theirs."""
    answer = told(name, n)
    for before, after, messages in zip(answer["states"], answer["states"][1:], answer["rounds"]):
        expected = json.loads(json.dumps(before))
        for sender, receiver, carried, first, row, into in messages:
            if name != "barrier":
                source = before[sender][0][first:first + len(carried)]
                assert source == carried
            cells = expected[receiver][row]
            for at, cell in enumerate(carried, into):
                is_sum = name in SUMS and cells[at] and row == 0 and letters(cell).isdisjoint(
                    letters(cells[at])) and after[receiver][row][at] != cell
                cells[at] = added(cells[at], cell) if is_sum else cell or cells[at]
        for rows, should in zip(after, expected, strict=True):
            if name == "all_reduce_naive" and rows != should:       # this rank adds up, beside x
                should[0] = ["".join(should[1]) if len(should) > 1 else n * should[0][0]]
            assert rows == should


def letters(cell):
    return {*re.sub(r"\d", "", cell)}


def added(one, other):
    return "".join(sorted(letters(one) | letters(other))) + re.sub(r"\D", "", one)


@pytest.mark.parametrize(("name", "n"), EVERY)
def test_in_the_end_each_rank_has_what_the_lesson_says(name, n):
    answer, everyone = told(name, n), "abcdefgh"[:n]
    parts, own = answer["parts"], range(n)
    index = [str(part) * (parts > 1) for part in range(parts)]
    sums = [everyone + part for part in index]
    owns = [everyone[part] + index[part] for part in own] if parts == n else None
    right = {
        "broadcast": lambda rank: ["a"],
        "reduce": lambda rank: sums if rank == 0 else [],
        "scatter": lambda rank: [f"a{rank}"],
        "gather": lambda rank: owns if rank == 0 else [],
        "all_gather": lambda rank: owns,
        "reduce_scatter": lambda rank: [sums[rank]],
        "all_to_all": lambda rank: [f"{letter}{rank}" for letter in everyone],
        "barrier": lambda rank: [*everyone]}
    for rank, (row, begin, end) in enumerate(answer["gives"]):
        has = answer["states"][-1][rank][row][begin:end]
        assert has == right.get(name, lambda rank: sums)(rank)


def test_the_formulas_are_the_lessons():
    """As written there; and their values, for powers of 2, are the chapter's functions'. In the
    lesson, the products of halving and doubling are told in another line."""
    lesson = " ".join(chapter("00").__doc__.split())
    for name in NAMES:
        rounds, row, sent = collectives.FORMULAS[name]
        if name != "barrier":
            assert f"{rounds} rounds" in lesson or f" {rounds} " in lesson
            assert row in lesson
        for n in (2, 4, 8, 64):
            size = 1 if name == "barrier" else 1024 * n
            by_chapter = chapter("00").round_bytes(name, n, size)
            assert value(rounds, n, size) == len(by_chapter)
            assert value(row, n, size) == pytest.approx(sum(by_chapter))
            assert value(sent, n, size) == chapter("00").sent(name, n, size)
    for n in (3, 5, 6, 7, 12):
        size = 2**10 * n
        by_chapter = chapter("00").round_bytes("all_reduce_doubling", n, size)
        rounds, row, sent = (value(formula, n, size) for formula in collectives.BEYOND)
        assert rounds == len(by_chapter) and row == pytest.approx(sum(by_chapter), rel=1e-3)
        assert sent == chapter("00").sent("all_reduce_doubling", n, size)


def value(formula, n, size):
    power = 2 ** (n.bit_length() - 1)
    words = re.sub(r"log2 (\w)", r"log\1", formula)
    words = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", words)
    return eval(words, {"N": n, "S": size, "P": power, "logN": (n - 1).bit_length(),
                        "logP": power.bit_length() - 1})


def test_seconds_are_the_chapters():
    answer = told("all_reduce_tree", 8)
    machine, latency, bandwidth = answer["machine"]
    assert machine == collectives.MACHINE
    for size, seconds in answer["takes"]:
        assert seconds == pytest.approx(6 * (latency + size / bandwidth))


def test_each_is_told_in_the_chapters_words():
    for name in NAMES:
        says = told(name, 4)["says"]
        assert says == collectives.WORDS.get(name) or says in " ".join(
            chapter("00").BY_HAND[name].__doc__.split())


def test_all_are_among_the_examples_and_small():
    examples = [asked for name, asked in answers.examples_but_plans() if name == "collective"]
    assert sorted((one["collective"], one["ranks"]) for one in examples) == sorted(
        (name, str(n)) for name, n in itertools.product(NAMES, range(2, 9)))
    assert max(len(json.dumps(told(name, 8))) for name in NAMES) < 20_000


def test_the_script_offers_as_many_ranks():
    least, most = collectives.RANKS
    assert f"upTo({most}, {least})" in (tools.FILES / "collectives.js").read_text()


@pytest.mark.parametrize(("asked", "says"), [
    ({"collective": "sort"}, "collective = 'sort' is none of broadcast, reduce"),
    ({"ranks": "1"}, "ranks = '1' is no whole number from 2 to 8"), ({"ranks": "9"}, "from 2 to 8"),
    ({"n": "4"}, "no parameter 'n'")])
def test_what_it_refuses(asked, says):
    with pytest.raises(Refused, match=says):
        collectives.collective(asked)


def test_it_plays_behind_the_table_that_its_paragraph_introduces():
    """In lesson 00; and what no block follows is not lost."""
    source, table = Source("", "00_collectives.html"), "\n\n    one   two\n    1     2\n\nMore."
    for first, order in ("Look, here:", "here two PLAYS More"), ("Look.", "Look PLAYS two More"):
        html = str(typeset(first + table, source, {"Look": "PLAYS"}))
        places = [html.index(word) for word in order.split()]
        assert places == sorted(places)
    for text in "Look, here:", "Look, here:\n\nMore.":
        assert str(typeset(text, source, {"Look": "PLAYS"})).count("PLAYS") == 1
