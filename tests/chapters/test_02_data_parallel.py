"""Chapter 02: every way to sum the gradients gives one GPU's, and sends what the formulas say."""

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common
from lab.bench.machines import MACHINES
from tests.conftest import SMALL, STEPS, TEXT, chapter, hold_to_one_gpu, run_main

TWO = "02_data_parallel"
FLOAT64 = (*SMALL, STEPS, "--dtype=float64", "--ignore=0.5", f"--data={TEXT}")
CONFIG = common.Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # SMALL
VARIANTS = ("naive", "overlap", "bucket", "torch")


@pytest.fixture(scope="module")
def two():
    return chapter(TWO)


# ------------------------------------------------------------------------------- same as one GPU

SETTINGS = {
    "1 rank": (1, "--batch=6 --micro-batch=2 --clip=0.1"),
    "2 ranks": (2, "--batch=8 --micro-batch=1 --clip=0.1 --optimizer=momentum"),
    "3 ranks": (3, "--batch=6 --optimizer=sgd --kv-heads=4 --bucket-mb=0.01"),
    "4 ranks": (4, "--batch=8 --micro-batch=1 --bucket-mb=0.05 --batch-ramp 4 1"),
    "8 ranks": (8, "--layers=1 --batch=16 --micro-batch=1 --clip=0.1 --bucket-mb=0.02"),
    "tied": (2, "--preset=gpt2 --vocab=256 --verify --layers=1 --batch=4"),
}
COVERING = {  # each setting, and each variant with one micro-batch and with several. With the
    # timelines below, each pair of variant, block, precision and recomputation. Of 8 ranks, see 03.
    ("bucket", "1 rank"): "--block=llama --precision=bf16 --recompute=full",
    ("overlap", "2 ranks"): "--precision=bf16 --recompute=selective",
    ("torch", "2 ranks"): "--block=llama --precision=bf16 --recompute=full",
    ("naive", "3 ranks"): "--block=llama",
    ("overlap", "3 ranks"): "--block=llama --recompute=full",
    ("bucket", "3 ranks"): "",
    ("naive", "4 ranks"): "--block=llama --precision=bf16 --recompute=selective",
    ("torch", "4 ranks"): "--recompute=selective",
    ("bucket", "tied"): "--block=llama --precision=bf16 --recompute=selective",
    ("torch", "tied"): "--precision=bf16",
}


@pytest.mark.parametrize(("variant", "setting"), [
    pytest.param(*pair, marks=() if pair in COVERING else pytest.mark.full)
    for pair in itertools.product(VARIANTS, SETTINGS)])
def test_same_as_one_gpu(ranks, tmp_path, variant, setting):
    world, flags = SETTINGS[setting]
    known = [flag for flag in flags.split()
             if variant in ("bucket", "torch") or not flag.startswith("--bucket-mb")]
    more = COVERING.get((variant, setting), "").split()
    flags = (*FLOAT64, *known, *more, f"--variant={variant}")
    hold_to_one_gpu(ranks(world)(run_main, TWO, flags, tmp_path), flags)


def test_the_same_run_gives_the_same_bits(ranks, tmp_path):
    flags = (*SMALL, "--layers=1", "--steps=2", "--batch=6", "--micro-batch=1", f"--data={TEXT}")
    runs = [ranks(3)(run_main, TWO, flags, tmp_path)[0][1] for _ in range(2)]
    for key in ("loss", "grad_norm"):
        assert runs[0][key] == runs[1][key]


# ------------------------------------------------------------------------------- any module


