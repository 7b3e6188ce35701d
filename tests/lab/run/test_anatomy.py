"""lab/run/anatomy.py: shares become bytes."""

from dataclasses import replace

import pytest

from common import Config
from lab.chapters import held
from lab.run import anatomy

SHAPE = Config(layers=3, dim=64, heads=8, kv_heads=2, seq=16, vocab=257)


def test_what_waits_for_w_is_of_own_tokens():
    """Of three ranks with gathered keys, whether these are gathered again (core is 0) or not."""
    cfg = replace(SHAPE, seq=18)
    third = dict.fromkeys(("outside", "inputs", "inside", "logits", "positions"), 1 / 3)
    third |= {"keys and values": 1, "how": "gathered"}
    alone, *of_three = (held("07").waiting_by_modules(cfg, 2, 4, kept)
                        for kept in ({}, third, third | {"core": 0},
                                     third | {"core": 0, "own keys": 1 / 3}))
    assert of_three == 3 * [[size // 3 for size in alone]]


def test_a_share_that_no_rank_can_have_is_refused():
    """Rounded away, a wrong share of few heads would give the right number of bytes."""
    assert anatomy.part(1 / 3, 48, "inside") == 16
    with pytest.raises(ValueError, match="0.3 of inside"):
        anatomy.part(0.3, 32, "inside")
