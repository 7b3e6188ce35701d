"""Answers that are right, and are not ours: in other words, other structures, other attributes."""

import pytest

from lab.classroom import checks, exercises, grading, holes
from lab.classroom.exercise import Run
from tests.lab.classroom.test_grade import TABLE, file_of

RIGHT = {
    "00.2 in a loop": {"broadcast": '''
    have = 1
    while have < net.ranks:
        if have <= net.rank < have + have:
            net.exchange(receive=x, source=net.rank - have)
        elif net.rank + have in range(have, min(have + have, net.ranks)):
            net.exchange(x, net.rank + have)
        have *= 2
'''},
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
    "01.4 with a count of its own": {"LossScale.__init__": '''
        self.value, self.patience, self.good = value, patience, 0
        self.left = patience
''', "LossScale.update": '''
        self.left = self.patience if overflow else self.left - 1
        self.value *= 0.5 if overflow else 1
        if self.left == 0:
            self.value, self.left = 2 * self.value, self.patience
'''},
    "02.4 in one tensor for all": {"Bucket.__init__": '''
        super().__init__(module, group)
        self.buckets, at = fill_buckets(self.trained, capacity), 0
        self.everything = torch.zeros(sum(p.numel() for p in self.trained),
                                      dtype=self.trained[0].dtype)
        self.begin = {}
        for bucket in self.buckets:
            for p in bucket:
                self.begin[p] = at
                at += p.numel()
''', "Bucket.move_in": '''
        home = self.everything.narrow(0, self.begin[p], p.numel()).reshape(p.shape)
        if p.grad is None:
            home.fill_(0)
        elif p.grad.data_ptr() != home.data_ptr():
            home[...] = p.grad
        p.grad = home
''', "Bucket.gradient_is_ready": '''
        self.move_in(p)
        Overlap.gradient_is_ready(self, p)
''', "Bucket.payload": '''
        [self.move_in(p) for p in self.buckets[i]]
        first, last = self.buckets[i][0], self.buckets[i][-1]
        return self.everything[self.begin[first] : self.begin[last] + last.numel()]
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
        pass
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


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


def written(chapter, bodies):
    """The chapter with other bodies of these functions."""
    source = exercises.solution(chapter)
    for name, body in bodies.items():
        node, lines = holes.find(holes.parsed(source), name), source.split("\n")
        first = node.lineno - 1
        head = holes.end_of_signature(lines, node)[0]
        source = "\n".join([*lines[:first], *lines[first:head], *body.strip("\n").split("\n"),
                            *lines[node.end_lineno:]])
    return source


def graded(name, alone):
    number = name.split()[0]
    chapter, exercise = TABLE[number]
    source = written(chapter, RIGHT[name])
    if alone:
        these = tuple(check for check in exercise.checks if not isinstance(check, Run))
        exercise = exercise._replace(checks=these)
    return grading.grade_exercise(exercise, file_of(source, chapter))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_of_another_kind_is_right(name):
    """By values; with the runs, in the full tests."""
    assert graded(name, alone=True) == (grading.RIGHT, "")


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_and_by_the_runs(name):
    assert graded(name, alone=False) == (grading.RIGHT, "")


def test_each_is_another_answer():
    for name, bodies in RIGHT.items():
        chapter, _ = TABLE[name.split()[0]]
        for function in bodies:
            ours, theirs = (holes.find(holes.parsed(text), function) for text in (
                exercises.solution(chapter), written(chapter, bodies)))
            assert holes.ast.dump(ours) != holes.ast.dump(theirs), name
