"""Chapter 09: every product of axes gives one GPU's numbers, and sends what the formulas say."""

import math
import random
import re

import pytest
import torch
import torch.distributed as dist

from lab.cli import strict
from tests.chapters.test_04_tensor_parallel import TRAINING, covered
from tests.conftest import chapter, hold_to_one_gpu, run_main

NINE = "09_5d"


@pytest.fixture(scope="module")
def nine():
    return chapter(NINE)


# ------------------------------------------------------------------------------- same as one GPU


SETTINGS = {
    "dp": (1, 2, 4),
    "pp": (1, 2, 4),
    "cp": (1, 2),
    "tp": (1, 2, 4),
    "ep": (1, 2, "all"),  # of a stage
    "zero": (0, 1, 2, 3, "3 --keep-gathered"),
    "schedule": ("1f1b", "interleaved", "dualpipe-v"),
    "experts": (None, 8, "8 --shared-expert"),
    "preset": ("tiny", "gpt2"),  # gpt2 ties embedding and head
    "kv-heads": (4, 2, 1),
    "micro-batch": (1, 2),
    "attention": ("plain", "sdpa"),
    "order": ("pp,dp,cp,tp", "tp,cp,pp,dp"),
    "optimizer": ("adamw", "sgd"),
    "clip": (None, 0.1),
    "block": ("gpt", "llama"),
    "precision": ("fp32", "bf16"),  # masters in float64: the same numbers, by another path
    "recompute": ("none", "selective", "full"),
}


def world_of(one):
    return one["dp"] * one["pp"] * one["cp"] * one["tp"]


def fits(one, worlds):
    tied_3 = one["preset"] != "tiny" and one["zero"] in SETTINGS["zero"][3:]
    stage, ep = one["dp"] * one["cp"] * one["tp"], sharers(one)
    folds = ep == 1 or one["experts"] and 1 < ep <= 8 and stage % ep == 0
    return world_of(one) in worlds and not tied_3 and folds


def sharers(one):
    """How many ranks of a stage share the experts."""
    return one["dp"] * one["cp"] * one["tp"] if one["ep"] == "all" else one["ep"]


TWO_OF_EACH = SETTINGS | {axis: (1, 2) for axis in ("dp", "pp", "tp")}


def drawn(number, worlds, settings=SETTINGS, **kept):
    """So many settings that fit, by chance."""
    rng, some = random.Random(0), []
    while len(some) < number:
        one = {name: rng.choice(values) for name, values in settings.items()} | kept
        if fits(one, worlds):
            some.append(one)
    return some


def flags_of(one):
    one, slices = dict(one), 2 if one["schedule"] in ("interleaved", "dualpipe-v") else 1
    depth = slices * one["pp"]
    one["ep"] = sharers(one)
    one["ffn"] = 96 if one["block"] == "llama" else None
    given = [flag for name, value in one.items() if value is not None
             for flag in f"--{name}={value}".split()]
    sequences = one["dp"] * 2 * one["pp"] * one["micro-batch"]
    return [*TRAINING, "--dtype=float64", "--vocab=128", f"--layers={max(depth, 2)}", "--dim=32",
            "--heads=4", "--seq=16", f"--batch={sequences}", *given]


