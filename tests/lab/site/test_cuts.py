"""Who holds which part of which matrix: what the page is told is what real ranks hold."""

import importlib
from types import SimpleNamespace

import common
from lab.run.meters import shards_of
from lab.site import cuts

MESH = {"pp": 1, "dp": 2, "cp": 1, "tp": 2, "ep": 2, "experts": 4}


def of_all_ranks(chapter, mesh):
    """[(place, items, shards)], as the page gets them."""
    sizes = {"pp": 1, "dp": 1, "cp": 1, "ep": 1, "experts": 0, "kv_heads": 4, "layers": 4}
    answer = cuts.cuts(chapter, **sizes | mesh)
    held = [answer["holdings"][rank["holding"]] for rank in answer["ranks"]]
    return [(rank["place"], holding["items"], holding["shards"])
            for rank, holding in zip(answer["ranks"], held)]


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
    whole = of_all_ranks("09_5d", MESH)
    assert whole == ranks(4, 60)(of_a_rank, MESH)
    halves = of_all_ranks("09_5d", MESH | {"pp": 2})
    for (place, items, shards), first, last in zip(whole, halves[:4], halves[4:], strict=True):
        assert last[0] == place | {"pp": 1}
        assert first[1] + last[1] == items and first[2] | last[2] == shards
        assert first[2].keys() - last[2].keys() == {"embedding"}


def of_a_rank_of_04():
    four, t = importlib.import_module("04_tensor_parallel"), common.environment("WORLD_SIZE", 1)
    cfg = common.Config(layers=4, dim=64, heads=8, kv_heads=2, seq=64, vocab=256)
    group = common.init_device_mesh("cpu", (t,), mesh_dim_names=("tp",))["tp"].get_group()
    return shards_of(four.parallelize(common.gpt(cfg, seed=None), cfg, group, "megatron"))


def test_cuts_of_chapter_04_are_those_of_real_ranks(ranks):
    """With 2 kv heads, pairs of the 4 ranks share one."""
    shown = of_all_ranks("04_tensor_parallel", {"tp": 4, "kv_heads": 2})
    assert [shards for _, _, shards in shown] == ranks(4, 60)(of_a_rank_of_04)