class Odd(nn.Module):
    """A tied, a frozen and an unused layer, one that only some ranks use, running statistics."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.tied, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused, self.sometimes, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.single = nn.Parameter(torch.ones(4))
        self.double()
        self.single.data = self.single.data.float()  # a dtype of its own
        self.unused.bias.grad_dtype = torch.float32  # its gradient's
        self.unused.bias.data = self.unused.bias.data.bfloat16()

    def forward(self, x, sometimes):
        x = self.frozen(self.tied(self.first(self.norm(x)).tanh())) * self.single
        return self.sometimes(x) if sometimes else x


def gradients_of_an_odd_module(variant):
    two, rank, world = chapter(TWO), dist.get_rank(), dist.get_world_size()
    inputs = torch.arange(24.0 * world, dtype=torch.float64).sin().view(world, 3, 2, 4)
    expected, results = Odd(seed=0), []
    for bucket_bytes in (64, 200):  # `sometimes` has a bucket of its own, or one with others
        module = Odd(seed=rank)  # starts different on each rank
        replica = two.replicate(variant, module, dist.group.WORLD, bucket_bytes)
        assert replica.module is module
        for used_in in ({0, 1}, {0, 2}):  # by rank 0: only before the backward that sends; in it
            replica.zero_grad()
            for i, x in enumerate(inputs[rank]):
                replica.sends = i == 2
                replica(x, rank == 0 and i in used_in).square().sum().backward()
            replica.finish()
            expected.zero_grad()
            for r in range(world):
                for i, x in enumerate(inputs[r]):
                    expected(x, r == 0 and i in used_in).square().sum().backward()
            pairs = zip(module.named_parameters(), expected.parameters())
            results += copy.deepcopy([(name, p.grad, q.grad) for (name, p), q in pairs])
    return results


@pytest.mark.parametrize("variant", VARIANTS[:3])
@pytest.mark.parametrize("world", [1, 3])
def test_any_module(ranks, variant, world):
    results = ranks(world)(gradients_of_an_odd_module, variant)
    for name, gradient, expected in itertools.chain(*results):
        if name.startswith("frozen"):
            assert gradient is None
        elif name.startswith("unused"):
            assert not gradient.any() and expected is None
        else:
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)
    for (_, one, _), (_, other, _) in zip(results[0], results[-1]):
        assert one is None or one.equal(other)  # to the bit


def weights_after_wrapping():
    module = Odd(seed=dist.get_rank())
    module.norm.running_mean.fill_(dist.get_rank() + 5)
    replica = chapter(TWO).Naive(module, dist.group.WORLD)
    start = [t.tolist() for t in (*module.parameters(), *module.buffers())]
    module.norm.running_mean.fill_(dist.get_rank() + 7)
    module.norm.running_var.fill_(dist.get_rank() + 3)
    x = torch.ones(2, 4, dtype=torch.float64)
    replica.eval()(x, False)
    untouched = module.norm.running_mean[0].item()
    replica.train()(x * dist.get_rank(), False)
    return start, untouched, module.norm.running_mean[0].item(), module.norm.running_var[0].item()


def test_all_ranks_start_as_the_first(ranks):
    (start, *_), (other, untouched, mean, variance) = ranks(2)(weights_after_wrapping)
    assert start == other and untouched == 8  # in evaluation nothing is sent
    assert mean == pytest.approx(0.9 * 7 + 0.1 * 1)  # the first rank's 7, and this batch's mean
    assert variance == pytest.approx(0.9 * 3)  # the first rank's 3, and this batch's 0


def misused(variant):
    """Without finish(), a second backward's gradients would be lost: it raises on every rank."""
    two, group, x = chapter(TWO), dist.group.WORLD, torch.ones(2, 3)
    replica = two.replicate(variant, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), group, 40)
    for sends_next in (True, False):
        replica.sends = True
        replica(x).sum().backward()  # and no finish()
        replica.zero_grad()
        replica.sends = sends_next
        with pytest.raises(AssertionError, match="finish.. must come"):
            replica(x).sum().backward()
        replica.finish()


@pytest.mark.parametrize("variant", ["overlap", "bucket"])
def test_a_backward_without_finish_raises(ranks, variant):
    ranks(2)(misused, variant)


# ------------------------------------------------------------------------------- when it is sent


def when_it_starts(variant):
    """How many all_reduces have started at the end of each of three backwards, and after finish."""
    two, counts = chapter(TWO), []
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    replica = two.replicate(variant, model, dist.group.WORLD, 2 * 256)
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as started:
        for _ in range(2):
            replica.zero_grad()
            for replica.sends in (False, False, True):
                replica(torch.ones(2, 8)).sum().backward()
                counts.append(started.call_count)
            replica.finish()
            counts.append(started.call_count)
            started.reset_mock()
    return counts, [p.grad.untyped_storage().nbytes() for p in model.parameters()]


@pytest.mark.parametrize(("variant", "counts", "storages"), [
    ("naive", [0, 0, 0, 5], [256] * 5),
    ("overlap", [0, 0, 5, 5], [256] * 5),
    ("bucket", [0, 0, 3, 3], [256, 512, 512, 512, 512]),  # from the end: 2, 2 and 1
])
def test_it_is_sent_once_a_step_and_in_backward(ranks, variant, counts, storages):
    for measured, views in ranks(2)(when_it_starts, variant):
        assert measured == 2 * counts and views == storages


def replaced_gradients():
    """An optimizer's zero_grad sets gradients to None: they find their way back into the bucket."""
    two = chapter(TWO)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sometimes = nn.Linear(3, 3)
    replica, results = two.Bucket(nn.Sequential(sometimes, *model), dist.group.WORLD, 10**6), []
    for step in range(3):
        replica.module.zero_grad(set_to_none=True)
        x = torch.ones(2, 3) * (dist.get_rank() + 1)
        (model(x).sum() + (0 if step else sometimes(x).sum())).backward()
        replica.finish()
        results.append([p.grad.clone() for p in model.parameters()])
        assert sometimes.weight.grad.any() == (step == 0)  # later, nothing is left of it
    assert all(a.equal(b) for result in results for a, b in zip(result, results[0]))
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    return results[0][-1].tolist()