def hold(ranks, tmp_path, one):
    flags = flags_of(one)
    results = ranks(world_of(one), timeout=150)(run_main, NINE, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    _, run, output = results[0]
    pp, tp = (run["config"][axis] for axis in ("pp", "tp"))
    names = [check["name"] for check in run["checks"]]
    assert ("messages kept, at the most" in names) == (pp > 1 and run["variant"] != "torch")
    assert (f"{tp} ranks of tp send " in output) == (pp > 1 < tp and run["variant"] != "torch")


@pytest.mark.parametrize("one", covered(drawn(300, (1, 2, 4), TWO_OF_EACH)))
def test_same_as_one_gpu(ranks, tmp_path, one):
    """Any two settings together: four ranks have two axes."""
    hold(ranks, tmp_path, one)


@pytest.mark.parametrize("kept", [
    {"dp": 2, "cp": 2, "tp": 2, "ep": 4, "experts": 8, "zero": 1},  # held as nothing else is
    *(pytest.param({"dp": 2, "cp": 2, "tp": 2, "ep": ep, "experts": 8}, marks=pytest.mark.full)
      for ep in (2, 8)),
    pytest.param({"pp": 3, "schedule": "interleaved"}, marks=pytest.mark.full),  # two neighbours
    {"pp": 3, "schedule": "dualpipe-v"},
    pytest.param({"tp": 4, "kv-heads": 2, "zero": 0}, marks=pytest.mark.full),
    {"tp": 4, "kv-heads": 2, "zero": 3, "experts": 8, "ep": 2},
], ids=str)  # fmt: skip
def test_more_ranks_along_an_axis(ranks, tmp_path, kept):
    few = {axis: (1,) for axis in ("dp", "pp", "cp", "tp", "ep")}
    world = math.prod(kept.get(axis, 1) for axis in ("dp", "pp", "cp", "tp"))
    hold(ranks, tmp_path, drawn(1, (world,), SETTINGS | few, **kept)[0])


def test_an_odd_run_is_the_same_as_one_gpu(ranks, tmp_path):
    """One kv head on two ranks; 3 and 6 ranks that share what they do not divide; more experts than
    a rank has tokens, so that some get none; and machines of 4 ranks, of which the last has 2."""
    flags = (*TRAINING, "--dtype=float64", "--dp=3", "--ep=3", "--tp=2", "--zero=3", "--kv-heads=1",
             "--experts=24", "--top-k=1", "--vocab=131", "--layers=1", "--dim=32", "--heads=4",
             "--seq=8", "--batch=6", "--micro-batch=1", "--node-size=4")  # fmt: skip
    results = ranks(6, timeout=150)(run_main, NINE, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    axes = results[0][1]["recorded"]["axes"]
    assert [axis for axis in ("tp", "ep") if axes[axis]["leaves"]] == ["ep"]


def sum_of_eight_numbers(stage):
    """On six ranks, which do not divide them."""
    nine, p = chapter(NINE), torch.nn.Parameter(torch.zeros(8))
    p.holders, p.kind, p.grad = dist.group.WORLD, "norms", torch.arange(8.0)
    unit = nine.Unit([p], stage, False)
    unit.start_reduce()
    unit.finish_reduce()
    return p.grad.tolist() if stage == 0 else unit.shard.grad.tolist()


@pytest.mark.parametrize("stage", range(4))
def test_ranks_need_not_divide_what_they_hold(ranks, stage):
    whole = [6.0 * i for i in range(8)] + [0.0] * 4
    for rank, found in enumerate(ranks(6)(sum_of_eight_numbers, stage)):
        assert found == (whole[:8] if stage == 0 else whole[2 * rank:2 * rank + 2])


@pytest.mark.full
@pytest.mark.parametrize("number", range(300))
def test_any_axes_are_the_same_as_one_gpu(ranks, tmp_path, number):
    hold(ranks, tmp_path, drawn(number + 1, (1, 2, 4, 8))[number])


@pytest.mark.full
@pytest.mark.parametrize("one", [
    one for dp, pp, cp, tp in ((2, 2, 2, 2), (4, 2, 1, 2), (2, 4, 2, 1), (4, 1, 2, 2), (1, 4, 2, 2))
    for more in ({}, *({"experts": 8, "ep": ep} for ep in (2, 4, 8)))
    if more.get("ep", 1) <= dp * cp * tp
    for one in drawn(2, (16,), dp=dp, pp=pp, cp=cp, tp=tp, **more)])  # fmt: skip
def test_sixteen_ranks(ranks, tmp_path, one):
    hold(ranks, tmp_path, one)


FLOAT64 = (*TRAINING, "--dtype=float64", "--vocab=128", "--layers=2", "--dim=32", "--heads=4",
           "--kv-heads=2", "--seq=16", "--batch=8", "--clip=0.1")  # fmt: skip


@pytest.mark.parametrize(("world", "flags"), [
    (4, "--pp=2 --tp=2 --zero=3 --block=llama --ffn=96 --precision=bf16 --recompute=full"),
    (2, "--tp=2 --recompute=selective"),
    *(pytest.param(world, flags, marks=pytest.mark.full) for world, flags in (
        (2, "--pp=2"), (8, "--pp=2 --tp=2 --zero=3"), (4, "--tp=2 --optimizer=sgd"),
        (4, "--pp=2 --zero=3"), (4, "--pp=4 --layers=5"), (8, "--pp=2 --tp=4 --kv-heads=4"))),
])  # fmt: skip
def test_pytorchs_own(ranks, tmp_path, world, flags):
    flags = (*FLOAT64, "--variant=torch", *flags.split())
    hold_to_one_gpu(ranks(world, timeout=150)(run_main, NINE, flags, tmp_path), flags)


def test_nothing_is_kept_of_the_only_micro_batch(ranks, tmp_path):
    """After its backward a received activation is free, though no other message has come since."""
    flags = (*FLOAT64, "--pp=2", "--batch=1", "--steps=1")
    status, run, output = ranks(2)(run_main, NINE, flags, tmp_path)[0]
    assert status == 0, output
    assert "actions after which that is as computed" in {check["name"] for check in run["checks"]}


def test_bfloat16(ranks, tmp_path):
    flags = (*FLOAT64, "--dtype=float32", "--precision=bf16", "--block=llama", "--pp=2", "--tp=2",
             "--experts=4", "--zero=1", "--schedule=dualpipe-v", "--layers=4", "--batch=4",
             "--micro-batch=1", "--steps=1")
    status, _, output = ranks(4)(run_main, NINE, flags, tmp_path)[0]
    assert status == 0, output


# ------------------------------------------------------------------------------------- the mesh


def groups_of(*all_flags):
    """For a rank, and each of these runs: the ranks of each of its groups, by name."""
    return [named_groups(flags) for flags in all_flags]


def named_groups(flags):
    axes, holders = chapter(NINE).make_groups(arguments_of(flags, dist.get_world_size()), True)
    groups = [*axes.values(), *holders.values()]
    return {group.group_desc: dist.get_process_group_ranks(group) for group in groups}


def arguments_of(flags, world):
    nine = chapter(NINE)
    args = strict.parse(nine.__file__, "", nine.VARIANTS, nine.flags, [*FLOAT64, *flags])
    nine.requires(args, world)
    return args


def test_who_is_in_a_group(ranks):
    """Of rank 5 of 8: pp 1, dp 0, tp 1; its neighbours along each axis, and who holds the same. An
    axis of one rank has no group, and what is held alike is in one."""
    flags = ("--dp=2", "--pp=2", "--tp=2", "--experts=4", "--kv-heads=1")
    five, other = ranks(8)(groups_of, (*flags, "--ep=4"),
                           (*flags, "--ep=2", "--order=tp,dp,cp,pp"))[5]
    assert five == {"tp": [4, 5], "ep": [4, 5, 6, 7], "pp": [1, 5], "cp and tp": [4, 5],
                    "gradients, whole": [4, 5, 6, 7], "gradients, cut by tp": [5, 7],
                    "gradients, experts": [5], "gradients, tied": list(range(8))}
    assert other == {"tp": [1, 5], "ep": [5, 7], "pp": [4, 5], "cp and tp": [1, 5],
                     "gradients, whole": [1, 3, 5, 7], "gradients, cut by tp": [5, 7],
                     "gradients, experts": [1, 5], "gradients, tied": list(range(8))}


def test_experts_lie_on_the_ranks_that_the_lesson_shows(ranks):
    """With dp 2, cp 2, tp 2 and ep 4; and ep may be any number that divides a stage's ranks."""
    axes = ("--dp=2", "--cp=2", "--tp=2", "--experts=8")
    of_ranks = ranks(8)(groups_of, (*axes, "--ep=4"), (*axes, "--ep=8"))
    parts = re.search(r"part of experts((?: +\d){8})", chapter(NINE).__doc__)[1].split()
    for rank, (four, eight) in enumerate(of_ranks):
        assert four["ep"] == ([0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7])
        assert four["gradients, experts"] == [
            other for other in range(8) if parts[other] == parts[rank]]
        assert eight["ep"] == list(range(8)) and eight["gradients, experts"] == [rank]


def test_what_leaves_a_machine_is_what_the_lesson_says(ranks):
    """Which ranks, not how many: groups that are strided send as much, but over slower links."""
    cut = ("--pp=2", "--dp=2", "--tp=2")
    mixture = ("--dp=4", "--tp=2", "--ep=4", "--experts=4")
    of_ranks = ranks(8)(groups_of, cut, (*cut, "--order=tp,cp,dp,pp"), mixture)
    usual, turned, experts = (leaving(groups, machine=4) for groups in zip(*of_ranks))
    assert usual == {"pp", "gradients, tied"}  # a machine holds a stage
    assert turned == {"tp", "cp and tp", "gradients, whole", "gradients, tied"}
    assert experts == {"gradients, whole", "gradients, cut by tp", "gradients, experts"}
    assert {tuple(groups["ep"]) for *_, groups in of_ranks} == {(0, 1, 2, 3), (4, 5, 6, 7)}


def leaving(groups, machine):
    """The names of those groups that some machine of so many ranks does not hold as a whole."""
    return {name for of_rank in groups for name, members in of_rank.items()
            if len({rank // machine for rank in members}) > 1}


def test_ranks_that_share_a_kv_head_hold_the_same(ranks):
    of_ranks = ranks(4)(groups_of, ("--tp=4", "--kv-heads=2"))
    heads = [of_rank["gradients, kv heads"] for [of_rank] in of_ranks]
    assert heads == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all("cp" not in of_rank and "pp" not in of_rank for [of_rank] in of_ranks)


def test_a_layer_sends_what_the_lesson_compares(nine):
    """The same tokens on the same GPUs, by the formula that runs are held to."""
    assert nine.sent_in_a_layer(8, 64, 8, cut=True) == (56, 224)
    assert nine.sent_in_a_layer(8, 64, 8) == (28, 31.5)
    assert re.search(r"cut by tp .* 56 \(as in a dense layer\) and 224\n", nine.__doc__)
    assert re.search(r"folded .* 28 and 31.5\n", nine.__doc__)
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


def test_what_was_sent_when_tp_cut_each_expert(nine):
    """Once more from the beginning: of a layer in which a rank of tp has the tokens of all."""
    for tp, groups, k in ((2, 4, 1), (4, 2, 2), (8, 8, 8)):  # groups of tp that share the experts
        gathered = tp  # in units of t·h: what all ranks of tp have
        wire = (tp - 1) / tp * gathered  # of a gather or a scatter
        rows = gathered * k * (groups - 1) / groups  # that leave for other groups
        assert nine.sent_in_a_layer(tp, tp * groups, k, cut=True) == (8 * wire, 4 * rows)


def test_recomputation_sends_as_much_again_as_the_lesson_says(nine):
    """In the units of its table: 8 over tp, or 4 with mixtures, and 4 over ep and cp."""
    assert "11 in place of 8 over tp (with mixtures 6 of 4), 6 of 4 over ep and cp" in nine.__doc__
    for axis, flags, units, again in (("tp", "--tp=2", 8, 11), ("cp", "--cp=2", 4, 6),
                                      ("tp", "--tp=2 --experts=4", 4, 6),
                                      ("ep", "--dp=2 --ep=2 --experts=4", 4, 6)):
        sent = {}
        for how in ("none", "selective", "full"):
            args = arguments_of([*flags.split(), f"--recompute={how}"], 2)
            on_axis = nine.traffic(args, 2, 1, 1000, 0, 4)[axis].values()
            counts = (2 if how == "full" else 1) * 8 * args.experts * (axis == "ep")
            sent[how] = sum(size for _, size in on_axis) - counts
        assert sent["full"] / sent["none"] == again / units
        assert sent["selective"] == sent["full" if axis == "cp" else "none"]


def test_stages_hold_all_of_the_model_in_order(nine):
    assert nine.balanced(5, 3) == [(0, 3), (3, 5), (5, 7)]
    assert nine.balanced(2, 1) == [(0, 4)]


def test_parameters_are_counted(nine):
    for experts, tie in ((0, False), (4, False), (4, True)):
        cfg = nine.Mixture(2, 32, 4, 2, 16, 128, tie=tie, experts=experts, shared_expert=tie)
        assert cfg.parameters() == sum(p.numel() for p in nine.build(cfg).parameters())


# ------------------------------------------------------------------------------- faults


EXPERTS = "--experts=4 --ep=2 --dp=2"
FOLDED = f"{EXPERTS} --tp=2"
HELD = "[stage[i::ep] for stage in stages for i in range(ep)]"
TIED = "--preset=gpt2 --attention=plain"


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(("world", "flags", "line"), [
    (8, "--pp=2 --dp=2", "--pp 2 x --dp 2 x --cp 1 x --tp 1 is 4 ranks, not 8; --dp 4 "
     "would work"),
    (4, "--tp=3", "--pp 1 x --dp 1 x --cp 1 x --tp 3 is 3 ranks, not 4; "
     "without --tp would work"),
    (3, "--tp=3", "--heads 4 is not a multiple of --tp = 3; "
     "--batch 9 without --tp would work"),
    (4, "--tp=4 --kv-heads=3 --heads=12 --dim=48", "--kv-heads 3 and --tp 4: neither "
     "divides the other; --kv-heads 4 would work"),
    (4, "--cp=2 --tp=2 --seq=10", "--seq 10 is not a multiple of what --cp and --tp cut it into = "
     "4; --seq 12 would work"),
    (2, "--ep=2", "--ep, --top-k and --shared-expert are about experts, of which there are none; "
     "--experts 4 would work"),
    (2, "--shared-expert", "--ep, --top-k and --shared-expert are about experts, of which there "
     "are none; --experts 2 would work"),
    (2, "--zero=2 --keep-gathered", "--keep-gathered is of --zero 3; --zero 3 would work"),
    (2, "--tp=2 --ffn=97", "--ffn 97 is not a multiple of --tp = 2; --ffn 98 would work"),
    (8, "--like=llama3-8k --pp=4", "--like llama3-8k sets the axes, and --pp does so too; "
     "without --pp would work"),
    (2, "--ep=2 --experts=3", "--experts 3 is not a multiple of --ep = 2; --experts 4 would work"),
    (4, "--dp=2 --tp=2 --ep=8 --experts=8", "--dp 2 x --cp 1 x --tp 2 is no multiple of --ep = 8; "
     "--ep 4 would work"),
    (2, "--experts=2 --top-k=3", "--top-k 3 is more than --experts = 2; --top-k 2 would work"),
    (2, "--pp=2 --schedule=interleaved --batch=3 --layers=4", "interleaved on --pp 2 takes a "
     "multiple of 2 micro-batches, not 3; --batch 4 would work"),
    (2, "--pp=2 --schedule=dualpipe-v --batch=2 --layers=4", "dualpipe-v on --pp 2 takes 4 or more "
     "micro-batches, not 2; --batch 4 would work"),
    (2, "--pp=2 --schedule=interleaved", "--layers 2 is less than one for each of 4 stages; "
     "--layers 4 would work"),
    (2, "--zero=3 --preset=gpt2", "--zero 3 gathers modules one by one, and tied ones share a "
     "matrix; --zero 2 would work"),
    (4, "--like=llama3-128k", "--pp 2 x --dp 1 x --cp 2 x --tp 2 is 8 ranks, not 4; "
     "--nproc_per_node 8 would work"),
    (4, "--like=deepseek-v3", "--dp 2 x --cp 1 x --tp 1 is no multiple of --ep = 4; without --like "
     "would work"),
    (2, "--variant=torch --cp=2", "--cp means nothing to --variant torch; "
     "--variant hand would work"),
    (2, "--variant=torch --zero=1", "--variant torch has no --zero 1; --zero 2 would work"),
    (2, "--variant=torch --pp=2 --schedule=interleaved", "--schedule means nothing to --variant "
     "torch; without --schedule would work"),
    (2, "--variant=torch --preset=gpt2", "--variant torch does not know tied tables, as --preset "
     "gpt2 has; --variant hand would work"),
    (4, "--variant=torch --pp=4 --batch=2 --layers=4 --dp=1", "1f1b on --pp 4 takes 4 or more "
     "micro-batches, not 2; --batch 4 would work"),
])  # fmt: skip
def test_refusals(run_chapter, world, flags, line):
    flags = (*FLOAT64, *flags.split())
    status, output, errors = run_chapter(NINE, *flags, WORLD_SIZE=world, RANK=0)
    assert (status, output, errors) == (2, "", f"error: {line}\n")


def test_an_order_names_each_axis_once(run_chapter):
    status, _, errors = run_chapter(NINE, *FLOAT64, "--order=tp,dp", WORLD_SIZE=2, RANK=0)
    assert status == 2
    assert re.match("error: --order: invalid choice: 'tp,dp' .*pp,dp,cp,tp", errors)


@pytest.mark.parametrize("world", [8, 16])
@pytest.mark.parametrize("like", ["llama3-8k", "llama3-128k", "deepseek-v3", "megatron-1t"])
def test_published_runs_fit(nine, like, world):
    """They have the axes of the lesson's table, whose degrees make as many ranks as it says."""
    args = strict.parse(nine.__file__, "", nine.VARIANTS, nine.flags, [f"--like={like}"])
    nine.requires(args, world)
    gpus, *degrees = re.search(rf"^    {like} +([\d,]+)" + r" +([\d-]+)" * 5, nine.__doc__,
                               re.MULTILINE).groups()
    degrees = [int(degree.replace("-", "1")) for degree in degrees]
    degrees = dict(zip(("tp", "cp", "pp", "dp", "ep"), degrees))
    assert math.prod(degrees.values()) // degrees["ep"] == int(gpus.replace(",", ""))
    assert args.pp * args.dp * args.cp * args.tp == world
    for axis, degree in degrees.items():
        if (like, world, axis) != ("llama3-128k", 8, "dp"):  # four axes take 16 ranks
            assert (getattr(args, axis) > 1) == (degree > 1)  # the same axes
