"""Chapter 11: Newton-Schulz and Muon, as PyTorch has them, and each way of ZeRO as on one GPU."""

import copy
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common
from common import Config, Cut, part
from tests.conftest import SMALL, STEPS, TEXT, chapter, hold_to_one_gpu, run_main

ELEVEN = "11_muon"
CONFIG = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # SMALL
FLOAT64 = (*SMALL, STEPS, f"--data={TEXT}", "--dtype=float64", "--ignore=0.5")


@pytest.fixture(scope="module")
def eleven():
    return chapter(ELEVEN)


def full(*values):
    """A case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


# ------------------------------------------------------------------------------- Newton-Schulz


def with_values(values, m, n):
    """Random U, V^T and U S V^T, (m, n), in float64."""
    u, _, v = torch.linalg.svd(torch.randn(m, n, dtype=torch.float64), False)
    return u, v, u * values @ v


def polynomial(s):
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize(("m", "n"), [(24, 24), (12, 40), (40, 12), (1, 7), (7, 1)])
def test_singular_values_come_near_to_one_and_directions_stay(eleven, m, n):
    """However large they are; and of each expert by itself."""
    values = torch.rand(min(m, n), dtype=torch.float64) * 0.99 + 0.01
    u, v, x = with_values(values, m, n)
    assert (values / values.norm()).min() > 0.002
    for scale in (1e-3, 1.0, 1e5):
        found = u.T @ eleven.orthogonalize(scale * x) @ v.T
        diagonal = found.diagonal()
        assert (found - diagonal.diag()).abs().max() < 1e-12
        assert 0.68 < diagonal.min() and diagonal.max() < 1.21
        assert torch.allclose(diagonal, polynomial(values / values.norm()), rtol=0, atol=1e-12)
    experts = torch.stack([x, -x, torch.randn_like(x)])
    for one, found in zip(experts, eleven.orthogonal(experts)):
        assert torch.equal(eleven.orthogonal(one), found)


def test_the_range_that_the_lesson_states():
    values = polynomial(torch.linspace(0.002, 1, 100_001, dtype=torch.float64))
    assert values.min().item() == pytest.approx(0.68, abs=0.005)
    assert values.max().item() == pytest.approx(1.205, abs=0.005)
    assert polynomial(torch.tensor(1e-6)).item() == pytest.approx(1e-6 * 3.4445**5, rel=1e-4)
    assert polynomial(torch.tensor(0.001)) < 0.68


def test_a_matrix_of_zeros_stays_one(eleven):
    assert not eleven.orthogonal(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_an_updates_root_mean_square_is_that_of_the_lesson(eleven, shape):
    """0.2, times singular values of 0.68 to 1.21."""
    p = nn.Parameter(torch.zeros(shape))
    p.global_name, p.grad = "block1.a", torch.randn(shape)
    eleven.Muon([p], 1.0, weight_decay=0.0).step()
    assert 0.2 * 0.68 < p.detach().square().mean().sqrt() < 0.2 * 1.21


def test_a_sum_of_gram_matrices_would_do_under_tp(eleven):
    """As the lesson says: it gives what each rank multiplies its own part of the longer side by."""
    x = torch.randn(6, 24, dtype=torch.float64)
    parts, one = (x / x.norm()).chunk(4, dim=1), torch.eye(6, dtype=torch.float64)
    gram, product = sum(part @ part.T for part in parts), one   # the sum is an all_reduce
    for _ in range(5):
        step = 3.4445 * one - 4.7750 * gram + 2.0315 * gram @ gram
        product, gram = step @ product, step @ gram @ step
    found = torch.cat([product @ part for part in parts], dim=1)
    assert torch.allclose(found, eleven.orthogonalize(x), rtol=0, atol=1e-12)
    assert 2 * gram.numel() == x.numel() / 2  # what an MLP of 4·h sends: half of a gather


def of_rank(rank, m, n):
    return torch.randn(m, rank) @ torch.randn(rank, n)


def test_bf16_is_as_far_off_as_the_lesson_says(eleven):
    """Relative to the largest entry: little where all singular values are of one size, and half of
    it where most are zero."""
    def off(x):
        exact = eleven.orthogonalize(x)
        rounded = eleven.orthogonalize(x.bfloat16())
        assert rounded.dtype == torch.bfloat16
        return ((rounded.float() - exact).abs().max() / exact.abs().max()).item()

    for m, n in ((512, 128), (128, 512), (128, 128)):
        assert 0.01 < off(torch.randn(m, n)) < 0.025
    assert 0.3 < off(of_rank(20, 512, 128)) < 0.8


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
COVERING = {(1, "owner", 2), (2, "gather", 2), (3, "deal", 3), (3, "owner", 1), (3, "gather", 1),
            (4, "deal", 2), (4, "owner", 3), (8, "deal", 1)}  # fmt: skip


@pytest.mark.parametrize(("world", "way", "zero"), [
    (world, way, zero) if (world, way, zero) in COVERING else full(world, way, zero)
    for world in SETTINGS for way in ("deal", "gather", "owner") for zero in (1, 2, 3)])
def test_same_as_one_gpu(ranks, tmp_path, world, way, zero):
    flags = (*FLOAT64, *SETTINGS[world].split(), f"--variant={way}", f"--zero={zero}")
    results = ranks(world)(run_main, ELEVEN, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    (_, run, output), *_ = results
    checks = {check["name"]: check for check in run["checks"]}
    assert all(check["ok"] for check in checks.values())
    assert {"optimizer states", "FLOPs of a step, Newton-Schulz"} <= checks.keys()
    sends = {"deal": "all_to_all", "owner": "broadcast"}.get(way)
    assert world == 1 or sends is None or f"{sends}, payload" in checks


@pytest.mark.parametrize(("way", "zero"), [("owner", 2), full("deal", 1), full("gather", 2)])
def test_tied_embedding_and_head(ranks, tmp_path, way, zero):
    flags = (*FLOAT64, "--preset=gpt2", "--vocab=256", "--verify", f"--variant={way}",
             f"--zero={zero}", "--batch=6")
    hold_to_one_gpu(ranks(3)(run_main, ELEVEN, flags, tmp_path), flags)


@pytest.mark.parametrize(("world", "flags"), [
    (2, "deal --zero=3 --precision=bf16 --block=llama --micro-batch=1"),
    (3, "owner --zero=2 --precision=bf16 --recompute=full"),
    full(2, "gather --precision=bf16"),
    full(3, "deal --dtype=bfloat16"),
    (2, "torch --micro-batch=1"),
    full(3, "torch --block=llama --recompute=full"),
])
def test_in_bf16(ranks, tmp_path, world, flags):
    more = ("--dtype=float32", "--steps=2", f"--batch={2 * world}", *f"--variant={flags}".split())
    (status, run, output), *_ = ranks(world)(run_main, ELEVEN, (*FLOAT64, *more), tmp_path)
    assert status == 0 and all(check["ok"] is not False for check in run["checks"]), output
    assert run["variant"] == "torch" or all(check["ok"] for check in run["checks"])


@pytest.mark.parametrize("world", [3, full(2), full(4)])
def test_stages_agree_bit_for_bit(ranks, tmp_path, world):
    """And so do ways on the same shards: all orthogonalize the same numbers."""
    runs = []
    for variant in ("deal", "gather", "gather --zero=3"):
        more = ("--layers=1", f"--batch={world}", "--clip=0.1", *f"--variant={variant}".split())
        runs.append(ranks(world)(run_main, ELEVEN, (*FLOAT64, *more), tmp_path)[0][1])
    for run in runs[1:]:
        for what in ("loss", "grad_norm", "max_param_diff"):
            assert run[what] == runs[0][what]


def test_the_unbalance_is_told(eleven, ranks, tmp_path):
    flags = (*FLOAT64, "--variant=owner", "--batch=3", "--steps=1")
    (_, _, output), *_ = ranks(3)(run_main, ELEVEN, flags, tmp_path)
    shapes = 2 * [(32, 32), (16, 32), (16, 32), (32, 32), (128, 32), (32, 128)]
    costs = eleven.step_costs(shapes, 3)
    ratio = 3 * costs["owner"][1] / costs["gather"][1]
    assert ratio > 1
    assert f"Newton-Schulz: the busiest rank computes {ratio:.2f} times the mean" in output
    for way, (_, flops) in costs.items():
        assert f"{flops / 1e9:.3f} GFLOP on the busiest rank" in output
        assert f"  {way} " in output


# ------------------------------------------------------------------------------- a faulty chapter


def without_the_rest(eleven):
    """Each rank orthogonalizes what it has, as if that were a matrix: nothing is sent."""
    def way(shards, updates):
        for update in updates:
            update.copy_(eleven.orthogonal(update[None])[0])
    return way


def of_its_own(eleven):
    """All of a matrix, as if the other parts were as this rank's."""
    def whole(x, cuts):
        for cut in cuts:
            x = torch.cat([x] * cut.parts, cut.dim)
        return x
    return whole


