"""Chapter 02: every way to sum the gradients gives one GPU's, and sends what the formulas say."""

import pytest
import torch
import torch.distributed as dist
from conftest import TEXT, chapter, hold_to_one_gpu, run_main
from torch import nn

import common

TWO = "02_data_parallel"
SMALL = ("--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--steps=3")
FLOAT64 = (*SMALL, "--dtype=float64", "--ignore=0.5", f"--data={TEXT}")
VARIANTS = ("naive", "overlap", "bucket", "torch")


@pytest.fixture(scope="module")
def two():
    return chapter(TWO)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, ("--batch=6", "--micro-batch=2", "--clip=0.1")),
        (2, ("--batch=8", "--micro-batch=1", "--clip=0.1", "--optimizer=momentum")),
        (3, ("--batch=6", "--optimizer=sgd", "--kv-heads=4", "--bucket-mb=0.01")),
        (4, ("--batch=8", "--micro-batch=1", "--bucket-mb=0.05")),
        (8, ("--layers=1", "--batch=16", "--micro-batch=1", "--clip=0.1", "--bucket-mb=0.02")),
    ],
)
def test_same_as_one_gpu(ranks, tmp_path, variant, world, flags):
    flags = (*FLOAT64, *flags, f"--variant={variant}")
    hold_to_one_gpu(ranks(world)(run_main, TWO, flags, tmp_path), flags)


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("dist.all_reduce(tensor, group=group, async_op", "dist.barrier(group, async_op",
         "gradients"),
        ("loss_sum(replica(tokens), targets) / valid\n",
         "loss_sum(replica(tokens), targets) / 60\n", "loss"),
        ("        with contextlib.nullcontext() if last else replica.no_sync():",
         "        with contextlib.nullcontext():", "gradients"),
        ("self.view[p].copy_(p.grad)", "self.view[p].add_(p.grad)", "gradients"),
    ],
)  # fmt: skip
def test_a_broken_chapter_says_so(ranks, tmp_path, right, wrong, named):
    """Faults that a student might make."""
    flags = (*FLOAT64, "--batch=8", "--micro-batch=1", "--bucket-mb=0.02")
    (status, _, output), _ = ranks(2)(run_main, TWO, flags, tmp_path, (right, wrong))
    assert status == 1 and f"✗ {named}" in output, output


def test_the_same_run_gives_the_same_bits(ranks, tmp_path):
    flags = (*SMALL, "--batch=8", "--micro-batch=1", f"--data={TEXT}")
    runs = [ranks(4)(run_main, TWO, flags, tmp_path)[0][1] for _ in range(2)]
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

    def forward(self, x, sometimes):
        x = self.frozen(self.tied(self.first(self.norm(x)).tanh())) * self.single
        return self.sometimes(x) if sometimes else x


def gradients_of_an_odd_module(variant, steps):
    two, rank, world = chapter(TWO), dist.get_rank(), dist.get_world_size()
    module = Odd(seed=rank)  # starts different on each rank
    replica = two.replicate(variant, module, dist.group.WORLD, bucket_bytes=200)
    inputs = torch.arange(24.0 * world, dtype=torch.float64).sin().view(world, 3, 2, 4)
    expected = Odd(seed=0)
    results = []
    for _ in range(steps):
        replica.zero_grad()
        for i, x in enumerate(inputs[rank]):
            if i < 2:
                with replica.no_sync():
                    replica(x, rank == 0).square().sum().backward()
            else:
                replica(x, rank == 0 and i == 1).square().sum().backward()
        replica.finish()
        expected.zero_grad()
        for r in range(world):
            for i, x in enumerate(inputs[r]):
                expected(x, r == 0 and i < 2).square().sum().backward()
        results += [
            (name, p.grad, q.grad)
            for (name, p), q in zip(module.named_parameters(), expected.parameters())
        ]
    statistics = [b.tolist() for b in module.buffers()]
    return replica.module is module, results, statistics


