"""Values of students' functions: how they come back, what is equal, and what is said if not."""

import io
from typing import NamedTuple

import pytest
import torch

from common import PRESETS
from lab.classroom import values
from lab.classroom.compare import compare
from lab.classroom.values import simplified


class Pair(NamedTuple):
    first: object
    second: object


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, ROWS = random(6, 8), torch.arange(1.0, 7, dtype=torch.float64)[:, None]
MINUS_INF = torch.where(ROWS > 1, X, -torch.inf)


def test_what_is_equal():
    for value in (float("nan"), "ring", (1, [2.0, None]), {"sent": (1, 2.0)}, PRESETS["tiny"],
                  Pair(1, X), MINUS_INF, torch.empty(0, 3)):
        assert compare(simplified(value), simplified(value)) is None, value
    for found, right in [
            (6, 6.0), ([1, 2], (1, 2)), (1 / 3, 1 / 3 + 1e-12), (X + 1e-11, X),
            (X.float(), (X + 1e-6).float()), ((1, X), Pair(1, X))]:
        assert compare(simplified(found), simplified(right)) is None, (found, right)


@pytest.mark.parametrize(("found", "right", "says"), [
    (12, 16, "is 12, and should be 16: it is 3/4 of what"),
    ((1, 3), Pair(1, 2), "second is 3, and should be 2"),  # found without names
    (2.0, X, "should be a tensor of shape (6, 8)"),
    ((1, 2), (1, 2, 3), "has 2 items, and should have 3"),
    ({"sent": 1}, {"kept": 1}, "lacks kept; the result should not have sent"),
    ([0 * ROWS, torch.where(ROWS == 2, 0, ROWS)] * 2, [ROWS] * 4, "item 0 and item 2: each is "
     "zero; item 1 and item 3: each is wrong in [1] and right elsewhere: there it is zero"),
    (list(range(9)), [0] * 9, "and so on, 8 in all"),
    (2 * MINUS_INF, MINUS_INF, "wrong in [1:] and right elsewhere: there it is 2 times"),
    (X[:, :6].t(), X[:, :6], "dimensions 0 and 1, which are swapped"),
])
def test_what_is_not_equal(found, right, says):
    assert says in compare(simplified(found), simplified(right))


@pytest.mark.parametrize(("found", "says"), [
    (2 * X, "is 2 times what it should be"), (-X, "has the opposite sign"), (0 * X, "is zero"),
    (X * 8**0.5, "2.83 is the square root of 8, which is the length of dimension 1"),
    ((ROWS + 1) * X, "every row multiplied by a number of its own, 2 to 7"),
    (X.t(), "has shape (8, 6), and should have (6, 8)"),
    (X.float(), "is in torch.float32, and should be in torch.float64"),
    (X.masked_fill(X > 1, torch.inf), "infinite in 7 of 48 numbers"),
    (X + 0.01 * random(6, 8, seed=1), "differs by up to 0.016 times the largest number"),
])
def test_tensors(found, says):
    assert says in compare(found, X)


def test_no_cause_is_told_that_may_be_chance():
    """6 is the length of dimension 0, and the number of many other things; noise has no factor."""
    assert compare(X / 6, X) == "the result is 0.167 times what it should be"
    noise = (X * ROWS * X[:1] + 1e-3 * random(6, 8, seed=2)).float()
    assert "differs by up to 4.5" in compare(noise, X.float())


# ------------------------------------------------------------- values between processes

def test_values_come_back_as_they_are():
    x = torch.randn(3, 4, dtype=torch.float64)
    tensors = [x, x.t(), torch.tensor(7), torch.zeros(0, 2), torch.tensor([True, False]),
               x[0].bfloat16()]
    value = {"a": [1, 2.5, None, True, "x", float("inf"), torch.bfloat16, slice(1, None)],
             3: tensors}
    found = values.unpack(values.pack(value))
    assert found.keys() == value.keys()
    assert found["a"] == [*value["a"][:-1], "slice(1, None, None)"]
    for mine, theirs in zip(found[3], tensors, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert values.unpack(values.pack([range(3), x.sum().numpy()[()]])) == [
        [0, 1, 2], x.sum().item()]
    [record, other] = values.unpack(values.pack([Pair(1, 2), {1, 2}]))
    assert record == {"first": 1, "second": 2} and other == "{1, 2}"


class Harmful:
    def __reduce__(self):
        return print, ("this was run",)


def test_what_nobody_has_packed_is_unreadable(capsys):
    """And nothing of it is run."""
    file = io.BytesIO()
    torch.save(Harmful(), file)
    for data in (b"", b"x", b"[" * 10**6, values.pack([X])[:-50], file.getvalue()):
        with pytest.raises(values.Unreadable):
            values.unpack(data)
    assert "this was run" not in capsys.readouterr().out
