"""What rows share: each function gives what a second way of counting gives."""

import math

import pytest
import torch.distributed as dist

import common
from lab.chapters import chapter
from lab.sources import tutorial, worked

SMALL = common.Config(4, 64, 4, 4, 16, 256)
HEAD = (2 * 64 + 256 * 64) / (4 * (12 * 64**2 + 4 * 64) + 256 * 64)     # over what is gathered else
X = 2 * 2048 * 4096                         # bytes of 2,048 tokens of width 4,096
WEIGHTS = 4 * 4096**2 + 3 * 4096 * 11008    # of a layer of a 7B model
GATHERS = 3 - 1 / (2 + 32 * WEIGHTS / (32000 * 4096))       # of ZeRO-3, less a head, in weights
LAYER = 2 * (8 * 4096 + 3 * 11008) + 4 * 32         # bytes of a token that a layer of it keeps
CORE = 32 * 4 * 4096 * 4096                 # FLOPs of a token: scores, and their weighted values
LAYERS = 32 * 2 * WEIGHTS + CORE            # forward; of the step, with the head:
STEP = 3 * (LAYERS + 2 * 32000 * 4096)
FAST, SLOW = (1 + 4 * 8192 * bandwidth / 989e12 for bandwidth in (450e9, 50e9))
BYTES = 1.75 * 25e6 / 450e9                 # seconds of 25 MB around 8 ranks, but for their hops
FAR = 2 * 1023 / 1024 * 1e9 / 50e9          # seconds of 1 GB around 1,024 ranks, between nodes
UNTOLD = [
    # 2 to 7
    3, 20, 450e9, 9, BYTES / (BYTES + 14 * 3.4e-6), BYTES / (BYTES + 25 * 14 * 3.4e-6), 5,
    13e9 * (2 + 4) / 8, 16e12,
    2 * WEIGHTS, 1 + HEAD / (2 + HEAD), 2 / 8 / 3, 2 / 8 + 2 / 1024, 17,
    2 * GATHERS / (1 + 4 / 256 + 1), X, 32 * 4 * X, 32 * 4 * X * 1.75 / 450e9,
    # 8 to 12
    5 / 4, 10 / 34, 8 * 4096 / LAYER, 7 / 8 * 8 * 4096 / LAYER, 1 - CORE / LAYERS, 17, X,
    4 * (1 - math.comb(96, 8) / math.comb(128, 8)) * 7 / 8, 7, CORE / STEP,
    5 * 96 / 34,
    # 13 to 14
    32, 1 / 11, 23, 9, 512,
    # the questions
    10 / 1.75, (63 + 6) / (2 * 63 / 64 + (126 - 69) * 3.4e-6 * 450e9 / 14e9), 18,
    1 + HEAD / (2 + HEAD), 9, FAST, SLOW, 1, 2, 4 * GATHERS / 2,
    FAR / (FAR + 2046 * 14e-6), 5 / 4, 4 * 8 * 7168 * 2, 2 / 8 / 3,
    2 * GATHERS / (1 + 4 / 256 + 1), 0.08 * 40e9, 135 / 39, 6 / 64, 10 / 114 * 7 / 8,
    10 * 7 / 8 / (10 + 24 / 8), 1 / 11, 9 / 8, 128]


def test_fully_shard_sends_what_chapter_03_does_and_gathers_the_head_again():
    ours, theirs = chapter("03").traffic(SMALL, 3, 8, 1), worked.sent_by_fsdp(SMALL, 8)
    assert theirs["reduce_scatter"] == pytest.approx(ours["reduce_scatter"])
    head = 4 * chapter("03").padded_sizes(SMALL, 8)[-1]
    assert theirs["all_gather"][:2] == (ours["all_gather"][0] + 1, ours["all_gather"][1] + head)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("name", "p", "m", "v"), [
    ("1f1b", 4, 8, 1), ("afab", 4, 8, 1), ("interleaved", 4, 8, 2), ("naive", 4, 1, 1)])
def test_what_is_lost_is_by_formula_what_lists_lose(name, p, m, v):
    assert worked.idle(name, p, m, v) == pytest.approx(worked.idle_in_time(name, p, m, v))
    assert worked.idle(name, p, m, v) == pytest.approx((p - 1) / (v * m + p - 1))


def test_states_of_a_parameter():
    assert [worked.states(stage, 4) for stage in range(4)] == [16, 7, 5.5, 4]
    assert worked.sent_in_zero(1, 1000) == pytest.approx(2 * 999 / 1000, rel=1e-3)


def test_what_sequence_parallelism_takes_off_is_korthikantis():
    """A layer of s·b·h·(34 + 5·a·s/h), of which tp leaves 10 and the t-th part of the rest."""
    share = 10 * (1 - 1 / 4) / 34
    assert worked.saved_by_sequence("gpt3", "megatron-2021", 4, "selective") == pytest.approx(share)
    assert worked.outside("gpt3", "megatron-2021") == pytest.approx(10 / (34 + 5 * 96 / 6))


def test_between_groups_are_shards_of_gradients():
    assert worked.between_groups(8, 128) == pytest.approx(2 * 127 / 128 / 8, rel=1e-4)


def test_rows_without_a_number_of_the_text_and_those_that_differ():
    """By formulas of their own, but for whole plans, which other tests hold to what was measured.
    """
    plans = "lab.planner.published.llama_3", "10_planner.Plan", "10_planner.memory"
    ours = [row.ours() for row in tutorial.ROWS
            if (row.told is None or row.why) and row.by not in plans]
    assert ours == pytest.approx(UNTOLD, rel=6e-3)


def test_a_step_of_llama_with_128k_takes_seconds():
    """Of 6 FLOPs a parameter and token, and half of 12·L·h·s² for the scores."""
    seq, tokens, model = 131072, 128 * 131072, chapter("10").MODELS["405b"]
    flops = (6 * model.parameters() + 6 * model.layers * model.dim * seq) * tokens
    assert worked.seconds_of_llama(2) == pytest.approx(flops / (16384 * 382.5e12), rel=6e-3)


def test_a_7b_model_fits_with_zero_3_alone():
    alone, shared = worked.seven_billion(), worked.seven_billion(zero=3)
    states = 16 * chapter("10").MODELS["7b"].parameters()
    assert "needs" in alone.why and not shared.why
    assert alone.bytes - shared.bytes == pytest.approx(7 / 8 * states, rel=0.02)
