"""Chapter 09 with packed documents: who has which, one GPU's numbers, and faults that are seen."""

import pytest
import torch

import common
from tests.chapters.test_04_tensor_parallel import TRAINING, covered
from tests.conftest import chapter, hold_to_one_gpu, run_main

NINE = "09_5d"
PACKED = (*TRAINING, "--dtype=float64", "--layers=2", "--dim=16", "--heads=8",
          "--kv-heads=4", "--seq=16", "--micro-batch=1", "--clip=0.1")  # fmt: skip


@pytest.fixture(scope="module")
def nine():
    return chapter(NINE)


def test_tokens_of_a_rank_are_a_zigzag_in_runs(nine):
    """Of documents of 3, 2 and 3 tokens; a rank alone has them all."""
    starts = torch.tensor([0, 0, 0, 3, 3, 5, 5, 5])
    found = [[run.tolist() for run in nine.runs_of(rank, 2, starts)] for rank in (0, 1)]
    assert found == [[[0, 1], [6, 7]], [[2], [3], [4], [5]]]
    assert [run.tolist() for run in nine.runs_of(0, 1, starts)] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    rope, blocks = common.Rope(nine.Mixture(1, 8, 2, 2, 8, 9)), []
    assert nine.lay_out(starts, rope, blocks, 1, 2).tolist() == [2, 3, 4, 5]
    assert rope.positions.tolist() == [2, 0, 1, 0]
    assert blocks == [(1, 0, 3), (1, 3, 4), (1, 3, 5), (1, 5, 6)]


AXES = [  # of 4 or 8 ranks
    ("--tp=2", "--dp=2"), ("--pp=2", "--cp=2"), ("--cp=2", "--tp=2", "--ep=4", "--experts=4"),
]  # fmt: skip
EVERY = [
    {"axes": axes, "documents": documents, "attention": attention, "recompute": recompute,
     "schedule": schedule, "block": block}
    for axes in AXES for documents in (1, 6) for attention in ("plain", "sdpa")
    for recompute in ("none", "selective", "full") for block in ("gpt", "llama")
    for schedule in ("1f1b", "dualpipe-v")
    if (schedule == "1f1b" or "--pp=2" in axes)
    and ("--ep=4" not in axes or (attention, recompute) == ("plain", "full"))]  # fmt: skip


@pytest.mark.parametrize("one", covered(EVERY))
def test_packed_the_same_as_one_gpu(ranks, tmp_path, one):
    """Layers whose backward computes forward again find the documents of the step, too."""
    world = 1
    for flag in one["axes"]:
        world *= 1 if flag[2:4] in ("ep", "ex") else int(flag[-1])
    flags = (*PACKED, "--batch=4", *one["axes"], *(
        f"--{name}={value}" for name, value in one.items() if name != "axes"),
        *(("--layers=4",) if one["schedule"] == "dualpipe-v" else ()),
        *(("--ffn=64",) if one["block"] == "llama" else ()))
    hold_to_one_gpu(ranks(world)(run_main, NINE, flags, tmp_path), flags)


def test_the_busiest_rank_is_told(ranks, tmp_path):
    """As chapter 06's zig-zag of the sequence: of those pairs of a query and a key that it sees."""
    flags = (*PACKED, "--batch=4", "--documents=7", "--cp=2")
    _, run, output = ranks(2)(run_main, NINE, flags, tmp_path)[0]
    starts, nine = common.Text(run_arguments(run)).starts(run["config"]["steps"] - 1), chapter(NINE)
    work = [sum(int((mine - starts[mine] + 1).sum()) for mine in nine.runs_of(rank, 2, starts))
            for rank in (0, 1)]  # fmt: skip
    assert f"in the last step: {2 * max(work) / sum(work):.2f}" in output


def run_arguments(run):
    """Of a run's JSON, what its text asks for."""
    class Arguments:
        model = common.Config(1, 8, 2, 2, run["config"]["seq"], 256)
        documents, seed, data = 7, run["config"]["seed"], run["config"]["data"]

    return Arguments


@pytest.mark.parametrize(("flags", "line"), [
    ("--documents=129", "--documents 129 are longer than --seq = 128; --documents 128 would work"),
    ("--documents=0", "--documents: 0 is no whole number in [1, 2147483648); --documents 32 would "
     "work"),
    ("--variant=torch --documents=9", "--documents means nothing to --variant torch; --variant "
     "hand would work"),
])  # fmt: skip
def test_refusals(run_chapter, flags, line):
    status, output, errors = run_chapter(NINE, *flags.split(), WORLD_SIZE=1, RANK=0)
    assert (status, output, errors) == (2, "", f"error: {line}\n")
