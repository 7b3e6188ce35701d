"""lab/classroom/compare.py: what is equal, and what is said of what is not."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from common import PRESETS
from lab.classroom.compare import compare, neighbours


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Sizes:
    rows: int
    columns: int


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, ROWS = random(6, 8), torch.arange(1.0, 7, dtype=torch.float64)[:, None]
MINUS_INF = torch.where(ROWS > 1, X, -torch.inf)


@pytest.mark.parametrize("value", [
    3, 2.5, float("nan"), True, None, "ring", (1, [2.0, None]), {"sent": (1, 2.0)}, slice(2, 4),
    torch.float32, PRESETS["tiny"], Pair(1, X), Sizes(1, 2), X, X.float(), X > 0, torch.arange(4),
    MINUS_INF, torch.tensor(2.0), torch.empty(0, 3), torch.Size([2, 3])])
def test_what_is_equal(value):
    assert compare(value, value) is None


@pytest.mark.parametrize(("found", "right"), [
    (6, 6.0), ([1, 2], (1, 2)), (1 / 3, 1 / 3 + 1e-12), (X + 1e-11, X),
    (Sizes(1, 2.0), Sizes(1, 2)), (X.float(), (X + 1e-6).float()),
    (torch.tensor(1.0), torch.tensor(1.000001)), (range(3), [0, 1, 2]),
    (float("inf"), float("inf")), ((1, X), Pair(1, X))])
def test_what_is_equal_though_not_the_same(found, right):
    assert compare(found, right) is None


@pytest.mark.parametrize(("found", "right", "says"), [
    (12, 16, "the result is 12, and should be 16: it is 3/4 of what"),
    (2**40 + 1, 2**40, "the result is 1,099,511,627,777, and should be 1,099,511,627,776: "
                       "one too many"),
    (4.0, 0.5, "is 4, and should be 0.5: it is 8 times what"),
    (-2.0, 2.0, "the sign is the opposite one"),
    (float("nan"), 1.0, "is nan, and should be 1"),
    (1, True, "is 1, and should be True"),
    ((1, 3), Pair(1, 2), "second is 3, and should be 2: one too many"),  # found without names
    (Pair(1, 3), (1, 2), "item 1 is 3, and should be 2"),
    (None, 2, "is None, and should be 2"),
    ("ring", None, "is 'ring', and should be None"),
    (2.0, X, "is 2.0, and should be a tensor of shape (6, 8)"),
    (torch.tensor(3.0), torch.tensor(2.0), "is 3, and should be 2: it is 3/2 of what"),
    ((1, 2), (1, 2, 3), "has 2 items, and should have 3"),
    ((1, 5), (1, 2), "item 1 is 5, and should be 2: it is 5/2 of what it should be; all else "
     "is right"),
    (Pair(1, 2), Pair(1, 3), "second is 2, and should be 3"),
    (Sizes(1, 2), Sizes(1, 3), "columns is 2, and should be 3"),
    ({"sent": (4, 8)}, {"sent": (4, 16)}, "sent[1] is 8, and should be 16"),
    ({"sent": 1}, {"kept": 1}, "lacks kept; the result should not have sent"),
    ({"sent": 1}, (1,), "is a dict of 1, and should be a tuple of 1"),
    ((2 * X, 2 * X, X), (X, X, X), "item 0 and item 1 are 2 times what they should be; all else"),
    (list(range(9)), [0] * 9, "and so on, 8 in all"),
])
def test_numbers_and_what_holds_them(found, right, says):
    assert says in compare(found, right)


def test_no_cause_is_told_of_a_ratio_that_any_tensor_could_have():
    """6 is the length of dimension 0, and the number of many other things."""
    assert compare(X / 6, X) == "the result is 0.167 times what it should be"


@pytest.mark.parametrize(("found", "says"), [
    (2 * X, "is 2 times what it should be"),
    (X * 8**0.5, "is 2.83 times what it should be: 2.83 is the square root of 8, which is the "
                 "length of dimension 1"),
    (X * 1.4426950408889634, "1.44 is log2(e)"),
    (X * 1.001, "is 1.001 times"),
    (-X, "has the opposite sign"),
    (0 * X, "is zero"),
    (torch.where(ROWS > 4, torch.nan, X), "wrong in [4:] and right elsewhere: there it is nan"),
    (torch.where(ROWS == 3, 0, X), "wrong in [2] and right elsewhere: there it is zero"),
    (torch.where(ROWS % 2 == 1, 3 * X, X), "wrong in [::2] and right elsewhere: there it is 3"),
    (torch.where((ROWS == 1) | (ROWS == 2) | (ROWS == 5), -X, X), "wrong in [[0, 1, 4]]"),
    (torch.cat([X[:, :3], X[:, 3:5] + 1, X[:, 5:]], 1), "[:, 3:5] and right elsewhere: there it "
                                                        "has 1 added to every number"),
    ((ROWS + 1) * X, "every row multiplied by a number of its own, 2 to 7"),
    (ROWS + X, "a number of its own added to every row"),
    (X[:1] * X, "every column multiplied by a number of its own"),
    (X + X[:1], "a number of its own added to every column"),
    (X.flip(1), "in reverse along dimension 1"),
    (X.roll(2, 0), "shifted by 2 along dimension 0"),
    (X.t(), "has shape (8, 6), and should have (6, 8): it is right but for dimensions 0 and 1"),
    (X[:, :4], "has shape (6, 4), and should have (6, 8)"),
    (X.float(), "is in torch.float32, and should be in torch.float64"),
    (X.masked_fill(X > 1, torch.inf), "the result is infinite in 7 of 48 numbers"),
    (torch.where(X > 0, X, X / 0.7), "the result is 1.43 times what it should be in 28 of 48"),
    (X + 0.01 * random(6, 8, seed=1), "differs by up to 0.016 times the largest number"),
])
def test_tensors(found, says):
    assert says in compare(found, X)


def test_a_square_one_may_be_transposed():
    assert "dimensions 0 and 1, which are swapped" in compare(X[:, :6].t(), X[:, :6])
    assert "dimensions 1 and 2" in compare(X.view(3, 4, 4).mT, X.view(3, 4, 4))


def test_one_dimension_and_one_row():
    x = X[0]
    assert "is 2 times" in compare(2 * x, x) and "added to every number" in compare(x + 1, x)
    assert "wrong in [4:] and right elsewhere: there it is zero" in \
        compare(torch.cat([x[:4], 0 * x[4:]]), x)
    assert "wrong in [:, 4:]" in compare(torch.cat([x[:4], 0 * x[4:]])[None], x[None])
    assert "differs by" in compare(X[1], x) and "differs by" in compare(X[1:2], x[None])


def test_what_is_said_of_several_is_said_once():
    assert compare([0 * ROWS, torch.where(ROWS == 2, 0, ROWS)] * 2, [ROWS] * 4) == (
        "item 0 and item 2 are zero; item 1 and item 3 are wrong in [1] and right elsewhere: "
        "there they are zero")
    assert "item 0 and item 1 are 5 times what they should be; all" in \
        compare([5 * X, 5 * X, X], [X] * 3)
    noise = X + random(6, 8, seed=1)
    assert compare([noise, noise], [X, X]).startswith("item 0 and item 1 differ by up to")


def test_integers_masks_and_rows_without_a_number():
    assert compare(torch.tensor([0, 2]), torch.tensor([0, 1])) == \
        "the result is [0, 2], and should be [0, 1]"
    assert "wrong in [3] and right elsewhere: there it differs" in \
        compare((X > 0) ^ (ROWS == 4), X > 0)
    assert "wrong in [1:] and right elsewhere: there it is 2 times" in \
        compare(2 * MINUS_INF, MINUS_INF)
    assert "wrong in [0] and right elsewhere" in compare(MINUS_INF.nan_to_num(), MINUS_INF)


def test_rounding_says_nothing_about_a_factor():
    """Noise of float32 around a wrong result that no single number explains."""
    noise = (X * ROWS * X[:1] + 1e-3 * random(6, 8, seed=2)).float()
    assert "differs by up to 4.5" in compare(noise, X.float())


@pytest.mark.parametrize(("shift", "says"), [
    (0, {None}), (1, {"dx is what the next rank should have; all else is right"}),
    (3, {"dx is what the rank before it should have; all else is right"}),
    (2, {f"dx is what rank {rank} should have; all else is right" for rank in range(4)})])
def test_what_another_rank_should_have_is_recognised(shift, says):
    values = [{"dx": x, "ranks": 4} for x in random(4, 2, 3)]
    said = {compare(values[(rank + shift) % 4], values[rank], neighbours(values, rank))
            for rank in range(4)}
    assert said == says


def test_a_number_is_no_other_ranks():
    values = [torch.tensor(1.0), torch.tensor(3.0)]
    assert "should have" not in compare(values[1], values[0], neighbours(values, 0))
    assert neighbours(values, 0) == [("the other rank", values[1])]
