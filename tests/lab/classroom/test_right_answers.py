"""Answers that are right, and are not ours; and at home."""

import pytest
import torch
import torch.distributed as dist

from lab.classroom import checks, exercises, grading, holes
from tests.conftest import sample
from tests.faults import EXERCISES as TABLE
from tests.lab.classroom.two_exercises import (
    CHAPTER,
    ON_RANKS,
    SOLUTION,
    file_of,
)

pytestmark = pytest.mark.usefixtures("warm")

RIGHT = {
    "00.2 by another tree": {"broadcast": '''
    stride = 1 << max(net.ranks - 1, 0).bit_length()
    while stride > 1:
        stride //= 2
        place = net.rank % (2 * stride)
        if place == stride:
            net.exchange(receive=x, source=net.rank - stride)
        if place == 0 and net.rank + stride < net.ranks:
            net.exchange(send=x, to=net.rank + stride)
'''},
    "02.4 with an open helper": {"Bucket.__init__": '''
        super().__init__(module, group)
        self.buckets = fill_buckets(self.trained, capacity)
        self.flats = [torch.cat([torch.zeros(p.shape, dtype=p.dtype).flatten() for p in bucket])
                      for bucket in self.buckets]
        self.homes = {}
        for bucket, flat in zip(self.buckets, self.flats):
            for p, home in zip(bucket, flat.split([p.numel() for p in bucket])):
                self.homes[p] = home.reshape(p.shape)
''', "Bucket.move_in": '''
        raise NotImplementedError("02.4: Bucket")
''', "Bucket.gradient_is_ready": '''
        if p.grad.data_ptr() != self.homes[p].data_ptr():
            p.grad = self.homes[p].copy_(p.grad)
        super().gradient_is_ready(p)
''', "Bucket.payload": '''
        for p in self.buckets[i]:
            if p.grad is None:
                p.grad = self.homes[p].zero_()
        return self.flats[i]
'''},
}


CASES = [(name, runs) for runs in (False, True) for name in RIGHT]


def with_bodies(source, bodies):
    """The source with other bodies of these functions."""
    for name, body in bodies.items():
        node, lines = holes.find(holes.parsed(source), name), source.split("\n")
        head = holes.end_of_signature(lines, node)
        source = "\n".join([*lines[:head], *body.strip("\n").split("\n"),
                            *lines[node.end_lineno:]])
    return source


@pytest.mark.parametrize(("name", "runs"), sample(CASES))
def test_a_right_answer_of_another_kind_is_right(name, runs):
    """By its values; and by its runs, too."""
    chapter, exercise = TABLE[name.split()[0]]
    source = with_bodies(exercises.solution(chapter), RIGHT[name])
    assert source != exercises.solution(chapter)
    these = [check for check in exercise.checks if runs or not checks.is_run(check)]
    exercise = exercise._replace(checks=tuple(these))
    assert grading.grade_exercise(exercise, file_of(source, chapter)) == (grading.RIGHT, "")


# ------------------------------------------------------------------------------------- at home


@pytest.mark.full
def test_at_home_a_function_that_is_left_open_is_no_point(monkeypatch):
    """Although the first check only needs the other function."""
    text = holes.cut(SOLUTION, "SumOut.backward", "?", "04.2: SumOut.backward")
    forward = ON_RANKS.checks[0]._replace(
        expression="sum_alone(chapter)", words="SumOut, forward", module=__name__)
    both = ON_RANKS._replace(checks=(forward, *ON_RANKS.checks))
    known = {check.key: checks.answers(CHAPTER, SOLUTION, check) for check in both.checks}
    monkeypatch.setattr(checks, "stored", lambda: known)
    assert grading.grade_exercise(both, file_of(text)) == (
        grading.OPEN, "not begun: SumOut.backward")
    assert grading.grade_exercise(both, file_of(SOLUTION)) == (grading.RIGHT, "")


def sum_alone(chapter):
    return chapter.SumOut.apply(torch.ones(2), dist.group.WORLD)
