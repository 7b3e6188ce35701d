"""Chapter 09: every product of axes gives one GPU's numbers, and sends what the formulas say."""

import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist

import common
from lab import launch
from tests.conftest import SMALL, TEXT, chapter
from tests.support.runs import check_run, runs

NINE = "09_5d"
TIMEOUT = 200  # seconds, of a run


@pytest.fixture(scope="module")
def nine():
    return chapter(NINE)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("run", runs("09"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    record, _ = check_run(ranks, tmp_path, run)
    names = [check["name"] for check in record["checks"]]
    is_by_hand = "--variant=torch" not in run.flags
    assert not is_by_hand or ("messages kept, at the most" in names) == (record["config"]["pp"] > 1)


SMALL_MODEL = (*SMALL, "--vocab=128", "--batch=8", f"--data={TEXT}")


# ------------------------------------------------------------------------------- documents


def test_tokens_of_a_rank_are_a_zigzag_in_runs(nine):
    """Of documents of 3, 2 and 3 tokens; a rank alone has them all."""
    starts = torch.tensor([0, 0, 0, 3, 3, 5, 5, 5])
    runs_of_ranks = [[run.tolist() for run in nine.runs_of(rank, 2, starts)] for rank in (0, 1)]
    assert runs_of_ranks == [[[0, 1], [6, 7]], [[2], [3], [4], [5]]]
    assert [run.tolist() for run in nine.runs_of(0, 1, starts)] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    rope, blocks = common.Rope(nine.Mixture(1, 8, 2, 2, 8, 9)), []
    assert nine.lay_out(starts, rope, blocks, 1, 2).tolist() == [2, 3, 4, 5]
    assert rope.positions.tolist() == [2, 0, 1, 0]
    assert blocks == [(1, 0, 3), (1, 3, 4), (1, 3, 5), (1, 5, 6)]


# ------------------------------------------------------------------------------------- the mesh


GROUPS = {  # of 8 ranks
    "a mixture": "--dp=2 --pp=2 --tp=2 --experts=4 --kv-heads=1 --ep=4",
    "turned": "--dp=2 --pp=2 --tp=2 --experts=4 --kv-heads=1 --ep=2 --order=tp,dp,cp,pp",
    "folded": "--dp=4 --tp=2 --ep=4 --experts=4",
    "kv heads": "--dp=2 --tp=4 --kv-heads=2",
}


def arguments_of(flags, world):
    """The arguments of a run that the chapter accepts."""
    nine = chapter(NINE)
    args = launch.parse(nine, [*SMALL_MODEL, *flags])
    nine.requires(args, world)
    return args


def groups_of(flags):
    """The ranks of each group of this rank, by name."""
    axes, holders = chapter(NINE).make_groups(arguments_of(flags, dist.get_world_size()), True)
    groups = [*axes.values(), *holders.values()]
    return {group.group_desc: dist.get_process_group_ranks(group) for group in groups}


def all_groups():
    """For a rank of the pool: its groups, for each of GROUPS."""
    return {name: groups_of(flags.split()) for name, flags in GROUPS.items()}


@pytest.fixture(scope="module")
def groups(pool):
    """{a name of GROUPS: of each rank, {name of a group: its ranks}}"""
    of_ranks = pool.call(8, TIMEOUT, all_groups)
    return {name: [groups[name] for groups in of_ranks] for name in GROUPS}


def test_who_is_in_a_group(groups):
    """Of rank 5 of 8: pp 1, dp 0, tp 1; its neighbours along each axis, and who holds the same. An
    axis of one rank has no group, and what is held alike is in one."""
    assert groups["a mixture"][5] == {
        "tp": [4, 5], "ep": [4, 5, 6, 7], "pp": [1, 5], "cp and tp": [4, 5],
        "gradients, whole": [4, 5, 6, 7], "gradients, cut by tp": [5, 7],
        "gradients, experts": [5], "gradients, tied": list(range(8))}
    assert groups["turned"][5] == {
        "tp": [1, 5], "ep": [5, 7], "pp": [4, 5], "cp and tp": [1, 5],
        "gradients, whole": [1, 3, 5, 7], "gradients, cut by tp": [5, 7],
        "gradients, experts": [1, 5], "gradients, tied": list(range(8))}
    heads = [of_rank["gradients, kv heads"] for of_rank in groups["kv heads"]]
    assert heads == 2 * [[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 6, 7], [2, 3, 6, 7]]


def test_what_leaves_a_machine_is_what_the_lesson_says(groups):
    """Which ranks, not how many: groups that are strided send as much, but over slower links."""
    assert leaving(groups["a mixture"], machine=4) == {"pp", "gradients, tied"}
    assert leaving(groups["turned"], machine=4) == {
        "tp", "cp and tp", "gradients, whole", "gradients, experts", "gradients, tied"}
    assert leaving(groups["folded"], machine=4) == {
        "gradients, whole", "gradients, cut by tp", "gradients, experts"}
    assert {tuple(of_rank["ep"]) for of_rank in groups["folded"]} == {(0, 1, 2, 3), (4, 5, 6, 7)}


def leaving(of_ranks, machine):
    """The names of those groups that some machine of so many ranks does not hold as a whole."""
    return {name for of_rank in of_ranks for name, members in of_rank.items()
            if len({rank // machine for rank in members}) > 1}


# ------------------------------------------------------------------------------- the formulas


def test_a_layer_sends_what_the_lesson_compares(nine):
    """The same tokens on the same GPUs, by the formula that runs are held to."""
    assert nine.sent_in_a_layer(8, 64, 8, cut=True) == (56, 224)
    assert nine.sent_in_a_layer(8, 64, 8) == (28, 31.5)
    for tp, dp, ep in ((8, 1, 8), (2, 4, 8), (2, 4, 2), (4, 2, 4), (1, 8, 8)):
        sent = on_the_wire(nine, f"--tp={tp} --dp={dp} --ep={ep} --experts=8")
        assert (sent["tp"], sent["ep"]) == nine.sent_in_a_layer(tp, ep, 2)
        assert on_the_wire(nine, f"--tp={tp} --dp={dp}")["tp"] == nine.sent_in_a_layer(
            tp, tp, 2, cut=True)[0]


def on_the_wire(nine, flags, h=64, tokens=32):
    """{axis: what a rank sends} in a layer, of a batch with so many tokens for each of 8 GPUs, in
    units of tokens · h. Counts of rows are left out."""
    args = arguments_of([*flags.split(), "--batch=8", "--micro-batch=1", "--heads=8",
                         "--kv-heads=8", f"--dim={h}", f"--seq={tokens}"], 8)  # fmt: skip
    m, each = args.micro_batches, {"tp": args.tp, "ep": args.ep}
    rows = 2 * 2 * tokens * m // args.tp  # sent and received, to and from experts; top-k is 2
    sent, shares = nine.traffic(args, 8, m, rows, 0, 1), {"tp": 0, "ep": 0}
    for axis in sent.keys() & shares.keys():
        size = sum(size - (op == "all_to_all") * 8 * args.experts * m
                   for op, (_, size) in sent[axis].items())
        shares[axis] = (each[axis] - 1) / each[axis] * size / (tokens * h)
    return shares


def test_parameters_are_counted(nine):
    for experts, tie in ((0, False), (4, False), (4, True)):
        cfg = nine.Mixture(2, 32, 4, 2, 16, 128, tie=tie, experts=experts, shared_expert=tie)
        assert cfg.parameters() == sum(p.numel() for p in nine.build(cfg).parameters())


# ------------------------------------------------------------------------------- bad arguments


def test_published_runs_fit(nine):
    """They have the axes of the lesson's table, whose degrees make as many ranks as it says."""
    for like, world in itertools.product(nine.LIKE, (8, 16)):
        args = launch.parse(nine, [f"--like={like}"])
        nine.requires(args, world)
        assert args.pp * args.dp * args.cp * args.tp == world
        row = rf"\b{like} +([\d,]+)" + r" +([\d-]+)" * 5
        gpus, *degrees = re.search(row, nine.__doc__).groups()
        degrees = [int(degree.replace("-", "1")) for degree in degrees]
        degrees = dict(zip(("tp", "cp", "pp", "dp", "ep"), degrees))
        assert math.prod(degrees.values()) // degrees["ep"] == int(gpus.replace(",", ""))
        for axis, degree in degrees.items():
            if (like, world, axis) != ("llama3-128k", 8, "dp"):  # four axes take 16 ranks
                assert (getattr(args, axis) > 1) == (degree > 1)  # the same axes
