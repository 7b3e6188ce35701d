"""Which part of each matrix a rank holds, as chapters 09 and 04 cut it, on any mesh."""

import contextlib
import copy
import functools
import itertools
import math
import sys
from collections import Counter
from dataclasses import replace

import torch.distributed as dist

from common import Refused, gpt
from lab import chapters
from lab.run import meters, strict

RANKS = 32                      # of a mesh, at the most
VALUES = {"chapter": ["09_5d", "04_tensor_parallel"], "pp": [1, 2, 4], "dp": [1, 2, 4],
          "cp": [1, 2], "tp": [1, 2, 4, 8], "ep": [1, 2, 4], "experts": [0, 4, 8],
          "kv_heads": [1, 2, 4, 8], "layers": [4, 8]}
ALONE = {"pp": 1, "dp": 1, "cp": 1, "ep": 1, "experts": 0}      # chapter 04 cuts over tp alone
MODEL = "--dim=64", "--heads=8", "--seq=64", "--micro-batch=1"


class Axis:
    """Stands in for a process group: to cut a model, chapter 09 asks only for rank and size."""

    def __init__(self, rank, size):
        self.pair = rank, size

    def rank(self):
        return self.pair[0]

    def size(self):
        return self.pair[1]


@contextlib.contextmanager
def group_that_sends_nothing(rank, size):
    """A process group, which chapter 04 needs to make others of it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook                               # a group would put its rank before errors
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def cuts(chapter, **mesh):
    """For each rank of a mesh: its place on each axis, and which of `holdings` it has. A holding is
    the layers of a stage, and {matrix: [full shape, [[dim, index, parts], ...]]} as the meters
    record it of a run, of the tables and of the first block of the stage. No rank runs."""
    ranks, holdings, of_stage = [], [], Counter()
    for rank, place in enumerate(nine().places_of_ranks(arguments(**mesh))):
        ep = of_stage[place.pp] % mesh["ep"]            # neighbours of a stage share the experts
        of_stage[place.pp] += 1
        holding = held_at(chapter, mesh, place.pp, place.tp, ep)
        if holding not in holdings:
            holdings.append(holding)
        ranks.append({"rank": rank, "place": place._asdict() | {"ep": ep},
                      "holding": holdings.index(holding)})
    return {"degrees": {axis: mesh[axis] for axis in ("pp", "dp", "cp", "tp", "ep")},
            "ranks": ranks, "holdings": holdings}


def nine():
    return chapters.chapter("09")


def arguments(pp, dp, cp, tp, ep, experts, kv_heads, layers):
    """The arguments of chapter 09's run on a mesh, unless it refuses them."""
    args = copy.copy(usual_arguments())                 # to parse takes longer than to copy
    args.pp, args.dp, args.cp, args.tp, args.ep, args.experts = pp, dp, cp, tp, ep, experts
    args.model = replace(args.model, layers=layers, kv_heads=kv_heads)
    args.batch = pp * dp * cp * tp
    nine().requires(args, args.batch)
    return args


@functools.cache
def usual_arguments():
    return strict.parse(nine().__file__, "", nine().VARIANTS, nine().flags, [*MODEL],
                        chapters.about("09_5d"))


def held_at(cut_by, mesh, pp, tp, ep):
    """What a rank at this place holds. Blocks are alike, so one of them is cut."""
    start, end = nine().balanced(mesh["layers"], mesh["pp"])[pp]
    blocks = [f"block{i + 1}" for i in range(mesh["layers"])]
    items = ["embedding", *blocks, "head"][start:end]
    shards = shards_of_block(cut_by, mesh["kv_heads"], mesh["experts"], (tp, mesh["tp"]),
                             (ep, mesh["ep"]))
    return {"items": items, "shards": {
        name: shard for name, shard in shards.items()
        if name.startswith(("attn", "mlp")) or name.split(".")[0] in items}}


@functools.cache
def shards_of_block(cut_by, kv_heads, experts, tp, ep):
    """What the meters record if a rank's stage is a whole model of one block. tp, ep: the rank's
    index, and of how many."""
    args = arguments(1, ep[1], 1, tp[1], ep[1], experts, kv_heads, 1)
    if cut_by == "04_tensor_parallel":
        stage = gpt(args.model, seed=None)
        with group_that_sends_nothing(*tp) as group:
            chapters.chapter("04").parallelize(stage, args.model, group, "megatron")
    else:
        stage = nine().build(args.model)
        axes = {"tp": Axis(*tp), "ep": Axis(*ep)}
        axes = {name: axis for name, axis in axes.items() if axis.size() > 1}
        nine().cut_stage(stage, args, axes, core=None)
    return meters.shards_of(stage)


def examples():
    """All meshes that the sliders offer."""
    for values in itertools.product(*VALUES.values()):
        asked = dict(zip(VALUES, values))
        mesh = {name: asked[name] for name in VALUES if name != "chapter"}
        is_alone = all(mesh[name] == value for name, value in ALONE.items())
        if (asked["chapter"] == "09_5d" or is_alone) and exists(mesh):
            yield "cuts", asked


def exists(mesh):
    """Whether chapter 09 takes it, and it is small enough to be shown."""
    if math.prod(mesh[axis] for axis in ("pp", "dp", "cp", "tp")) > RANKS:
        return False
    try:
        arguments(**mesh)
    except Refused:
        return False
    return True
