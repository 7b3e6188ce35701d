"""Who holds which part of which matrix: what the page is told is what real ranks hold."""

import importlib
from types import SimpleNamespace

import pytest

import common
from common import Refused
from lab.run.meters import shards_of
from lab.site import cuts
from tests.conftest import sample

MESH = {"pp": 1, "dp": 2, "cp": 1, "tp": 2, "ep": 2, "experts": 4}


def of_a_rank(mesh):
    """What a rank of a real mesh holds, cut with real groups."""
    nine = importlib.import_module("09_5d")
    cfg = nine.Mixture(layers=4, dim=64, heads=8, kv_heads=4, seq=64, vocab=256,
                       experts=mesh["experts"], top_k=2)
    args = SimpleNamespace(**mesh, order="pp,dp,cp,tp", model=cfg, micro_batches=1, documents=None)
    place = nine.places_of_ranks(args)[common.environment("RANK", 0)]
    axes, _ = nine.make_groups(args, tied_stages=False)
    start, end = nine.balanced(cfg.layers, args.pp)[place.pp]
    stage = nine.build(cfg)[start:end]
    nine.cut_stage(stage, args, axes, core=None)
    place = place._asdict() | {"ep": axes["ep"].rank()}
    return place, [name for name, _ in stage.named_children()], shards_of(stage)


def test_cuts_are_those_of_real_ranks(ranks):
    told = cuts.cuts({axis: str(degree) for axis, degree in MESH.items()})["ranks"]
    for shown, (place, items, shards) in zip(told, ranks(4, 60)(of_a_rank, MESH), strict=True):
        assert (shown["place"], shown["items"]) == (place, items)
        assert shown["shards"] == shards
    halves = cuts.cuts({axis: str(degree) for axis, degree in (MESH | {"pp": 2}).items()})
    for whole, first, last in zip(told, halves["ranks"][:4], halves["ranks"][4:], strict=True):
        assert last["place"] == whole["place"] | {"pp": 1}
        assert first["items"] + last["items"] == whole["items"]
        assert first["shards"] | last["shards"] == whole["shards"]
        assert first["shards"].keys() - last["shards"].keys() == {"embedding"}


def of_a_rank_of_04():
    four, t = importlib.import_module("04_tensor_parallel"), common.environment("WORLD_SIZE", 1)
    cfg = common.Config(layers=4, dim=64, heads=8, kv_heads=2, seq=64, vocab=256)
    group = common.init_device_mesh("cpu", (t,), mesh_dim_names=("tp",))["tp"].get_group()
    return shards_of(four.parallelize(common.gpt(cfg, seed=None), cfg, group, "megatron"))


def test_cuts_of_chapter_04_are_those_of_real_ranks(ranks):
    """With 2 kv heads, pairs of the 4 ranks share one."""
    told = cuts.cuts({"chapter": cuts.FOUR, "tp": "4", "kv_heads": "2"})["ranks"]
    for shown, shards in zip(told, ranks(4, 60)(of_a_rank_of_04), strict=True):
        assert shown["shards"] == shards


@pytest.mark.parametrize("mesh", sample([
    {"cp": "2", "tp": "2", "ep": "2", "experts": "4"}, {"chapter": cuts.FOUR, "tp": "4"},
    {"tp": "8", "kv_heads": "2"}]))
def test_the_page_offers_the_values_that_are_answered(mesh):
    takes = cuts.cuts(mesh)["takes"]
    for name, values in (cuts.VALUES | {"chapter": cuts.CHAPTERS}).items():
        for value in values:
            try:
                cuts.cuts(mesh | {name: str(value)})
                is_answered = True
            except Refused:
                is_answered = False
            assert is_answered == (value in takes[name]), (name, value)
