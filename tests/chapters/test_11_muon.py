"""Chapter 11: Newton-Schulz and Muon, as PyTorch has them, and each way of ZeRO as on one GPU."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import common
from common import Config
from tests.conftest import SMALL, STEPS, TEXT, chapter, run_main, sample
from tests.support.runs import check_run, runs

ELEVEN = "11_muon"
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
    """What five steps of Newton-Schulz make of a singular value."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def test_singular_values_come_near_to_one_and_directions_stay(eleven):
    """However large they are; and of each expert by itself."""
    for m, n in ((24, 24), (12, 40), (40, 12), (1, 7), (7, 1)):
        values = torch.rand(min(m, n), dtype=torch.float64) * 0.99 + 0.01
        u, v, x = with_values(values, m, n)
        for scale in (1e-3, 1.0, 1e5):
            turned = u.T @ eleven.orthogonalize(scale * x) @ v.T
            diagonal = turned.diagonal()
            assert (turned - diagonal.diag()).abs().max() < 1e-12
            assert 0.68 < diagonal.min() and diagonal.max() < 1.21
            assert torch.allclose(diagonal, polynomial(values / values.norm()), rtol=0, atol=1e-12)
        experts = torch.stack([x, -x, torch.randn_like(x)])
        for one, result in zip(experts, eleven.orthogonal(experts)):
            assert torch.equal(eleven.orthogonal(one), result)
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


@pytest.mark.parametrize("run", runs("11"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    record, _ = check_run(ranks, tmp_path, run)
    names = [check["name"] for check in record["checks"]]
    assert "FLOPs of a step, Newton-Schulz" in names or record["variant"] == "torch"
    for variant, op in ("deal", "all_to_all"), ("owner", "broadcast"):
        sends = f"--variant={variant}" in run.flags and run.world > 1
        assert not sends or f"{op}, payload" in names


@pytest.mark.parametrize("run", runs("muon"))
def test_other_chapters_take_it(ranks, tmp_path, run):
    record, _ = check_run(ranks, tmp_path, run)
    [check] = [one for one in record["checks"] if one["name"] == "FLOPs of a step, Newton-Schulz"]
    assert check["measured"] > 0


@pytest.mark.parametrize("world", sample([3, 2, 4]))
def test_stages_agree_bit_for_bit(eleven, ranks, tmp_path, world):
    """And so do ways on the same shards: all orthogonalize the same numbers."""
    records = []
    for variant in ("deal", "gather", "gather --zero=3", "owner"):
        more = ("--layers=1", f"--batch={world}", "--clip=0.1", *f"--variant={variant}".split())
        results = ranks(world, timeout=120)(run_main, ELEVEN, (*FLOAT64, *more), tmp_path)
        records.append(results[0][1])
    first, *others, _ = records  # owners sum in another order
    for record in others:
        for what in ("loss", "grad_norm", "max_param_diff"):
            assert record[what] == first[what]


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
