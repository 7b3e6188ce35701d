"""The collectives that play: each round is the classroom's, and what is drawn of it adds up."""

import re

import pytest
import torch

from lab.chapters import chapter, held, room
from lab.site import collectives
from tests.conftest import sample

NAMES = list(chapter("00").BY_HAND)
EVERY = [(name, n) for n in sample([5, 4, 2, 3, 6, 7, 8], 2) for name in NAMES]


def test_rounds_and_bytes_are_those_of_the_classroom_and_of_the_formulas():
    for name, n in EVERY:
        answer = collectives.collective(name, n)
        function, tensors = chapter("00").BY_HAND[name], [torch.zeros(4 * n)] * n
        _, _, nets, passed = room("00", "simulate").play(function, tensors)
        expected = [[(sender, receiver) for sender, receiver, _ in messages]
                    for messages in held("00").in_rounds([net.rounds for net in nets])]
        played = [[(sender, receiver) for sender, receiver, *_ in messages]
                  for messages in answer["rounds"]]
        assert played == expected and passed == len(played), (name, n)
        for what, counted, _, by_formula in answer["costs"]:
            assert counted == by_formula > 0, (name, n, what)
        assert answer["costs"][0][1] == passed


def test_a_message_carries_what_its_sender_has_and_changes_its_receiver_alone():
    for name, n in EVERY:
        answer = collectives.collective(name, n)
        for before, after, messages in zip(answer["states"], answer["states"][1:],
                                           answer["rounds"]):
            for sender, _, carried, first, _, _ in messages:
                has = before[sender][0][first:first + len(carried)]
                assert has == carried or name == "barrier", (name, n)
            receivers = {receiver for _, receiver, *_ in messages}
            for rank in {*range(n)} - receivers:  # a naive all_reduce ends with a sum on all ranks
                assert after[rank] == before[rank] or name == "all_reduce_naive", (name, n)


def test_in_the_end_each_rank_has_what_the_collective_gives():
    for name, n in EVERY:
        answer, everyone = collectives.collective(name, n), "abcdefgh"[:n]
        index = [str(part) * (answer["parts"] > 1) for part in range(answer["parts"])]
        sums = [everyone + part for part in index]
        owns = [letter + part for letter, part in zip(everyone, index)]
        none = [[] for _ in range(n - 1)]
        right = {
            "broadcast": [["a"]] * n, "reduce": [sums, *none], "gather": [owns, *none],
            "scatter": [[f"a{rank}"] for rank in range(n)], "all_gather": [owns] * n,
            "reduce_scatter": [[part] for part in sums],
            "all_to_all": [[f"{letter}{rank}" for letter in everyone] for rank in range(n)],
            "barrier": [[*everyone]] * n}.get(name, [sums] * n)
        has = [answer["states"][-1][rank][row][begin:end]
               for rank, (row, begin, end) in enumerate(answer["gives"])]
        assert has == right, (name, n)


def test_the_values_of_the_formulas_are_the_chapters():
    every = [(name, collectives.FORMULAS[name], (2, 4, 8, 64)) for name in NAMES]
    for name, formulas, counts in [
            *every, ("all_reduce_doubling", collectives.BEYOND, (3, 5, 6, 7, 12))]:
        for n in counts:
            size = 1 if name == "barrier" else 1024 * n
            by_chapter = chapter("00").round_bytes(name, n, size)
            rounds, row, sent = (value(formula, n, size) for formula in formulas)
            assert rounds == len(by_chapter) and row == pytest.approx(sum(by_chapter), rel=1e-3)
            assert sent == chapter("00").sent(name, n, size), (name, n)


def value(formula, n, size):
    """Of a formula as it's shown: "2 S (N-1)/N"."""
    power = 2 ** (n.bit_length() - 1)
    words = re.sub(r"log2 (\w)", r"log\1", formula)
    words = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", words)
    return eval(words, {"N": n, "S": size, "P": power, "logN": (n - 1).bit_length(),
                        "logP": power.bit_length() - 1})
