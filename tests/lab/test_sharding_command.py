"""python -m lab.sharding: the scaling book's notation is read, and written."""

import pytest

from common import Refused
from lab import sharding as command
from lab.typecheck import sharding


def lies(**cuts):
    return {"X": None, "Y": None} | cuts


@pytest.mark.parametrize("text", [
    "In[B_X, D_Y] W[D_XY, F] -> Out[B_X, F]", "In[B_X,D_Y]*W[D_XY,F]→Out[B_X,F]",
    "In[B_{X}, D_{Y}] ·_D W[D_{XY}, F] → Out[B_X, F]"])
def test_a_product_is_read_as_the_book_writes_it(text):
    asked = command.product(text)
    assert asked.names == {"A": "In", "B": "W", "C": "Out"} and asked.axes == ["X", "Y"]
    assert asked.dimensions == {"I": "B", "J": "D", "K": "F"}
    assert (asked.a, asked.b, asked.c) == (lies(X="I", Y="J"), lies(X="J", Y="J"), lies(X="I"))


@pytest.mark.parametrize(("text", "c"), [
    ("A[I_X, J] B[J, K_Y]", lies(X="I", Y="K")), ("A[I_XY, J] B[J, K_Y]", lies(X="I", Y="I")),
    ("A[I, J_X] B[J_X, K_Y]", lies(Y="K")), ("A[I, J_Y] B[J_X, K]", lies())])
def test_where_no_product_is_given_it_is_cut_as_its_rows_and_columns_are(text, c):
    assert command.product(text).c == c


def test_how_a_matrix_lies_is_written_as_it_is_read():
    asked = command.product("In[B_X, D_Y] W[D_XY, F]")
    shown = [command.written(asked, tensor, cuts) for tensor, cuts in (
        ("A", asked.a), ("dB", asked.b), ("C", lies(X=sharding.PARTIAL, Y="K")))]
    assert shown == ["In[B_X, D_Y]", "dW[D_XY, F]", "C[B, F_Y]{U_X}"]


@pytest.mark.parametrize(("text", "why"), [
    ("A[I_X, J]", "no product"), ("A[I_X, J_X] B[J, K]", "cuts A once"),
    ("A[I_YX, J] B[J, K]", "in their order"), ("A[I, J] B[L, K]", "the first of B"),
    ("A[I, J] B[J, I]", "names of their own"), ("A[I, J] B[J, K] -> C[K, I]", "are I and K"),
    ("A[I_X, J_Y] B[J, K_Z]", "more than 2 axes")])
def test_what_is_no_product_is_refused(text, why):
    with pytest.raises(Refused, match=why) as refused:
        command.product(text)
    command.product(refused.value.args[1])


def test_a_part_is_never_half_a_number(capsys):
    with pytest.raises(SystemExit):
        command.main(["A[I_X, J] B[J, K]", "--sizes=J=10,I=64"])
    assert "--sizes I=64,J=12,K=8192 would work" in capsys.readouterr().err


def test_zero_3_beside_tp_sends_what_the_book_lists(capsys):
    """Its algorithm of both: forward gathers over both axes, backward scatters over both."""
    command.main(["In[B_X, D_Y] W[D_X, F_Y]", "--mesh=X=16,Y=4", "--sizes=B=65536,F=32768"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[10:].split("  ")[0] for line in lines[3:10]] == [
        "all_gather In over Y", "all_gather W over X", "C[B_X, F_Y] = In[B_X, D] · W[D, F_Y]",
        "dIn[B_X, D]{U_Y} = dC[B_X, F_Y] · W[D, F_Y]ᵀ", "reduce_scatter dIn over Y",
        "dW[D, F_Y]{U_X} = In[B_X, D]ᵀ · dC[B_X, F_Y]", "reduce_scatter dW over X"]
    rows, weights = 2 * 65536 / 16 * 8192 * 3 / 4, 2 * 8192 * 32768 / 4 * 15 / 16
    assert lines[10] == f"in all a rank sends {2 * (rows + weights) / 1e6:.2f} MB"


def test_other_ways_say_what_they_repeat(capsys):
    command.main(["A[I, J_X] B[J, K]"])
    *_, others, first, rest = capsys.readouterr().out.splitlines()
    assert others == "other ways (1):" and first.startswith("  100.66 MB, and 4 ranks do each")
    assert "all_gather A over X; backward slice dA over" in first and rest.strip() == "X"
