"""Chapter 11: Newton-Schulz and Muon, as PyTorch has them, and each way of ZeRO as on one GPU."""

import copy
import itertools
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common
from common import Config, Cut, part
from tests.conftest import SMALL, STEPS, TEXT, chapter, hold_to_one_gpu, run_main, sample
from tests.support.refused import hold_refusals

ELEVEN = "11_muon"
CONFIG = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # SMALL
FLOAT64 = (*SMALL, STEPS, f"--data={TEXT}", "--dtype=float64", "--ignore=0.5")


@pytest.fixture(scope="module")
def eleven():
    return chapter(ELEVEN)


# ------------------------------------------------------------------------------- Newton-Schulz


def with_values(values, m, n):
    """Random U, V^T and U S V^T, (m, n), in float64."""
    u, _, v = torch.linalg.svd(torch.randn(m, n, dtype=torch.float64), False)
    return u, v, u * values @ v


def polynomial(s):
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def test_singular_values_come_near_to_one_and_directions_stay(eleven):
    """However large they are; and of each expert by itself."""
    for m, n in ((24, 24), (12, 40), (40, 12), (1, 7), (7, 1)):
        values = torch.rand(min(m, n), dtype=torch.float64) * 0.99 + 0.01
        u, v, x = with_values(values, m, n)
        for scale in (1e-3, 1.0, 1e5):
            found = u.T @ eleven.orthogonalize(scale * x) @ v.T
            diagonal = found.diagonal()
            assert (found - diagonal.diag()).abs().max() < 1e-12
            assert 0.68 < diagonal.min() and diagonal.max() < 1.21
            assert torch.allclose(diagonal, polynomial(values / values.norm()), rtol=0, atol=1e-12)
        experts = torch.stack([x, -x, torch.randn_like(x)])
        for one, found in zip(experts, eleven.orthogonal(experts)):
            assert torch.equal(eleven.orthogonal(one), found)
    assert not eleven.orthogonal(torch.zeros(2, 3, 4)).any()


def test_an_updates_root_mean_square_is_that_of_the_lesson(eleven):
    """0.2, times singular values of 0.68 to 1.21."""
    for shape in ((64, 64), (32, 96), (96, 32)):
        p = nn.Parameter(torch.zeros(shape))
        p.global_name, p.grad = "block1.a", torch.randn(shape)
        eleven.Muon([p], 1.0, weight_decay=0.0).step()
        assert 0.2 * 0.68 < p.detach().square().mean().sqrt() < 0.2 * 1.21


# ------------------------------------------------------------------------------- PyTorch's Muon