@pytest.mark.parametrize("variant", VARIANTS[:3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_module(ranks, variant, world):
    answers = ranks(world)(gradients_of_an_odd_module, variant, 2)
    for kept, results, _ in answers:
        assert kept
        for name, gradient, expected in results:
            if name.startswith("frozen"):
                assert gradient is None
            elif name.startswith("unused"):
                assert not gradient.any() and expected is None
            else:
                torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_odd_module_is_equal_on_all_ranks(ranks):
    _, results, _ = zip(*ranks(3)(gradients_of_an_odd_module, "bucket", 1))
    for one, other in zip(results[0], results[2]):
        assert one[1] is None or one[1].equal(other[1])


def weights_after_wrapping():
    module = Odd(seed=dist.get_rank())
    module.norm.running_mean.fill_(dist.get_rank() + 5)
    replica = chapter(TWO).Naive(module, dist.group.WORLD)
    start = [t.tolist() for t in (*module.parameters(), *module.buffers())]
    module.norm.running_mean.fill_(dist.get_rank() + 7)
    module.norm.running_var.fill_(dist.get_rank() + 3)
    replica.eval()(torch.ones(2, 4, dtype=torch.float64), False)
    untouched = module.norm.running_mean[0].item()
    replica.train()(torch.ones(2, 4, dtype=torch.float64) * dist.get_rank(), False)
    means = module.norm.running_mean[0].item(), module.norm.running_var[0].item()
    return start, untouched, means


def test_all_ranks_start_as_the_first(ranks):
    (start, _, _), (other, untouched, (mean, variance)) = ranks(2)(weights_after_wrapping)
    assert start == other and untouched == 8  # in evaluation nothing is sent
    assert mean == pytest.approx(0.9 * 7 + 0.1 * 1)  # the first rank's 7, and this batch's mean
    assert variance == pytest.approx(0.9 * 3)  # the first rank's 3, and this batch's 0


# ------------------------------------------------------------------------------- when it is sent


def when_it_starts(variant):
    """How many all_reduces have started at the end of each of three backwards, and after finish."""
    two, started = chapter(TWO), []

    def start(tensor, group):
        started.append(tensor)
        return two.all_reduce(tensor, group)

    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    replica = two.replicate(variant, model, dist.group.WORLD, 2 * 256, start)
    counts = []
    for _ in range(2):
        replica.zero_grad()
        for last in (False, False, True):
            context = two.contextlib.nullcontext() if last else replica.no_sync()
            with context:
                replica(torch.ones(2, 8)).sum().backward()
            counts.append(len(started))
        replica.finish()
        counts.append(len(started))
        started.clear()
    views = [p.grad.untyped_storage().nbytes() for p in model.parameters()]
    return counts, views


@pytest.mark.parametrize(
    ("variant", "counts", "storages"),
    [
        ("naive", [0, 0, 0, 5], [256] * 5),
        ("overlap", [0, 0, 5, 5], [256] * 5),
        ("bucket", [0, 0, 3, 3], [256, 512, 512, 512, 512]),  # from the end: 2, 2 and 1
    ],
)
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
        parameters = [torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes)]
        buckets = two.fill_buckets(parameters, capacity)
        assert all(p is q for p, q in zip(parameters, sum(buckets, [])))
        assert sum(map(len, buckets)) == 40
        for bucket, following in zip(buckets, [*buckets[1:], None]):
            assert len({p.dtype for p in bucket}) == 1
            assert sum(p.nbytes for p in bucket[:-1]) < max(capacity, 1)  # not full before its last
            if following and following[0].dtype == bucket[0].dtype:
                assert sum(p.nbytes for p in bucket) >= capacity


# ------------------------------------------------------------------------------- the formulas


def test_tied_embedding_and_head(ranks, tmp_path):
    flags = (*FLOAT64, "--preset=gpt2", "--vocab=256", "--verify", "--layers=1", "--batch=4")
    (status, run, output), _ = ranks(2)(run_main, TWO, flags, tmp_path)
    assert status == 0 and run["max_grad_diff"] < 1e-12, output


@pytest.mark.parametrize("value", ["-1", "nan", "x"])
def test_bad_capacity(run_chapter, value):
    status, output, errors = run_chapter(TWO, f"--bucket-mb={value}")
    assert status == 2 and output == "" and errors.startswith(f"error: --bucket-mb: {value} is no")


def test_traffic_is_checked_against_the_formulas(ranks, tmp_path):
    flags = (*FLOAT64, "--batch=9", "--variant=overlap")
    (_, run, _), *_ = ranks(3)(run_main, TWO, flags, tmp_path)
    checks = {check["name"]: (check["measured"], check["expected"]) for check in run["checks"]}
    size = 8 * common.Config(2, 32, 4, 2, 16, 256).parameters()
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
        assert two.communication_over_backward(g * 1e9, 1e9, tokens, 8, 989e12, 50e9) == (
            pytest.approx(1)
        )
    v5p = two.tokens_to_hide(2, 10**9, *two.MACHINES["TPU v5p, one axis of ICI"])
    assert v5p == pytest.approx(2550, rel=1e-3)  # the scaling book's number for B/X > C/W
    needed = [two.tokens_to_hide(2, 10**9, *rates) for rates in two.MACHINES.values()]
    assert needed == pytest.approx([1040, 12480, 2198, 19780, 2550], rel=1e-3)
    assert two.wire_bytes(1000, 1) == 0 and two.wire_bytes(1000, 4) == 1500


# ------------------------------------------------------------------------------- the picture


def test_hidden_share(two):
    spans = [(0, 2, 0), (1, 3, 0), (5, 6, 0)]  # under way from 0 to 3 and from 5 to 6
    for end, share in ((0, 0), (1, 1 / 4), (2.5, 2.5 / 4), (4, 3 / 4), (5.5, 3.5 / 4), (9, 1)):
        assert two.hidden_share(end, spans) == pytest.approx(share)
    assert two.hidden_share(1, [(0, 4, 0), (1, 2, 0)]) == pytest.approx(1 / 4)
    assert two.hidden_share(1, []) == 0


def test_lanes_do_not_overlap(two):
    spans = [(0, 2, 0), (1, 3, 0), (2, 4, 0), (2.5, 5, 0), (3, 4, 0)]
    assert two.lanes(spans) == [0, 1, 0, 2, 1]


def timelines():
    two = chapter(TWO)
    args = common.argparse.Namespace(
        model=common.Config(2, 32, 4, 2, 16, 256), seed=0, dtype="float32", bucket_mb=0.05
    )
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    group, device = dist.group.WORLD, torch.device("cpu")
    return {v: two.record_timeline(v, args, group, device, tokens, tokens) for v in VARIANTS[:3]}


def test_timestamps_are_in_order(ranks, two, tmp_path):
    lines = ranks(2)(timelines)[0]
    for variant, (end, gradients, spans) in lines.items():
        assert len(gradients) == 24 and gradients == sorted(gradients)
        assert 0 < gradients[0] and gradients[-1] < end
        assert all(start < stop for start, stop, _ in spans)
        sizes = 4 * common.Config(2, 32, 4, 2, 16, 256).parameters()
        assert sum(size for *_, size in spans) == sizes
        if variant == "naive":
            assert all(start > end for start, _, _ in spans)
        else:
            assert spans[0][0] < end  # it starts while backward goes on
    two.draw(lines, tmp_path / "lines.png", "title")
    assert (tmp_path / "lines.png").read_bytes().startswith(b"\x89PNG")
