"""Chapter 09: every product of axes gives one GPU's numbers, and sends what the formulas say."""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import common
from lab import launch
from tests.chapters.test_04_tensor_parallel import TRAINING, covering
from tests.conftest import FULL, chapter, hold_to_one_gpu, run_main, sample
from tests.support.refused import hold_refusals

NINE = "09_5d"
TIMEOUT = 200  # seconds, of a run


@pytest.fixture(scope="module")
def nine():
    return chapter(NINE)


# ------------------------------------------------------------------------------- same as one GPU


SETTINGS = {
    "dp": (1, 2),
    "pp": (1, 2),
    "cp": (1, 2),
    "tp": (1, 2),
    "zero": (0, 1, 2, 3),
    "mixture": (None, "4 --ep=2", "8 --ep=all --shared-expert"),  # of experts; all: of a stage
    "schedule": ("1f1b", "interleaved", "dualpipe-v"),
    "documents": (None, 6),
    "order": ("pp,dp,cp,tp", "tp,cp,pp,dp"),
    "training": (
        "--micro-batch=1 --kv-heads=4 --attention=plain --recompute=selective",
        "--micro-batch=2 --kv-heads=1 --attention=sdpa --optimizer=sgd --clip=0.1 --preset=gpt2",
        "--micro-batch=1 --kv-heads=2 --attention=sdpa --clip=0.1 --block=llama --ffn=96 "
        "--precision=bf16 --recompute=full",
    ),
}
WORLDS = (1, 2, 4, 8, 16) if FULL else (1, 2, 4)


def world_of(one):
    return one["dp"] * one["pp"] * one["cp"] * one["tp"]


def stage_of(one):
    """How many ranks a stage has."""
    return one["dp"] * one["cp"] * one["tp"]


def fits(one):
    is_tied = "--preset=gpt2" in one["training"]
    folds = not one["mixture"] or stage_of(one) % 2 == 0
    return world_of(one) in WORLDS and folds and not (is_tied and one["zero"] == 3)


def flags_of(one):
    training, pp = one["training"].split(), one["pp"]
    slices, m = (1 if one["schedule"] == "1f1b" else 2), max(pp, 2)
    m = 2 * pp if one["schedule"] == "dualpipe-v" else m
    sequences = one["dp"] * m * (2 if "--micro-batch=2" in training else 1)
    names = "dp", "pp", "cp", "tp", "zero", "schedule", "order"
    flags = [f"--{name}={one[name]}" for name in names]
    if one["mixture"]:
        flags += f"--experts={one['mixture']}".replace("all", str(stage_of(one))).split()
    if one["documents"]:
        flags.append(f"--documents={one['documents']}")
    if one["zero"] == 3 and one["order"] != SETTINGS["order"][0]:
        flags.append("--keep-gathered")
    return [*TRAINING, "--dtype=float64", "--vocab=128", f"--layers={max(slices * pp, 2)}",
            "--dim=32", "--heads=4", "--seq=16", f"--batch={sequences}", *flags, *training]


