"""Chapter 09: every product of axes gives one GPU's numbers, and sends what the formulas say."""

import functools
import itertools
import math
import random

import pytest
import torch
import torch.distributed as dist
from conftest import chapter, hold_to_one_gpu, run_main
from test_04_tensor_parallel import TRAINING, covered

from lab import cli, schedules
from lab.meters import count_flops

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
    "ep": (1, "dp"),
    "zero": (0, 1, 2, "3", "3 --regather"),
    "schedule": ("1f1b", "interleaved", "zb-h1", "dualpipe-v"),
    "experts": (None, 4),
    "preset": ("tiny", "gpt2"),  # gpt2 ties embedding and head
    "kv-heads": (4, 2, 1),
    "micro-batch": (1, 2),
    "attention": ("plain", "sdpa"),
    "order": ("pp,dp,cp,tp", "tp,cp,pp,dp"),
    "optimizer": ("adamw", "sgd"),
    "clip": (None, 0.1),
}


def world_of(one):
    return one["dp"] * one["pp"] * one["cp"] * one["tp"]


def fits(one, worlds=(1, 2, 4, 8)):
    tied_3 = one["preset"] != "tiny" and str(one["zero"]).startswith("3")
    without_experts = one["ep"] == "dp" and (one["experts"] is None or one["dp"] == 1)
    return world_of(one) in worlds and not tied_3 and not without_experts


def drawn(number, **kept):
    """So many settings that fit, by chance."""
    rng, some = random.Random(0), []
    while len(some) < number:
        one = {name: rng.choice(values) for name, values in SETTINGS.items()} | kept
        if fits(one, (world_of(one),) if kept else (1, 2, 4, 8)):
            some.append(one)
    return some


def flags_of(one):
    one, slices = dict(one), 2 if one["schedule"] in ("interleaved", "dualpipe-v") else 1
    depth = slices * one["pp"]
    one["ep"] = one["dp"] if one["ep"] == "dp" else 1
    given = [f"--{name}={value}" for name, value in one.items() if value is not None]
    sequences = one["dp"] * 2 * one["pp"] * one["micro-batch"]
    return [*TRAINING, "--dtype=float64", "--vocab=128", f"--layers={max(depth, 2)}", "--dim=32",
            "--heads=4", "--seq=16", f"--batch={sequences}", *" ".join(given).split()]


def hold(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(world_of(one), timeout=150)(run_main, NINE, flags, tmp_path), flags)


@pytest.mark.parametrize("one", covered(drawn(300)))
def test_same_as_one_gpu(ranks, tmp_path, one):
    hold(ranks, tmp_path, one)


@pytest.mark.full
@pytest.mark.parametrize("number", range(300))
def test_any_axes_are_the_same_as_one_gpu(ranks, tmp_path, number):
    hold(ranks, tmp_path, drawn(number + 1)[number])


@pytest.mark.full
@pytest.mark.parametrize("one", [
    one for dp, pp, cp, tp in ((2, 2, 2, 2), (4, 2, 1, 2), (2, 4, 2, 1), (4, 1, 2, 2), (1, 4, 2, 2))
    for one in drawn(2, dp=dp, pp=pp, cp=cp, tp=tp)])  # fmt: skip
def test_sixteen_ranks(ranks, tmp_path, one):
    hold(ranks, tmp_path, one)


FLOAT64 = (*TRAINING, "--dtype=float64", "--vocab=128", "--layers=2", "--dim=32", "--heads=4",
           "--kv-heads=2", "--seq=16", "--batch=8", "--clip=0.1")  # fmt: skip


@pytest.mark.parametrize(("world", "flags"), [
    (8, "--pp=2 --tp=2 --zero=3"),
    (2, "--tp=2 --schedule=interleaved --kv-heads=2"),
    *(pytest.param(world, flags, marks=pytest.mark.full) for world, flags in (
        (4, "--tp=2 --optimizer=sgd"), (4, "--pp=2 --schedule=interleaved --zero=3 --layers=4"),
        (4, "--pp=4 --layers=5"), (8, "--pp=2 --tp=4 --kv-heads=4 --schedule=interleaved "
                                      "--layers=4"))),
])  # fmt: skip
def test_pytorchs_own(ranks, tmp_path, world, flags):
    flags = (*FLOAT64, "--variant=torch", *flags.split())
    hold_to_one_gpu(ranks(world, timeout=150)(run_main, NINE, flags, tmp_path), flags)


