"""Chapter 10: which batch, and how many GPUs, shorten the way to the same loss."""

import json
import shlex

import pytest

from lab.planner import batch, planning
from tests.chapters.test_10_command_line import told
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)


@pytest.mark.parametrize(("size", "steps", "tokens"), [
    (1e6, 5, 1.25), (4e6, 2, 2), (16e6, 1.25, 5)])
def test_steps_and_tokens_are_mccandlishs(size, steps, tokens):
    """(S / S_min - 1) · (E / E_min - 1) = 1, and E = S · B with E_min = N · S_min."""
    noise_scale = 4e6
    assert batch.steps(size, noise_scale) == steps and batch.tokens(size, noise_scale) == tokens
    assert (steps - 1) * (tokens - 1) == 1
    assert steps * size == tokens * noise_scale


def asked_of(ten, flags):
    _, asked = planning.question(ten, shlex.split(flags))
    fit, _ = asked.find(asked.gpus, asked.fixed)
    return asked, fit[0]


@pytest.mark.parametrize(("flags", "noise_scale"), [
    ("--model 1b --micro-batch 2", 1e6),
    pytest.param("--model 8b --gpus 64 --batch 512", 4e6, marks=pytest.mark.full),
    ("--model 70b --gpus 256 --batch 1024 --tp 8 --pp 4 --v 4", 8e6)])
def test_of_all_batches_the_one_that_is_there_first_is_taken(ten, flags, noise_scale):
    asked, plan = asked_of(ten, flags)
    found = batch.best_ways(asked, plan, noise_scale)
    assert len(found) > 2
    for way in found:
        layout, model = way.layout, asked.model
        assert way.batch == layout.micro_batch * way.accumulated * layout.dp
        assert way.gpus == layout.dp * layout.tp * layout.cp * layout.pp
        seconds = sum(ten.step_seconds(model, layout, asked.cluster, asked.software,
                                       way.batch).values())
        assert way.seconds == pytest.approx(seconds)
        assert way.time == pytest.approx((1 + noise_scale / (way.batch * model.seq)) * seconds)
        every = list(batch.ways(asked, plan, way.gpus, noise_scale))
        assert way.time == min(other.time for other in every) < max(
            other.time for other in every) / 2
    spared = [1 - after.time / before.time for before, after in zip(found, found[1:])]
    assert all(share >= batch.WORTH for share in spared[:-1]) and spared[-1] < batch.WORTH
    assert "micro_batch" not in asked.fixed or {way.layout.micro_batch for way in found} == {2}


def test_where_it_ends_follows_the_noise_scale(ten):
    """Without HBM and latency, a batch is as fast as its tokens: only then it is the noise alone
    that ends it."""
    asked, plan = asked_of(ten, "--model 1b --alpha 0 --nic-alpha 0 --nic 1e15 --nvlink 1e15")
    ends = [batch.best_ways(asked, plan, noise_scale)[-2] for noise_scale in (1e6, 4e6, 16e6)]
    assert ends[1].gpus == 4 * ends[0].gpus and ends[2].gpus == 4 * ends[1].gpus
    for end, noise_scale in zip(ends, (1e6, 4e6, 16e6)):
        size = end.batch * asked.model.seq              # twice the batch: (1 + N/2B) / (1 + N/B)
        assert batch.steps(2 * size, noise_scale) > 0.9 * batch.steps(size, noise_scale)
        assert batch.steps(size, noise_scale) <= 0.9 * batch.steps(size / 2, noise_scale)


def test_where_nothing_fits_for_sure_there_is_no_table(ten):
    flags = "--gpus 8 --batch 8 --seq 16384 --tp 1 --cp 1 --recompute none --noise-scale 1e6"
    status, said, _ = told(ten, shlex.split(flags))
    assert status == 0 and said.splitlines()[-1].startswith("No batch fits")


def test_it_says_from_where_on_gpus_buy_little(ten, tmp_path):
    file = tmp_path / "plan.json"
    status, said, errors = told(ten, ["--model=1b", "--noise-scale=1e6", f"--json={file}"])
    assert status == 0 and not errors
    first, *rows, verdict = said[said.index("With a noise scale"):].splitlines()
    assert "1,000,000 tokens (122 sequences)" in first
    ways = json.loads(file.read_text())["batches"]
    assert len(rows) == len(ways) + 1
    enough, more = ways[-2:]
    assert f"Beyond {enough['gpus']:,} GPUs" in verdict and "GPUs buy little" in verdict
    time = lambda way: way["seconds"] * way["steps_over_least"]
    assert f"take {1 - time(more) / time(enough):.0%} less time" in verdict
    assert rows[1].split()[:7] == ["8", "8", "=", "1", "x", "1", "x"]