def hold(ranks, tmp_path, one):
    flags = flags_of(one)
    results = ranks(world_of(one), TIMEOUT)(run_main, NINE, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    names = [check["name"] for check in results[0][1]["checks"]]
    assert ("messages kept, at the most" in names) == (one["pp"] > 1)


def others():
    """More ranks along an axis than two, and what only eight ranks have."""
    plain, last = {name: values[0] for name, values in SETTINGS.items()}, SETTINGS["training"][2]
    two, four = {"dp": 2, "cp": 2, "tp": 2, "training": last}, {"mixture": "8 --ep=4", "zero": 2}
    for case in ({**two, "mixture": "8 --ep=4", "zero": 1},  # held as nothing else is
                 {"pp": 3, "schedule": "dualpipe-v"},
                 {"tp": 4, "zero": 3, "mixture": "8 --ep=2", "training": last},
                 {"pp": 3, "schedule": "interleaved"},  # a rank has two neighbours
                 {"tp": 4, "documents": 6, "training": last},
                 {**two, "mixture": "8 --ep=2"}, {**two, "mixture": "8 --ep=8"},
                 {**two, **four, "pp": 2}, {**four, "dp": 4, "pp": 2, "tp": 2},
                 {**four, "dp": 2, "pp": 4, "cp": 2}, {**four, "dp": 4, "cp": 2, "tp": 2}):
        yield plain | case


@pytest.mark.parametrize("one", [*covering(fits, **SETTINGS), *sample(others(), 2)])
def test_same_as_one_gpu(ranks, tmp_path, one):
    """Any two settings together: four ranks have two axes."""
    hold(ranks, tmp_path, one)


def test_an_odd_run_is_the_same_as_one_gpu(ranks, tmp_path):
    """One kv head on two ranks; 3 and 6 ranks that share what they do not divide; more experts than
    a rank has tokens, so that some get none; and machines of 4 ranks, of which the last has 2."""
    flags = (*TRAINING, "--dtype=float64", "--dp=3", "--ep=3", "--tp=2", "--zero=3", "--kv-heads=1",
             "--experts=24", "--top-k=1", "--vocab=131", "--layers=1", "--dim=32", "--heads=4",
             "--seq=8", "--batch=6", "--micro-batch=1", "--node-size=4")  # fmt: skip
    results = ranks(6, TIMEOUT)(run_main, NINE, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    axes = results[0][1]["recorded"]["axes"]
    assert [axis for axis in ("tp", "ep") if axes[axis]["leaves"]] == ["ep"]


def sums_of_eight_numbers():
    """On three ranks, which do not divide them: what each stage of ZeRO leaves on a rank."""
    nine, found = chapter(NINE), []
    for stage in range(4):
        p = torch.nn.Parameter(torch.zeros(8))
        p.holders, p.kind, p.grad = dist.group.WORLD, "norms", torch.arange(8.0)
        unit = nine.Unit([p], stage, False)
        unit.start_reduce()
        unit.finish_reduce()
        found.append(p.grad.tolist() if stage == 0 else unit.shard.grad.tolist())
    return found


def test_ranks_need_not_divide_what_they_hold(ranks):
    whole = [3.0 * i for i in range(8)] + [0.0]
    for rank, (all_of_it, *shards) in enumerate(ranks(3, TIMEOUT)(sums_of_eight_numbers)):
        assert all_of_it == whole[:8]
        assert shards == 3 * [whole[3 * rank:3 * rank + 3]]


FLOAT64 = (*TRAINING, "--dtype=float64", "--vocab=128", "--layers=2", "--dim=32", "--heads=4",
           "--kv-heads=2", "--seq=16", "--batch=8", "--clip=0.1")  # fmt: skip


@pytest.mark.parametrize(("world", "flags"), sample([
    (2, "--tp=2 --zero=3 --block=llama --ffn=96 --precision=bf16 --recompute=full"),
    (4, "--pp=2 --tp=2 --zero=3 --block=llama --ffn=96 --precision=bf16 --recompute=full"),
    (2, "--tp=2 --recompute=selective"), (2, "--pp=2"), (8, "--pp=2 --tp=2 --zero=3"),
    (4, "--tp=2 --optimizer=sgd"), (4, "--pp=2 --zero=3"), (4, "--pp=4 --layers=5"),
    (8, "--pp=2 --tp=4 --kv-heads=4"),
]))  # fmt: skip
def test_pytorchs_own(ranks, tmp_path, world, flags):
    flags = (*FLOAT64, "--variant=torch", *flags.split())
    hold_to_one_gpu(ranks(world, TIMEOUT)(run_main, NINE, flags, tmp_path), flags)


def test_nothing_is_kept_of_the_only_micro_batch(ranks, tmp_path):
    """After its backward a received activation is free, though no other message has come since."""
    flags = (*FLOAT64, "--pp=2", "--batch=1", "--steps=1")
    status, run, output = ranks(2, TIMEOUT)(run_main, NINE, flags, tmp_path)[0]
    assert status == 0, output
    assert "actions after which that is as computed" in {check["name"] for check in run["checks"]}


@pytest.mark.full
def test_bfloat16(ranks, tmp_path):
    flags = (*FLOAT64, "--dtype=float32", "--precision=bf16", "--block=llama", "--pp=2", "--tp=2",
             "--experts=4", "--zero=1", "--schedule=dualpipe-v", "--layers=4", "--batch=4",
             "--micro-batch=1", "--steps=1")
    status, _, output = ranks(4, TIMEOUT)(run_main, NINE, flags, tmp_path)[0]
    assert status == 0, output


# ------------------------------------------------------------------------------- documents


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


def test_the_busiest_rank_is_told(ranks, nine, tmp_path):
    """Of the pairs of a query and a key that it sees: more than the mean."""
    flags = (*FLOAT64, "--documents=7", "--cp=2")
    (_, run, output), *_ = ranks(2, TIMEOUT)(run_main, NINE, flags, tmp_path)

    args = SimpleNamespace(model=common.Config(1, 8, 2, 2, 16, 256), documents=7,
                           **{name: run["config"][name] for name in ("seed", "data")})
    starts = common.Text(args).starts(run["config"]["steps"] - 1)
    work = [sum(int((mine - starts[mine] + 1).sum()) for mine in nine.runs_of(rank, 2, starts))
            for rank in (0, 1)]  # fmt: skip
    assert f"in the last step: {2 * max(work) / sum(work):.2f}" in output


# ------------------------------------------------------------------------------------- the mesh


GROUPS = {  # of 8 ranks
    "a mixture": "--dp=2 --pp=2 --tp=2 --experts=4 --kv-heads=1 --ep=4",
    "turned": "--dp=2 --pp=2 --tp=2 --experts=4 --kv-heads=1 --ep=2 --order=tp,dp,cp,pp",
    "folded": "--dp=4 --tp=2 --ep=4 --experts=4",
    "kv heads": "--dp=2 --tp=4 --kv-heads=2",
}


def arguments_of(flags, world):
    nine = chapter(NINE)
    args = launch.parse(nine, [*FLOAT64, *flags])
    nine.requires(args, world)
    return args


def groups_of(flags):
    """The ranks of each group of this rank, by name."""
    axes, holders = chapter(NINE).make_groups(arguments_of(flags, dist.get_world_size()), True)
    groups = [*axes.values(), *holders.values()]
    return {group.group_desc: dist.get_process_group_ranks(group) for group in groups}


def all_groups():
    return {name: groups_of(flags.split()) for name, flags in GROUPS.items()}


@pytest.fixture(scope="module")
def groups(pool):
    """{a name of GROUPS: of each rank, {name of a group: its ranks}}"""
    of_ranks = pool.call(8, TIMEOUT, all_groups)
    return {name: [found[name] for found in of_ranks] for name in GROUPS}


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
    assert {tuple(found["ep"]) for found in groups["folded"]} == {(0, 1, 2, 3), (4, 5, 6, 7)}


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
        found = on_the_wire(nine, f"--tp={tp} --dp={dp} --ep={ep} --experts=8")
        assert (found["tp"], found["ep"]) == nine.sent_in_a_layer(tp, ep, 2)
        assert on_the_wire(nine, f"--tp={tp} --dp={dp}")["tp"] == nine.sent_in_a_layer(
            tp, tp, 2, cut=True)[0]


def on_the_wire(nine, flags, h=64, tokens=32):
    """{axis: what a rank sends} in a layer, of a batch with so many tokens for each of 8 GPUs, in
    units of tokens · h. Counts of rows are left out."""
    args = arguments_of([*flags.split(), "--batch=8", "--micro-batch=1", "--heads=8",
                         "--kv-heads=8", f"--dim={h}", f"--seq={tokens}"], 8)  # fmt: skip
    m, each = args.micro_batches, {"tp": args.tp, "ep": args.ep}
    rows = 2 * 2 * tokens * m // args.tp  # sent and received, to and from experts; top-k is 2
    sent, found = nine.traffic(args, 8, m, rows, 0, 1), {"tp": 0, "ep": 0}
    for axis in sent.keys() & found.keys():
        size = sum(size - (op == "all_to_all") * 8 * args.experts * m
                   for op, (_, size) in sent[axis].items())
        found[axis] = (each[axis] - 1) / each[axis] * size / (tokens * h)
    return found


def test_parameters_are_counted(nine):
    for experts, tie in ((0, False), (4, False), (4, True)):
        cfg = nine.Mixture(2, 32, 4, 2, 16, 128, tie=tie, experts=experts, shared_expert=tie)
        assert cfg.parameters() == sum(p.numel() for p in nine.build(cfg).parameters())


# ------------------------------------------------------------------------------- bad arguments


def test_refusals(run_chapter):
    small = "--layers=2 --heads=4 --kv-heads=2 --dim=32 --batch=8 --seq=16"
    torchs = "--variant=torch"
    table = [
        ("--pp=2 --dp=2", 8, "--pp 2", "--dp 4"),
        ("--tp=3 --heads=6 --kv-heads=3 --dim=36 --seq=18", 4, "--tp 3", "--nproc_per_node 3"),
        ("--tp=3 --kv-heads=1 --dim=48 --seq=18", 3, "--tp = 3", "--heads 6"),
        ("--tp=4 --kv-heads=3 --heads=12 --dim=48", 4, "--kv-heads 3", "--kv-heads 4"),
        ("--cp=2 --tp=2 --seq=10", 4, "--seq 10", "--seq 12"),
        ("--ep=2", 2, "--ep", "--experts 4"),
        ("--shared-expert", 2, "--shared-expert", "--experts 2"),
        ("--zero=2 --keep-gathered", 2, "--keep-gathered", "without --keep-gathered"),
        ("--tp=2 --ffn=97", 2, "--ffn 97", "--ffn 98"),
        ("--ep=2 --experts=3", 2, "--experts 3", "--experts 4"),
        ("--dp=2 --tp=2 --ep=8 --experts=8", 4, "--ep = 8", "--ep 4"),
        ("--experts=2 --top-k=3", 2, "--top-k 3", "--top-k 2"),
        ("--pp=2 --schedule=interleaved --batch=3 --layers=4", 2, "interleaved", "--batch 4"),
        ("--pp=2 --schedule=dualpipe-v --batch=2 --layers=4", 2, "dualpipe-v", "--batch 4"),
        ("--pp=2 --schedule=interleaved", 2, "--layers 2", "--layers 4"),
        ("--zero=3 --preset=gpt2", 2, "--zero 3", "--zero 2"),
        ("--documents=17", 1, "--documents 17", "--documents 16"),
        ("--documents=0 --seq=32", 1, "--documents", "--documents 32"),
        ("--like=llama3-8k --pp=4", 8, "--like llama3-8k", "without --pp"),
        ("--like=llama3-128k", 4, "--pp 2", "--nproc_per_node 8"),
        ("--like=deepseek-v3", 4, "--ep = 4", "without --like"),
        (f"{torchs} --documents=9", 1, "--documents", "--variant hand"),
        (f"{torchs} --cp=2", 2, "--cp", "--variant hand"),
        (f"{torchs} --zero=1", 2, "--zero 1", "--zero 2"),
        (f"{torchs} --pp=2 --schedule=interleaved --layers=4", 2, "--schedule", "--variant hand"),
        (f"{torchs} --preset=gpt2", 2, "--variant torch", "--variant hand"),
        (f"{torchs} --pp=4 --batch=2 --layers=4 --dp=1", 4, "--pp 4", "--batch 4"),
    ]
    hold_refusals(run_chapter, NINE, [(f"{small} {flags}", *rest) for flags, *rest in table])


def test_published_runs_fit(nine):
    """They have the axes of the lesson's table, whose degrees make as many ranks as it says."""
    for like, world in itertools.product(nine.LIKE, (8, 16)):
        args = launch.parse(nine, [f"--like={like}"])
        nine.requires(args, world)
        assert world_of(vars(args)) == world
        row = rf"\b{like} +([\d,]+)" + r" +([\d-]+)" * 5
        gpus, *degrees = re.search(row, nine.__doc__).groups()
        degrees = [int(degree.replace("-", "1")) for degree in degrees]
        degrees = dict(zip(("tp", "cp", "pp", "dp", "ep"), degrees))
        assert math.prod(degrees.values()) // degrees["ep"] == int(gpus.replace(",", ""))
        for axis, degree in degrees.items():
            if (like, world, axis) != ("llama3-128k", 8, "dp"):  # four axes take 16 ranks
                assert (getattr(args, axis) > 1) == (degree > 1)  # the same axes