def test_bfloat16(ranks, tmp_path):
    flags = (*FLOAT64, "--dtype=bfloat16", "--pp=2", "--tp=2", "--experts=4", "--zero=1",
             "--schedule=zb-h1")
    status, _, output = ranks(4)(run_main, NINE, flags, tmp_path)[0]
    assert status == 0, output


# ------------------------------------------------------------------------------------- the mesh


def groups_of(*flags):
    """For a rank: the ranks of each of its groups, by name."""
    nine, args = chapter(NINE), arguments_of(flags, dist.get_world_size())
    axes, holders = nine.make_groups(args, tied_stages=True)
    return {name: dist.get_process_group_ranks(group) for name, group in (axes | holders).items()}


def arguments_of(flags, world):
    nine = chapter(NINE)
    args = cli.parse(nine.__file__, "", nine.VARIANTS, nine.flags, [*FLOAT64, *flags])
    nine.requires(args, world)
    return args


def test_who_is_in_a_group(ranks):
    """Of rank 5 of 8: pp 1, dp 0, tp 1; its neighbours along each axis, and who holds the same."""
    flags = ("--dp=2", "--pp=2", "--tp=2", "--ep=2", "--experts=4", "--kv-heads=1")
    of_5 = ranks(8)(groups_of, *flags)[5]
    assert of_5 == {"tp": [4, 5], "cp": [5], "ep": [5, 7], "pp": [1, 5], "cp and tp": [4, 5],
                    (1, 1): [4, 5, 6, 7], (2, 1): [5, 7], (2, 2): [5],
                    "tied": list(range(8))}
    other = ranks(8)(groups_of, *flags, "--order=tp,dp,cp,pp")[5]  # tp 1, dp 0, pp 1
    assert other == {"tp": [1, 5], "cp": [5], "ep": [5, 7], "pp": [4, 5], "cp and tp": [1, 5],
                     (1, 1): [1, 3, 5, 7], (2, 1): [5, 7], (2, 2): [5], "tied": list(range(8))}


def test_ranks_that_share_a_kv_head_hold_the_same(ranks):
    of_ranks = ranks(4)(groups_of, "--tp=4", "--kv-heads=2")
    assert [of_rank[2, 1] for of_rank in of_ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "dualpipe-v"])
def test_schedules_are_those_of_chapter_07_and_nobody_blocks(nine, name):
    seven = chapter("07_pipeline_parallel")
    for p, more in itertools.product((1, 2, 3, 4), (0, 1, 3)):
        m = 2 * p + (more * p if name == "interleaved" else more)
        ours, theirs = nine.make_schedule(name, p, m), seven.make_schedule(name, p, m, 2)
        assert ours.actions == theirs.actions and ours.ranks == theirs.ranks
        schedules.check_rendezvous(nine.make_programs(ours), ours.needs)
        for rank, actions in enumerate(ours.actions):
            sent = [ours.receiver(action) for action in actions]
            away = sum(receiver not in (None, rank) for receiver in sent)
            assert away == nine.messages(name, rank, p, m)


def test_a_schedule_in_which_ranks_wait_for_each_other_is_refused(nine):
    schedule = nine.make_schedule("1f1b", 2, 2)
    schedule.actions[1].reverse()
    with pytest.raises(ValueError, match="ranks wait for each other"):
        nine.make_programs(schedule)


def test_stages_hold_all_of_the_model_in_order(nine):
    assert nine.balanced(5, 3) == [(0, 3), (3, 5), (5, 7)]
    assert nine.balanced(2, 1) == [(0, 4)]


def test_positions_are_a_zigzag(nine):
    assert [nine.positions_of(rank, 2, 8).tolist() for rank in (0, 1)] == [[0, 1, 6, 7],
                                                                          [2, 3, 4, 5]]


def test_parameters_are_counted(nine):
    """On one rank, by kind of holder: as many as the model has."""
    for experts, tie in ((0, False), (4, False), (4, True)):
        cfg = nine.Mixture(2, 32, 4, 2, 16, 128, tie=tie, experts=experts)
        model = nine.build(cfg)
        modules = nine.numbers(cfg, 1, 1)
        sizes = [sum(p.numel() for p in module.parameters()) for module in model[:-1]]
        assert [sum(module.values()) for module in modules[:-1]] == sizes
        assert sum(sum(module.values()) for module in modules) == cfg.parameters() == sum(
            p.numel() for p in model.parameters())
        assert sum(nine.tensors(cfg)) == cfg.tensors() == len(list(model.parameters()))


