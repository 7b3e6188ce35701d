"""What rows share: each function gives what a second way of counting gives."""

import pytest
import torch.distributed as dist

import common
from lab.chapters import chapter
from lab.sources import worked
from lab.sources.lecture import change_of_earlier_tokens, loss

SMALL = common.Config(4, 64, 4, 4, 16, 256)


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


def test_the_lectures_small_computations():
    assert loss(words=16) == pytest.approx(2.772588722)
    assert change_of_earlier_tokens() == 0