FAULTS = {"what it has": ("WAYS", lambda eleven: {"deal": without_the_rest(eleven)}),
          "its own part": ("whole", of_its_own)}  # fmt: skip


def run_with(fault, name, flags, folder):
    """For a rank of the pool: a chapter's run with something wrong in 11's optimizer."""
    eleven, (what, wrong) = chapter(ELEVEN), FAULTS[fault]
    with mock.patch.object(eleven, what, wrong(eleven)):
        return run_main(name, flags, folder)


@pytest.mark.parametrize(("fault", "name", "flags"), [
    ("what it has", ELEVEN, "--variant=deal"),
    ("its own part", "04_tensor_parallel", "--optimizer=muon"),
])
def test_a_broken_optimizer_is_seen(ranks, tmp_path, fault, name, flags):
    flags = (*FLOAT64, "--batch=4", *flags.split())
    (status, _, output), *_ = ranks(2)(run_with, fault, name, flags, tmp_path)
    assert status == 1 and "✗ parameters" in output, output


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


def named(name, *shape):
    p = nn.Parameter(torch.zeros(shape))
    p.global_name = name
    return p


def unit(begin, length):
    """A shard, from `begin` on, of a unit with 2 + 6 + 3 + 12 numbers."""
    own = [named("block1.norm1.weight", 2), named("block1.attn.q.weight", 2, 3),
           named("head.out.weight", 3, 1), named("block1.mlp.up", 2, 2, 3)]
    shard = nn.Parameter(torch.arange(begin, begin + length, dtype=torch.float32))
    shard.flat = own, begin, "group"
    return own, shard


