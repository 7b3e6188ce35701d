"""What the five texts get wrong: their numbers follow from what they assume, and ours differ."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import common
from lab.run import meters
from lab.texts import SOURCES, __main__, shown, shown_range, shown_ratio
from lab.texts.claims import CONTRADICTIONS, DIFFERENCES
from lab.texts.computed import head_gathered_again, less_between_nodes
from tests.conftest import chapter

ROWS = [row for rows in DIFFERENCES.values() for row in rows]


def test_claims_follow_from_what_is_assumed_and_ours_are_different():
    sources = {source.number for source in SOURCES}
    for entry in CONTRADICTIONS:
        where = entry.source, entry.where
        if entry.assumed:
            assert entry.assumed() == pytest.approx(
                entry.claimed, rel=1e-12, abs=entry.error), where
        assert abs(entry.ours() - entry.claimed) > 4 * entry.error, where
        assert entry.ours() != entry.claimed and entry.source in sources, where


def test_ours_are_the_numbers_of_the_tables():
    """No row agrees to the digits that are shown."""
    for entry in CONTRADICTIONS:
        assert entry.ours() == pytest.approx(entry.value, rel=6e-3), entry
    for row in ROWS:
        ours = row.ours()
        assert ours == pytest.approx(row.value, rel=1e-3), row
        assert row.why and shown(ours, row.unit) != shown(row.nearest(ours), row.unit), row
    assert (len(CONTRADICTIONS), len(ROWS)) == (31, 86)     # as pages/sources.md says


def test_pytorch_gathers_the_head_once_more_and_scatters_as_much():
    """What fully_shard sends as one rank of 8 that aren't there, beside chapter 03's formula."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    cfg = common.Config(4, 64, 4, 4, 16, 256)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        model, mesh = common.gpt(cfg), init_device_mesh("cpu", (8,))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        tokens = torch.zeros(1, cfg.seq, dtype=torch.int64)
        with meters.CommMeter() as meter:
            common.loss_sum(model(tokens), tokens).backward()
    finally:
        dist.destroy_process_group()
    ours = chapter("03_zero").traffic(cfg, 3, 8, 1)
    over = {op: meter.total[op]["wire_bytes"] / ours[op][2]
            for op in ("reduce_scatter", "all_gather")}
    assert over == pytest.approx({"reduce_scatter": 1, "all_gather": head_gathered_again()})


def test_zeropp_sends_a_quarter_with_gradients_in_4_bits():
    """As its paper says (Wang et al., 2023)."""
    assert less_between_nodes(0.5) == pytest.approx(4, abs=0.1)


def test_the_command_prints_both_tables(capsys):
    def printed(*words):
        assert __main__.main([*words]) == 0
        return capsys.readouterr().out

    only = printed("--contradictions")
    assert "450 GB/s" in only and only.count("told ") == len(CONTRADICTIONS)
    of_one = printed("001")
    assert of_one == printed("scaling_book")
    assert of_one.count("told ") == len(DIFFERENCES["001"]) + sum(
        entry.source == "001" for entry in CONTRADICTIONS)


def test_a_bad_argument_costs_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        __main__.main(["9"])
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "000" in line and line.endswith("would work")


def test_values_and_ranges_in_words():
    for value, unit, words in [
            (3154944, "B", "3.155 MB"), (0.0044, "s", "4.4 ms"), (0.18, "%", "18%"),
            (3.8e25, "FLOP", "3.8e25 FLOP"), (16384, "GPUs", "16,384 GPUs")]:
        assert shown(value, unit) == words
    assert shown_range(8, 16, "GPUs") == "8 to 16 GPUs" and shown_range(0, 0.2, "%") == "0 to 20%"
    assert shown_ratio(4, 8) == "-50%" and shown_ratio(40, 2) == "×20"
    assert shown_ratio(0.3, 0) == "+0.3"