def test_gradients_that_were_set_to_none_are_not_lost(ranks):
    assert ranks(2)(replaced_gradients) == [[4.0] * 3] * 2  # 2 sequences on 2 ranks


def test_buckets_are_in_order_full_and_of_one_dtype(two):
    generator = torch.Generator().manual_seed(0)
    for capacity in (0, 1, 100, 1000, 10**9):
        sizes = torch.randint(1, 100, (40,), generator=generator).tolist()
        dtypes = [torch.float32 if size % 7 else torch.float64 for size in sizes]
        parameters = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
        for p, dtype in zip(parameters, dtypes):
            p.grad_dtype = dtype  # whose bytes are sent
        nbytes = lambda ps: sum(p.numel() * p.grad_dtype.itemsize for p in ps)
        buckets = two.fill_buckets(parameters, capacity)
        assert all(p is q for p, q in zip(parameters, sum(buckets, [])))
        assert sum(map(len, buckets)) == 40
        for bucket, following in zip(buckets, [*buckets[1:], None]):
            assert len({p.grad_dtype for p in bucket}) == 1
            assert nbytes(bucket[:-1]) < max(capacity, 1)  # not full before its last
            if following and following[0].grad_dtype == bucket[0].grad_dtype:
                assert nbytes(bucket) >= capacity


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_timeline_shows_what_hides_behind_backward(ranks, tmp_path, variant):
    """And the header names the flags of this variant alone."""
    bucketed = variant in ("bucket", "torch")
    flags = (*SMALL, "--steps=3", f"--data={TEXT}", f"--variant={variant}", "--batch=6")
    flags = (*flags, "--bucket-mb=0.05") if bucketed else flags
    if variant != "overlap":  # gradients are sent in fp32
        flags = (*flags, "--precision=bf16")
    flags = (*flags, "--recompute=full") if variant == "naive" else flags
    n = 3 if variant == "overlap" else 2
    (status, run, output), *_ = ranks(n)(run_main, TWO, flags, tmp_path)
    timeline, size = run["recorded"]["timeline"], 4 * CONFIG.parameters()
    [(begin, end)], gradients = timeline["backward"], timeline["gradients"]
    assert status == 0 and len(gradients) == 24 and gradients == sorted(gradients)
    assert 0 < begin < gradients[0] and gradients[-1] < end
    ops, sizes, starts, ends, _ = zip(*timeline["collectives"])
    assert set(ops) == {"all_reduce"} and sum(sizes) == size
    assert all(start < stop for start, stop in zip(starts, ends))
    overlap = run["recorded"]["overlap"]["all_reduce"]
    if variant == "naive":
        assert min(starts) > end and overlap["hidden"] < 0.01
    else:
        assert begin < starts[0] < end  # it starts while backward goes on
    assert ("bucket mb 0.05" in output) == bucketed and ("bucket mb" in output) == bucketed
    if variant == "overlap":
        check_against_the_formulas(run, size)
        wire, tokens = 4 / 3 * size, 2 * CONFIG.seq
        assert overlap["bandwidth"] == pytest.approx(wire / overlap["under way"])
        seconds = 4 * tokens * CONFIG.parameters() / overlap["flops"]
        assert overlap["ratio"] == pytest.approx(overlap["under way"] / seconds)
        assert f"B/s   {overlap['ratio']:.2f}\n" in output


# ------------------------------------------------------------------------------- the formulas


def check_against_the_formulas(run, size):
    """Of a run of 3 ranks."""
    checks = {check["name"]: (check["measured"], check["expected"]) for check in run["checks"]}
    assert checks["all_reduce, calls"] == (24, 24) and checks["all_reduce, payload"] == (size, size)
    assert checks["all_reduce, on the wire"] == (round(4 / 3 * size),) * 2
    assert run["comm"]["all_reduce"]["wire_bytes"] == pytest.approx(4 / 3 * size)
    assert checks["optimizer states"] == (2 * size + 4 * 24,) * 2


