"""The gradient noise scale: estimates are right on average, and a run's are those of one GPU."""

import math
import statistics
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from lab import chapters
from tests.conftest import SMALL, TEXT, chapter, run_main, sample

noise = chapters.held("02")
TWO = "02_data_parallel"
FLAGS = (*SMALL, "--layers=1", "--steps=2", "--dtype=float64", "--ignore=0.5", f"--data={TEXT}",
         "--noise-scale", "--clip=0.1")  # clipping is after the norm


@pytest.fixture(scope="module")
def two():
    return chapter(TWO)


# -------------------------------------------------------------------------------- right on average


def drawn(counts, steps, numbers=40):
    """[small, big, the squares] of each step, of gradients with a known mean and covariance; at
    last the truth. counts: the tokens of each rank."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    mean, spread = draw(numbers), draw(numbers).abs() + 0.1
    for _ in range(steps):
        ranks = [mean + spread * draw(numbers) / math.sqrt(n) for n in counts]
        valid = sum(counts)
        whole = sum(n / valid * gradient for n, gradient in zip(counts, ranks))
        square = sum(n / valid * gradient.square().sum() for n, gradient in zip(counts, ranks))
        yield [valid / len(counts), valid, square.item(), whole.square().sum().item()]
    yield spread.square().sum().item(), mean.square().sum().item()


@pytest.mark.parametrize("counts", sample([(1, 2, 30), (5, 5, 5, 5)]))
def test_the_estimates_are_right_on_average(two, counts):
    """With ranks of unequal tokens, too."""
    *steps, (noise_there, signal_there) = drawn(counts, 4000)
    noises, signals = map(list, zip(*[two.noise_and_signal(*step) for step in steps]))
    for found, there in ((noises, noise_there), (signals, signal_there)):
        error = statistics.stdev(found) / math.sqrt(len(found))
        assert abs(statistics.fmean(found) - there) < 4 * error < 0.1 * there
    scale, error = noise.quotient(noises, signals), noise.error_of(noises[:200], signals[:200])
    assert scale == pytest.approx(noise_there / signal_there, rel=0.05)
    of_parts = [noise.quotient(noises[i:i + 200], signals[i:i + 200]) for i in range(0, 4000, 200)]
    assert error == pytest.approx(statistics.stdev(of_parts), rel=0.5)


def test_where_noise_hides_the_signal():
    assert noise.quotient([2.0, 4.0], [1.0, -2.0]) == math.inf
    assert noise.error_of([2.0, 4.0], [1.0, 3.0]) == pytest.approx(1 / 3)  # 2/1 or 4/3 without one
    assert noise.error_of([2.0], [1.0]) == math.inf  # nothing to compare
    assert noise.error_of([2.0, 4.0], [3.0, -1.0]) == math.inf


# ------------------------------------------------------------------------------ those of one GPU


def of_one_gpu(config, ranks):
    """{step: [small, big, squares]} by one GPU, which computes each part's mean gradient alone."""
    args = common.argparse.Namespace(**config, model=common.Config(
        *(config[field.name] for field in common.fields(common.Config))))
    text, model, seen = common.Text(args), common.gpt(args.model, dtype=torch.float64), []
    optimizer = common.OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
    for step in range(args.steps):
        tokens, targets, valid = text.batch(step)
        squares, counts = [], []
        for part, goals in zip(tokens.chunk(ranks), targets.chunk(ranks)):
            counts.append(int((goals != -100).sum()))
            model.zero_grad()
            (common.loss_sum(model(part), goals) / max(1, counts[-1])).backward()
            squares.append(common.grad_norm(model.parameters()).item() ** 2)
        square = sum(n * square for n, square in zip(counts, squares)) / valid
        model.zero_grad()
        (common.loss_sum(model(tokens), targets) / valid).backward()
        norm = common.grad_norm(model.parameters())
        seen.append([valid / sum(n > 0 for n in counts), valid, square, norm.item() ** 2])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, norm)
        optimizer.step()
    return seen


@pytest.mark.parametrize(("variant", "world", "more"), sample([
    ("bucket", 3, "--batch=6 --micro-batch=1 --bucket-mb=0.02"),
    ("naive", 2, "--batch=8 --batch-ramp 4 2"),
]))
def test_a_runs_are_those_of_one_gpu(ranks, tmp_path, two, variant, world, more):
    flags = (*FLAGS, f"--variant={variant}", *more.split())
    (status, run, output), *_ = ranks(world)(run_main, TWO, flags, tmp_path)
    assert status == 0, output
    found, expected = run["recorded"]["noise"], of_one_gpu(run["config"], world)
    torch.testing.assert_close(torch.tensor(found["steps"]), torch.tensor(expected))
    estimates = [two.noise_and_signal(*step) for step in expected]
    assert list(zip(found["noise"], found["signal"])) == [pytest.approx(one) for one in estimates]
    noise_there, signal_there = estimates[1]
    if signal_there > 0:
        assert found["scale"] == pytest.approx(noise_there / signal_there)
        assert f"{found['scale']:,.0f} tokens" in output


def after_steps_of(targets):
    """What a meter has seen of this rank's gradient: rank + 1, twice, or 0. targets: of each."""
    module = torch.nn.Linear(2, 1, bias=False)
    meter = noise.NoiseMeter(module)
    mine, valid = targets[dist.get_rank()], sum((row != -100).sum().item() for row in targets)
    scale = (dist.get_rank() + 1) * (mine != -100).any()
    (scale * module(torch.ones(1, 2))).sum().backward()
    batch = mock.Mock(micro_batches=[(None, mine)], valid=valid)
    meter.after_step(batch, torch.tensor(3.0))
    return meter.steps


def test_a_rank_without_valid_targets(ranks):
    """It is no batch. If all targets are one rank's, there is nothing to compare."""
    some, none = torch.tensor([1, 1, -100]), torch.tensor([-100] * 3)
    [[step], other, third] = ranks(3)(after_steps_of, [some, none, torch.tensor([1, 1, 1])])
    assert other == third == [step]
    assert step == pytest.approx([5 / 2, 5, 2 * 1 * 5 / 2 + 2 * 9 * 5 / 3, 9])
    assert ranks(2)(after_steps_of, [none, some]) == [[], []]


def test_one_rank_is_refused(run_chapter):
    status, _, err = run_chapter(TWO, "--noise-scale")
    assert (status, err.count("\n")) == (2, 1) and "--nproc_per_node 2 would work" in err
    status, _, err = run_chapter(TWO, "--noise-scale", "--variant=torch", WORLD_SIZE=2, RANK=0,
                                 MASTER_ADDR="localhost", MASTER_PORT=1)  # fmt: skip
    assert status == 2 and "--variant torch; --variant" in err