def forward_and_backward(model, tokens):
    model(tokens).sum().backward()


def test_flops_of_a_step(nine):
    for experts in (0, 4):
        cfg = nine.Mixture(2, 32, 4, 2, 16, 128, experts=experts)
        model, tokens = nine.build(cfg), torch.randint(128, (3, 16))
        counted = count_flops(functools.partial(forward_and_backward, model, tokens))
        assert counted == nine.step_flops(cfg, 3)


# ------------------------------------------------------------------------------- faults


EXPERTS = "--experts=4 --ep=2 --dp=2"


@pytest.mark.parametrize(("flags", "right", "wrong", "named"), [
    # experts' gradients times ep: summed over all of dp, who hold other experts
    (f"{EXPERTS} --tp=2", 'parts.get(axes["ep"], 1)]', "1]", "gradients"),
    (f"{EXPERTS} --tp=2", "return AllToAll.apply(gradient, ctx.received",
     "return 2 * AllToAll.apply(gradient, ctx.received", "gradients"),
    ("--cp=2 --tp=2", "    held = units or", "    for p in model.parameters():\n"
     "        p.grad /= 2\n    held = units or", "gradients"),  # divided by cp
    # whose norm
    ("--dp=2 --tp=2", "p.copies = p.holders.size()",
     'p.copies = p.holders.size() // axes["tp"].size()', "gradient norm"),  # counts tp times
    ("--pp=2 --tp=2", "norm = grad_norm(held, dist.group.WORLD)",
     "norm = grad_norm(held, dist.new_subgroups(2)[0])", "gradient norm"),  # of one stage
    ("--dp=2 --pp=2 --zero=1", "self.group, self.copies = parameters[0].holders, 1 ",
     "self.group, self.copies = parameters[0].holders, 2 ", "gradient norm"),
    ("--pp=2 --tp=2", "clip_grads(held, norm, clip)", "clip_grads(held, grad_norm(held), clip)",
     "gradients"),  # clipped by a local norm
    # whose loss and whose gradients
    ("--dp=2 --pp=2", "out = loss_sum(out, targets) / valid",
     "out = loss_sum(out, targets) / (targets != -100).sum().clamp(min=1) / 8", "loss"),  # of means
    ("--experts=4 --tp=2 --dp=2", "GatherIn.apply(gates, self.tp)",
     "GatherIn.apply(gates, self.tp).detach()", "gradients"),  # the router's is lost
    ("--experts=4 --cp=2 --dp=2", "        if self.sequence: ", "        if False: ", "gradients"),
    ("--pp=2 --dp=2 --preset=gpt2 --attention=plain", 'if "tied" in holders and p.gl',
     'if False and p.gl', "gradients"),  # a tied matrix is summed at one end
    ("--pp=2 --dp=2 --preset=gpt2 --attention=plain", 'p.holders = holders["tied"]',
     'p.holders = axes["pp"]', "gradients"),  # over the wrong group
    ("--tp=2 --dp=2", "if p.copies > 1:", "if p.copies > 2:", "gradients"),  # one axis is left out
    # formulas
    ("--tp=2 --dp=2", "around = 4 * tokens", "around = 3 * tokens", "tp: all_gather, payload"),
    ("--pp=2 --dp=2 --schedule=zb-h1", "inputs = x + x // t", "inputs = x", "actions after which"),
    ("--dp=4 --zero=2", "shards = sum(-(-size // n) for size, n in units)",
     "shards = sum(size for size, n in units)", "optimizer states"),
])  # fmt: skip
def test_a_broken_chapter_says_so(ranks, tmp_path, flags, right, wrong, named):
    """Faults that frameworks and students have had, on four ranks."""
    flags = (*FLOAT64, "--steps=1", *flags.split())
    (status, _, output), *_ = ranks(4)(run_main, NINE, flags, tmp_path, (right, wrong))
    assert status == 1 and any(named in line for line in output.splitlines() if "✗" in line), output


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(("world", "flags", "line"), [
    (8, "--pp=2 --dp=2", "--pp 2 x --dp 2 x --cp 1 x --tp 1 is 4 ranks, not 8; --dp 4 "
     "would work"),
    (4, "--tp=3", "--pp 1 x --dp 1 x --cp 1 x --tp 3 is 3 ranks, not 4; torchrun "
     "--nproc_per_node=3 would work"),
    (3, "--tp=3", "--heads 4 is not a multiple of --tp = 3; 6 would work"),
    (4, "--tp=4 --kv-heads=3 --heads=12 --dim=48", "--kv-heads 3 neither divides --tp 4 nor is a "
     "multiple of it; 4 would work"),
    (4, "--cp=2 --tp=2 --seq=10", "--seq 10 is not a multiple of what --cp and --tp cut it into = "
     "4; 12 would work"),
    (2, "--ep=2", "--ep and --top-k are about experts, of which there are none; --experts 4 would "
     "work"),
    (2, "--top-k=3", "--ep and --top-k are about experts, of which there are none; --experts 2 "
     "would work"),
    (8, "--like=llama3-8k --pp=4", "--like llama3-8k sets the axes, and --pp does so too; --like "
     "llama3-8k alone would work"),
    (2, "--ep=2 --experts=3", "--experts 3 is not a multiple of --ep = 2; 4 would work"),
    (4, "--dp=2 --tp=2 --ep=4 --experts=4", "--dp 2 is not a multiple of --ep = 4; 4 would work"),
    (2, "--experts=2 --top-k=3", "--top-k 3 is more than --experts = 2; 2 would work"),
    (2, "--pp=2 --schedule=interleaved --batch=3 --layers=4", "interleaved on --pp 2 takes a "
     "multiple of 2 micro-batches, not 3; --batch 4 would work"),
    (2, "--pp=2 --schedule=dualpipe-v --batch=2 --layers=4", "dualpipe-v on --pp 2 takes 4 or more "
     "micro-batches, not 2; --batch 4 would work"),
    (2, "--pp=2 --schedule=interleaved", "--layers 2 is less than one for each of 4 stages; "
     "--layers 4 would work"),
    (2, "--zero=3 --preset=gpt2", "--zero 3 gathers modules one by one, and tied ones share a "
     "matrix; --zero 2 would work"),
    (2, "--regather --zero=1", "--regather means nothing to --zero 1; --zero 3 would work"),
    (4, "--like=llama3-8k", "--like llama3-8k is for 8 or 16 ranks, not 4; torchrun "
     "--nproc_per_node=8 would work"),
    (2, "--order=tp,dp", "--order: tp,dp does not name each axis once; pp,dp,cp,tp would (python "
     "09_5d.py --help lists the flags)"),
    (2, "--variant=torch --cp=2", "--cp means nothing to --variant torch; hand would work"),
    (2, "--variant=torch --zero=1", "--variant torch has no --zero 1; 2 would work"),
    (2, "--variant=torch --pp=2 --schedule=zb-h1", "--variant torch has no --schedule zb-h1 that "
     "takes DTensors; 1f1b would work"),
    (2, "--variant=torch --preset=gpt2", "--variant torch does not know tied tables, as --preset "
     "gpt2 has; hand would work"),
    (4, "--variant=torch --pp=4 --batch=2 --layers=4 --dp=1", "1f1b on --pp 4 takes 4 or more "
     "micro-batches, not 2; --batch 4 would work"),
])  # fmt: skip
def test_refusals(run_chapter, world, flags, line):
    flags = (*FLOAT64, *flags.split())
    status, output, errors = run_chapter(NINE, *flags, WORLD_SIZE=world, RANK=0)
    assert (status, output, errors) == (2, "", f"error: {line}\n")


@pytest.mark.parametrize("world", [8, 16])
@pytest.mark.parametrize("like", ["llama3-8k", "llama3-128k", "deepseek-v3", "megatron-1t"])
def test_published_runs_fit(nine, like, world):
    args = cli.parse(nine.__file__, "", nine.VARIANTS, nine.flags, [f"--like={like}"])
    nine.requires(args, world)
    assert args.pp * args.dp * args.cp * args.tp == world and args.pp > 1
    degrees, gpus = nine.LIKE[like].degrees, {"llama3-8k": 8192, "llama3-128k": 16384,
                                              "deepseek-v3": 2048, "megatron-1t": 3072}
    for axis in degrees:
        if (like, world, axis) != ("llama3-128k", 8, "dp"):  # four axes take 16 ranks
            assert getattr(args, axis) > 1  # the same axes
    assert math.prod(degrees.values()) == gpus[like] * degrees.get("ep", 1)