@pytest.mark.parametrize(("begin", "length", "runs"), [
    (0, 24, [(0, 0, 2), (1, 2, 8), (2, 8, 11), (3, 11, 23)]),   # all, and a number of padding
    (0, 2, [(0, 0, 2)]),
    (1, 3, [(0, 1, 2), (1, 2, 4)]),
    (4, 3, [(1, 4, 7)]),                                        # inside of one
    (8, 3, [(2, 8, 11)]),                                       # from where one begins to its end
    (7, 6, [(1, 7, 8), (2, 8, 11), (3, 11, 13)]),
    (22, 4, [(3, 22, 23)]),
    (24, 4, []),                                                # padding alone
])
def test_pieces_of(eleven, begin, length, runs):
    own, shard = unit(begin, length)
    pieces = eleven.pieces_of(shard)
    assert len(pieces) == len(runs)
    for (piece, where), (which, start, stop) in zip(pieces, runs):
        assert (where.start, where.stop) == (start - begin, stop - begin)
        assert piece.tolist() == list(range(start, stop))
        assert piece.flat[0][0] is own[which] and piece.flat[2] == "group"
        assert piece.flat[1] == start - [0, 2, 8, 11][which]    # as a checkpoint places it
        assert piece.data_ptr() == shard[where].data_ptr()      # a view
        assert eleven.parameter_of(piece) is own[which]
        assert eleven.is_matrix(piece) == (which in (1, 3))


def test_matrices_of(eleven):
    """q, and each of the two experts': neither norms nor the head."""
    own, shard = unit(6, 6)
    found = eleven.matrices_of([shard], [shard.data])
    assert [(x.p is own[1], x.begin, x.shape) for x in found] == [
        (True, 2, (2, 3)), (False, 11, (2, 3)), (False, 17, (2, 3))]
    lengths = [[x.length(rank) for rank in range(4)] for x in found]
    assert lengths == [[4, 2, 0, 0], [0, 1, 5, 0], [0, 0, 1, 5]]
    assert found[1].run_on(1) == slice(5, 6) and found[1].run_on(2) == slice(0, 5)


def test_owners_have_whole_matrices(eleven):
    model = common.gpt(CONFIG, None)
    for n in (1, 2, 3, 5, 16):
        units = eleven.layout(model, n, by_owner=True)
        assert sum(len(own) for own, _ in units) == len(list(model.parameters()))
        busy = [0] * n
        for own, sizes in units:
            assert len(sizes) == n
            edges = {sum(sizes[:rank]) for rank in range(n + 1)}
            at = 0
            for p in own:
                if eleven.is_matrix(p):
                    inside = [edge for edge in edges if at < edge < at + p.numel()]
                    assert not inside
                    owner = sum(edge <= at for edge in sorted(
                        sum(sizes[:rank + 1]) for rank in range(n)))
                    busy[owner] += eleven.work(p.shape)
                at += p.numel()
        shapes = [p.shape for p in model.parameters() if eleven.is_matrix(p)]
        assert max(busy) == eleven.step_costs(shapes, n)["owner"][1]
        assert sum(busy) == sum(map(eleven.work, shapes))


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
    assert ranks(4)(gathered_along_cuts) == 4 * [9 * [True]]


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("name", "flags", "says"), [
    (ELEVEN, "--optimizer=adamw",
     "--optimizer adamw is chapter 03's; --optimizer muon would work"),
    (ELEVEN, "--preset=gpt2 --vocab=256 --zero=3",
     "--preset gpt2 ties embedding and head, which --zero 3 gathers one by one; --zero 2 would "
     "work"),
    (ELEVEN, "--variant=torch --zero=2", "--zero"),
    (ELEVEN, "--zero=4", "--zero"),
    ("03_zero", "--variant=torch --optimizer=muon",
     "--variant torch has --optimizer muon in chapters 01, 02 and 11 alone; --optimizer adamw "
     "would work"),
    ("09_5d", "--variant=torch --optimizer=muon", "in chapters 01, 02 and 11 alone"),
])
def test_refusals(run_chapter, name, flags, says):
    status, out, err = run_chapter(name, *SMALL, f"--data={TEXT}", *flags.split())
    assert status == 2 and out == "" and says in err and err.count("\n") == 1, err