def test_when_communication_hides(two):
    # The playbook's A3: S/(2·tokens·parameters) · (N-1)/N · flops/bandwidth.
    ratio = two.communication_over_backward(2 * 7e9, 7e9, 4096, 8, 989e12, 50e9)
    assert ratio == pytest.approx(2 / (2 * 4096) * 7 / 8 * 989e12 / 50e9)
    for g in (2, 4):
        tokens = two.tokens_to_hide(g, 8, 989e12, 50e9)
        ratio = two.communication_over_backward(g * 1e9, 1e9, tokens, 8, 989e12, 50e9)
        assert ratio == pytest.approx(1)
    limits = [two.tokens_to_hide(2, math.inf, *rates) for rates in MACHINES.values()]
    assert limits == pytest.approx([1040, 12480, 2198, 19780, 2550], rel=1e-3)
    assert list(MACHINES)[-1].startswith("TPU v5p")  # the scaling book's 2550 for B/X > C/W


def test_the_lessons_tokens(two):
    """Of a machine, and of many: there the tokens grow with the ranks, up to the limit."""
    in_a_machine = two.tokens_to_hide(4, 8, *MACHINES["H100, NVLink 4"])
    needed = [two.tokens_to_hide(4, n, *MACHINES["H100, InfiniBand NDR"])
              for n in (1, 16, 10**6, math.inf)]
    assert needed == sorted(needed) and needed[0] == 0 and needed[2] == pytest.approx(needed[3])
    for tokens in (in_a_machine, needed[3]):
        assert f" {tokens:,.0f}" in two.__doc__


def test_bytes_on_the_wire(two):
    assert two.wire_bytes(1000, 1) == 0 and two.wire_bytes(1000, 4) == 1500


# ------------------------------------------------------------------------------- the batch


def test_a_ramp_grows_by_multiples_of_its_start(two):
    assert two.ramp(2, 8, 3) == [2, 4, 6]  # and then 8
    assert two.ramp(4, 8, 4) == [4] * 4 and two.ramp(8, 8, 2) == [8, 8]
    assert two.ramp(1, 8, 2) == [1, 4]  # what is left over comes in larger steps
    # DeepSeek-V3's, in sequences of 4,096 tokens: 14,909 steps of it have 469B.
    sizes = two.ramp(3072, 15360, 14_909)
    assert sizes == sorted(sizes) and set(sizes) == {3072, 6144, 9216, 12288}
    assert round(sum(sizes) * 4096 / 1e9) == 469


def test_the_batches_of_a_ramp(ranks, tmp_path):
    """With --noise-scale's count of tokens; and rank 0's one GPU has the same ones."""
    flags = (*SMALL, "--layers=1", "--steps=4", "--batch=6", "--batch-ramp", "2", "2",
             "--noise-scale", f"--data={TEXT}")
    (status, run, output), _ = ranks(2)(run_main, TWO, flags, tmp_path)
    assert status == 0 and "batch ramp 2 2, noise scale" in output, output
    tokens = [step[1] for step in run["recorded"]["noise"]["steps"]]
    assert tokens == [2 * 16, 4 * 16, 6 * 16, 6 * 16] and run["config"]["micro_batch"] == 1


def test_a_fault_in_a_ramp_is_named(ranks, tmp_path):
    """By whose sequences are whose, in a batch that is smaller than --batch."""
    flags = (*FLOAT64, "--layers=1", "--steps=1", "--batch=8", "--batch-ramp", "4", "2",
             "--micro-batch=1", "--variant=naive")
    fault = "/ valid\n        loss.backward()", (
        "/ (targets != -100).sum() / len(micro_batches) / 2\n        loss.backward()")
    (status, _, output), _ = ranks(2)(run_main, TWO, flags, tmp_path, fault)
    assert status == 1 and "the mean of the micro-batches' own means" in output, output


@pytest.mark.parametrize(("flags", "says"), [
    ("--batch=10 --batch-ramp 4 10", "--batch 10 is not a multiple of the START of --batch-ramp = "
     "4; --batch 12 would work"),
    ("--batch=12 --batch-ramp 6 10", "--batch-ramp 6 is not a multiple of 4 ranks x --micro-batch "
     "= 4; --batch-ramp 4 10 would work"),
    ("--batch=32 --micro-batch=2 --batch-ramp 12 10", "= 8; --batch-ramp 8 10 would work"),
    ("--batch=8 --batch-ramp 0 10", "--batch-ramp: 0 is no whole number in [1, 1000000); without "
     "--batch-ramp would work"),
    ("--batch=8 --batch-ramp 4", "expected 2 arguments (python 02_data_parallel.py --help lists "
     "the flags); without --batch-ramp would work"),
])
def test_a_ramp_that_does_not_fit(run_chapter, flags, says):
    status, out, err = run_chapter(TWO, *flags.split(), WORLD_SIZE=4, RANK=0, LOCAL_RANK=0,
                                   MASTER_ADDR="localhost", MASTER_PORT=1)  # fmt: skip
    assert (status, out, err.count("\n")) == (2, "", 1) and err.endswith(f"{says}\n"), err