def off_from_pytorchs(eleven, gated, dtype, rounded=None):
    """After five steps of random gradients: the largest difference of a parameter, over its largest
    number."""
    model = common.gpt(Config(2, 32, 4, 2, 16, 50, gated=gated, ffn=40), dtype=dtype)
    other = copy.deepcopy(model)
    for p in model.parameters():
        p.rounded = rounded or dtype
    ours = eleven.Muon(model.parameters(), 2e-3)
    matrices = [p for module in other[1:-1] for p in module.parameters() if p.ndim == 2]
    assert len(matrices) == (14 if gated else 12)
    is_ours = {id(p) for p in matrices}
    theirs = torch.optim.Muon(matrices, 2e-3, weight_decay=0.01, momentum=0.95,
                              adjust_lr_fn="match_rms_adamw")
    adamw = common.OPTIMIZERS["adamw"]([p for p in other.parameters() if id(p) not in is_ours],
                                       2e-3)
    # PyTorch's own rounds what it orthogonalizes to bf16, always
    as_it_is = {torch.float64: torch.Tensor.clone}.get(dtype, torch.Tensor.bfloat16)
    for _ in range(5):
        for p, q in zip(model.parameters(), other.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        with mock.patch.object(torch.Tensor, "bfloat16", as_it_is):
            theirs.step()
        adamw.step()
    for p, q in zip(model.parameters(), other.parameters()):
        states = {**theirs.state, **adamw.state}[q]
        assert ours.state[p].keys() == states.keys()
    return max(((p - q).abs().max() / q.abs().max()).item()
               for p, q in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("gated", [False, True])
def test_equals_pytorchs_in_float64(eleven, gated):
    assert off_from_pytorchs(eleven, gated, torch.float64) < 1e-12


def test_equals_pytorchs_bit_for_bit_where_both_round_to_bf16(eleven):
    """bf16 parameters, and fp32 masters of them."""
    assert off_from_pytorchs(eleven, True, torch.bfloat16) == 0
    assert off_from_pytorchs(eleven, False, torch.float32, torch.bfloat16) == 0
    assert off_from_pytorchs(eleven, False, torch.float32) > 1e-5  # where only they do


# ------------------------------------------------------------------------------- same as one GPU

SETTINGS = {  # of 3 ranks, units have padding; 8 are more than there are matrices
    1: "--batch=6 --micro-batch=2 --clip=0.1",
    2: "--batch=8 --micro-batch=1 --clip=0.1 --recompute=full",
    3: "--batch=6 --kv-heads=4 --vocab=257 --ffn=51",
    4: "--batch=8 --micro-batch=1 --block=llama --recompute=selective --precision=bf16",
    8: "--layers=1 --batch=16 --micro-batch=1 --clip=0.1 --vocab=259",
}
COVERING = [(3, "deal", 3), (1, "owner", 2), (2, "gather", 2), (3, "owner", 1), (3, "gather", 1),
            (2, "deal", 2), (4, "deal", 1), (4, "owner", 3), (8, "owner", 1)]  # fmt: skip


@pytest.mark.parametrize(("world", "way", "zero"), sample(dict.fromkeys([
    *COVERING, *itertools.product(SETTINGS, ("deal", "gather", "owner"), (1, 2, 3))]),
    size=len(COVERING)))  # fmt: skip
def test_same_as_one_gpu(ranks, tmp_path, world, way, zero):
    flags = (*FLOAT64, *SETTINGS[world].split(), f"--variant={way}", f"--zero={zero}")
    results = ranks(world, timeout=120)(run_main, ELEVEN, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    (_, run, output), *_ = results
    checks = {check["name"]: check for check in run["checks"]}
    assert all(check["ok"] for check in checks.values())
    assert {"optimizer states", "FLOPs of a step, Newton-Schulz"} <= checks.keys()
    sends = {"deal": "all_to_all", "owner": "broadcast"}.get(way)
    assert world == 1 or sends is None or f"{sends}, payload" in checks


@pytest.mark.parametrize(("way", "zero"), sample([("owner", 2), ("deal", 1), ("gather", 2)]))
def test_tied_embedding_and_head(ranks, tmp_path, way, zero):
    flags = (*FLOAT64, "--preset=gpt2", "--vocab=256", "--verify", f"--variant={way}",
             f"--zero={zero}", "--batch=6")
    hold_to_one_gpu(ranks(3, timeout=120)(run_main, ELEVEN, flags, tmp_path), flags)


@pytest.mark.parametrize(("world", "flags"), sample([
    (2, "deal --zero=3 --precision=bf16 --block=llama --micro-batch=1"),
    (2, "torch --micro-batch=1"),
    (3, "owner --zero=2 --precision=bf16 --recompute=full"),
    (2, "gather --precision=bf16"),
    (3, "deal --dtype=bfloat16"),
    (3, "torch --block=llama --recompute=full"),
], size=2))  # fmt: skip
def test_in_bf16(ranks, tmp_path, world, flags):
    more = ("--dtype=float32", "--steps=2", f"--batch={2 * world}", *f"--variant={flags}".split())
    flags = (*FLOAT64, *more)
    (status, run, output), *_ = ranks(world, timeout=120)(run_main, ELEVEN, flags, tmp_path)
    assert status == 0 and all(check["ok"] is not False for check in run["checks"]), output
    assert run["variant"] == "torch" or all(check["ok"] for check in run["checks"])


@pytest.mark.parametrize("world", sample([3, 2, 4]))
def test_stages_agree_bit_for_bit(eleven, ranks, tmp_path, world):
    """And so do ways on the same shards: all orthogonalize the same numbers. The report tells how
    unbalanced owners are, and what each way costs."""
    runs = []
    for variant in ("deal", "gather", "gather --zero=3", "owner"):
        more = ("--layers=1", f"--batch={world}", "--clip=0.1", *f"--variant={variant}".split())
        runs.append(ranks(world, timeout=120)(run_main, ELEVEN, (*FLOAT64, *more), tmp_path)[0])
    *records, (_, _, output) = runs
    for _, run, _ in records[1:]:
        for what in ("loss", "grad_norm", "max_param_diff"):
            assert run[what] == records[0][1][what]
    costs = eleven.step_costs([(32, 32), (16, 32), (16, 32), (32, 32), (128, 32), (32, 128)], world)
    ratio = world * costs["owner"][1] / costs["gather"][1]
    assert ratio >= 1 and f" {ratio:.2f} times the mean" in output
    for _, flops in costs.values():
        assert f"{flops / 1e9:.3f} GFLOP" in output


# ------------------------------------------------------------------------------- who gets what


def test_share_out(eleven):
    """The largest first, each to who has least so far."""
    assert eleven.share_out([1, 5, 3, 3], 2) == [0, 0, 1, 1]        # 5 + 1, and 3 + 3
    assert eleven.share_out([2, 2, 2], 5) == [0, 1, 2]
    assert eleven.share_out([], 3) == [] and eleven.share_out([4, 7], 1) == [0, 0]
    assert eleven.share_out([3, 3, 2, 2, 2], 2) == [0, 1, 0, 1, 0]  # 7 and 5, where 6 and 6 is best


def test_work_and_what_a_step_costs(eleven):
    assert eleven.work((2, 3)) == eleven.work((3, 2)) == 5 * (4 * 4 * 3 + 2 * 8)
    assert eleven.work((4, 2, 3)) == eleven.work((2, 3))            # of one of four experts
    assert eleven.work((2, 3), steps=1) == 64
    assert eleven.work((4096, 4096)) / (6 * 4e6 * 4096**2) == pytest.approx(0.65 / 128, rel=0.01)
    shapes = [(2, 2), (4, 2), (2, 4)]           # 4, 8, 8 numbers; 5 · (48, 80, 80) FLOPs
    assert eleven.step_costs(shapes, 2) == {
        "gather": (10, 1040), "owner": (0, 640), "deal": (10, 640)}
    assert eleven.step_costs(shapes, 4) == {
        "gather": (15, 1040), "owner": (0, 400), "deal": (7.5, 400)}
    assert eleven.step_costs(shapes, 1) == {
        "gather": (0, 1040), "owner": (0, 1040), "deal": (0, 1040)}


def gathered_along_cuts():
    """For one of 4 ranks: a (4, 6) cut into rows by pairs, and into columns among two pairs."""
    eleven, mesh = chapter(ELEVEN), dist.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("a", "b"))
    full, found = torch.arange(24.0).view(4, 6), []
    rows, columns = (mesh.get_group(axis) for axis in ("a", "b"))
    world = dist.group.WORLD
    for cuts in ([Cut(0, rows.rank(), 2, rows)],
                 [Cut(0, rows.rank(), 2, rows), Cut(1, columns.rank(), 2, columns)],
                 [Cut(1, world.rank() // 2, 2, world)]):        # neighbours hold the same
        found.append(torch.equal(eleven.whole(part(full, cuts), cuts), full))
        p = SimpleNamespace(ndim=2, cuts=cuts)
        found.append(eleven.has_copies(p) == (len(cuts) == 1 and cuts[0].group is world))
        found.append(torch.equal(eleven.orthogonal_part(p, part(full, cuts)),
                                 part(eleven.orthogonal(full), cuts)))
    return found


def test_whole_of_parts(ranks):
    assert ranks(4, timeout=120)(gathered_along_cuts) == 4 * [9 * [True]]


# ------------------------------------------------------------------------------- what is refused


def test_refusals(run_chapter):
    hold_refusals(run_chapter, ELEVEN, [
        ("--optimizer=adamw", 2, "--optimizer adamw", "--optimizer muon"),
        ("--preset=gpt2 --vocab=256 --zero=3", 2, "--preset gpt2", "--zero 2"),
        ("--variant=torch --zero=2", 2, "--zero", "--variant deal"),
    ])
    for name in ("03_zero", "09_5d"):
        hold_refusals(run_chapter, name, [
            ("--variant=torch --optimizer=muon", 2, "--optimizer muon", "--optimizer adamw")])


def test_a_rate_is_of_both_halves(eleven):
    """And a parameter without a gradient stays as it is, as in PyTorch's."""
    parameters = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    for name, p in zip(("block1.a", "embedding.weight", "block1.frozen"), parameters):
        p.global_name = name
    optimizer = eleven.ShardedMuon(parameters, 0.1)

    def moved(*rates):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        before = [p.detach().clone() for p in parameters]
        for p in parameters[:2]:
            p.grad = torch.randn(4, 6)
        optimizer.step()
        return [not torch.equal(p, old) for p, old in zip(parameters, before)]

    assert moved(0.1, 0.1) == [True, True, False]
    assert moved(0.05, 0.0) == [True, False, False]
    assert moved(0.0, 0.05) == [False, True, False]


# ------------------------------------------------------------------------------- other chapters

MUON = (*FLOAT64, "--optimizer=muon", "--clip=0.5")
ELSEWHERE = sample([
    ("03_zero", 4, "--variant=zero3 --batch=8 --micro-batch=1 --offload --precision=bf16"),
    ("04_tensor_parallel", 4, "--batch=4 --block=llama"),  # two kv heads for four ranks
    # parts, cut by tp, that would be dealt in another way than whole matrices
    ("09_5d", 6, "--dp=3 --tp=2 --zero=1 --batch=6 --layers=1 --kv-heads=4 --ffn=48"),
    ("09_5d", 4, "--dp=2 --tp=2 --ep=2 --experts=4 --zero=2 --batch=4 --shared-expert"),
    ("08_expert_parallel", 4, "--batch=8 --experts=8 --ep=2"),
    ("01_single_gpu", 1, "--batch=4 --micro-batch=2"),
    ("09_5d", 8, "--dp=4 --tp=2 --ep=4 --experts=4 --zero=2 --batch=8 --shared-expert"),
    ("09_5d", 8, "--dp=2 --cp=2 --tp=2 --zero=3 --batch=4 --precision=bf16"),
    ("09_5d", 8, "--dp=2 --tp=4 --zero=1 --batch=4 --block=llama"),
    ("09_5d", 8, "--pp=2 --dp=2 --tp=2 --ep=2 --experts=4 --zero=1 --batch=8"),
    ("02_data_parallel", 3, "--batch=6 --block=llama"),
    ("03_zero", 3, "--variant=zero1 --batch=6 --block=llama"),
    ("03_zero", 2, "--variant=zero2 --batch=4 --offload --precision=bf16"),
    ("03_zero", 4, "--variant=hsdp --shard-size=2 --batch=8"),
    ("05_sequence_parallel", 2, "--batch=4"),
    ("06_context_parallel", 2, "--batch=4"),
    ("07_pipeline_parallel", 2, "--batch=4 --micro-batch=1"),
], size=4)


@pytest.mark.parametrize(("name", "world", "flags"), ELSEWHERE)
def test_every_chapter_takes_it(ranks, tmp_path, name, world, flags):
    flags = (*MUON, *flags.split())
    results = ranks(world, timeout=200)(run_main, name, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    checks = {check["name"]: check for check in results[0][1]["checks"]}
    assert checks["FLOPs of a step, Newton-Schulz"]["measured"] > 0
    assert not math.isnan(results[0][1]["loss"][-1])