def test_a_state_dict_goes_on_and_a_rate_is_both_halves(eleven):
    """And a parameter without a gradient stays as it is, as in PyTorch's."""
    def made():
        torch.manual_seed(0)
        found = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
        for name, p in zip(("block1.a", "embedding.weight", "block1.frozen"), found):
            p.global_name = name
        return found, eleven.ShardedMuon(found, 0.1)

    def steps(parameters, optimizer, count):
        for _ in range(count):
            for p in parameters[:2]:
                p.grad = torch.randn(4, 6)
            optimizer.step()

    (quiet, unbroken), (others, fresh) = made(), made()
    steps(quiet, unbroken, 2)
    for p, other in zip(quiet, others):
        other.data.copy_(p.data)
    fresh.load_state_dict(copy.deepcopy(unbroken.state_dict()))
    for group in (*unbroken.param_groups, *fresh.param_groups):
        group["lr"] = 0.05
    for parameters, optimizer in ((quiet, unbroken), (others, fresh)):
        torch.manual_seed(1)
        steps(parameters, optimizer, 2)
    for p, other, start in zip(quiet, others, made()[0]):
        assert torch.equal(p, other)
        assert torch.equal(p, start) == (p.global_name == "block1.frozen")
    fresh.param_groups[1]["lr"] = 0.0
    before = others[1].detach().clone()
    steps(others, fresh, 1)
    assert torch.equal(others[1], before) and not torch.equal(others[0], quiet[0])


# ------------------------------------------------------------------------------- other chapters

MUON = (*FLOAT64, "--optimizer=muon", "--clip=0.5")
ELSEWHERE = [
    ("01_single_gpu", 1, "--batch=4 --micro-batch=2"),
    full("02_data_parallel", 3, "--batch=6 --block=llama"),
    ("03_zero", 3, "--variant=zero1 --batch=6 --block=llama"),
    full("03_zero", 2, "--variant=zero2 --batch=4 --offload --precision=bf16"),
    ("03_zero", 4, "--variant=zero3 --batch=8 --micro-batch=1 --offload --precision=bf16"),
    full("03_zero", 4, "--variant=hsdp --shard-size=2 --batch=8"),
    ("04_tensor_parallel", 4, "--batch=4 --block=llama"),       # two kv heads for four ranks
    full("05_sequence_parallel", 2, "--batch=4"),
    full("06_context_parallel", 2, "--batch=4"),
    full("07_pipeline_parallel", 2, "--batch=4 --micro-batch=1"),
    ("08_expert_parallel", 4, "--batch=8 --experts=8 --ep=2"),
    ("09_5d", 8, "--dp=2 --cp=2 --tp=2 --zero=3 --batch=4 --precision=bf16"),
    full("09_5d", 8, "--dp=2 --tp=4 --zero=1 --batch=4 --block=llama"),
    # whose parts, cut by tp, would be dealt in another way than whole matrices
    ("09_5d", 6, "--dp=3 --tp=2 --zero=1 --batch=6 --layers=1 --kv-heads=4 --ffn=48"),
    ("09_5d", 8, "--dp=4 --tp=2 --ep=4 --experts=4 --zero=2 --batch=8 --shared-expert"),
    full("09_5d", 8, "--pp=2 --dp=2 --tp=2 --ep=2 --experts=4 --zero=1 --batch=8"),
]


@pytest.mark.parametrize(("name", "world", "flags"), ELSEWHERE)
def test_every_chapter_takes_it(ranks, tmp_path, name, world, flags):
    flags = (*MUON, *flags.split())
    results = ranks(world)(run_main, name, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    checks = {check["name"]: check for check in results[0][1]["checks"]}
    assert checks["FLOPs of a step, Newton-Schulz"]["measured"] > 0
    assert not math.isnan(results[0][1]["loss"][-1])
