"""lab/bench/anatomy.py: shares become bytes."""

from dataclasses import replace

import pytest

from common import Config
from lab.bench import anatomy

SHAPE = Config(layers=3, dim=64, heads=8, kv_heads=2, seq=16, vocab=257)


def test_all_of_it_is_the_default():
    everything = dict.fromkeys(("outside", "inputs", "inside", "keys and values", "core", "logits",
                                "positions"), 1)
    for attention in ("plain", "sdpa"):
        cfg = replace(SHAPE, attention=attention)
        assert anatomy.activation_bytes(cfg, 2, 4, {}) == \
            anatomy.activation_bytes(cfg, 2, 4, everything)


def test_half_of_a_class_is_half_as_much():
    rest = {"core": 1, "keys and values": 1, "positions": 1}
    for name in ("outside", "inputs", "inside", "logits", "positions"):
        whole, half, none = (anatomy.activation_bytes(SHAPE, 2, 4, rest | {name: share})
                             for share in (1, 1 / 2, 0))
        assert whole - half == half - none > 0, name


def test_a_kv_head_is_not_cut():
    """Of two, four ranks have one each, and eight too."""
    kept = [anatomy.keys_and_values(SHAPE, {"inside": 1 / t}) for t in (1, 2, 4, 8)]
    assert kept == [1, 1 / 2, 1 / 2, 1 / 2]


def test_what_waits_for_w_is_of_own_tokens():
    """Of three ranks with gathered keys, whether these are gathered again (core is 0) or not."""
    cfg = replace(SHAPE, seq=18)
    third = dict.fromkeys(("outside", "inputs", "inside", "logits", "positions"), 1 / 3)
    third |= {"keys and values": 1, "how": "gathered"}
    alone, *of_three = (anatomy.waiting_by_modules(cfg, 2, 4, kept)
                        for kept in ({}, third, third | {"core": 0}))
    assert of_three == 2 * [[size // 3 for size in alone]]


def test_units_of_kinds_that_the_same_ranks_hold():
    """Cut over tp = 2: what is whole is a unit, and what is cut another; each is padded."""
    answer = {"parameters": {"queries": 1 / 2, "keys": 1 / 2, "mlp": 1 / 2},
              "holders": {"queries": 3, "keys": 3, "mlp": 3, "norms": 6, "tables": 6},
              "gradients": {"queries": "cut", "keys": "cut", "mlp": "cut", "norms": "whole",
                            "tables": "whole"}}  # fmt: skip
    cut = (2 * 64 * 64 + 2 * 64 * 16 + 8 * 64 * 64) // 2
    embedding, *blocks, head = [*anatomy.flat_units(SHAPE, answer)]
    assert embedding == (257 * 64, 6, "whole") and head == (257 * 64 + 2 * 64, 6, "whole")
    assert blocks == 3 * [(cut, 3, "cut"), (4 * 64, 6, "whole")]
    padded = 3 * -(-cut // 3) * 3 * 4
    sent = anatomy.gradient_traffic(SHAPE, answer | {"zero": 3, "gathers": 5, "reduces": 1}, 2, 4)
    gathered = 5 * padded / 2  # numbers of two bytes, and gradients of four
    assert sent["cut"] == {"reduce_scatter": (3, padded, 2 / 3 * padded),
                           "all_gather": (15, gathered, pytest.approx(2 / 3 * gathered))}
    plain = anatomy.gradient_traffic(SHAPE, answer, 2, 4)
    [(calls, payload, wire)] = plain["cut"].values()
    assert (calls, payload) == (1, 12 * cut) and wire == pytest.approx(2 * 2 / 3 * 12 * cut)


def test_a_share_that_no_rank_can_have_is_refused():
    """Rounded away, a wrong share of few heads would give the right number of bytes."""
    assert anatomy.part(1 / 3, 48, "inside") == 16
    with pytest.raises(ValueError, match="0.3 of inside"):
        anatomy.part(0.3, 32, "inside")
