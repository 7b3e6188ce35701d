"""Which part of each matrix a rank holds: the cuts of chapter 09, on any mesh, and of chapter 04.

    /api/cuts?tp=2&pp=2
    /api/cuts?chapter=04_tensor_parallel&tp=4&kv_heads=2
"""

import copy
import functools
import itertools
import math
import threading
from collections import Counter
from dataclasses import replace
from unittest import mock

import torch.distributed as dist

from common import Refused, gpt
from lab.chapters import about, chapter
from lab.planner import planning
from lab.run import meters, strict
from lab.site.parameters import known, one_of, whole
from lab.site.plans import in_words_of_the_page

RANKS = 64                      # of a mesh
CHAPTERS = NINE, FOUR = "09_5d", "04_tensor_parallel"     # 04 has tp alone, and cuts tables, too
MESH = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "ep": 1, "experts": 0, "kv_heads": 4, "layers": 4}
MODEL = "--dim=64", "--heads=8", "--seq=64", "--micro-batch=1"
VALUES = {"pp": [1, 2, 3, 4, 6, 8], "dp": [1, 2, 3, 4, 6, 8], "cp": [1, 2, 4, 8],
          "tp": [1, 2, 4, 8], "ep": [1, 2, 4, 8], "experts": [0, 2, 4, 8, 16],
          "kv_heads": [1, 2, 4, 8], "layers": [2, 4, 6, 8, 12, 16]}         # of the sliders
STORED = {"pp": [1, 2, 4], "dp": [1, 2, 4], "cp": [1, 2], "tp": [1, 2, 4, 8], "ep": [1, 2, 4],
          "experts": [0, 4, 8], "kv_heads": [1, 2, 4, 8], "layers": [4, 8]}
CUTTING = threading.Lock()      # chapter 04 makes its groups of all ranks: here of none


class Axis:
    """Stands in for a process group, of which cutting a model asks no more than this."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


def cuts(asked):
    """Of each rank of a mesh: its place on each axis, its stage's layers, and {matrix: [full shape,
    [[dim, index, parts], ...]]} as the meters record it of a run, of the tables and of the
    first block of its stage. From `p.cuts`, after a chapter has cut the model: no rank runs. takes:
    of each name the values that can be asked for beside the others."""
    known(asked, "chapter", *MESH)
    cut_by = one_of(asked, "chapter", NINE, CHAPTERS)
    mesh = {name: whole(asked, name, default, min(default, 1), RANKS)
            for name, default in MESH.items()}
    args = of_mesh(cut_by, mesh)
    told, of_stage = [], Counter()
    for rank, place in enumerate(chapter("09").places_of_ranks(args)):
        ep = of_stage[place.pp] % args.ep               # neighbours of a stage share the experts
        of_stage[place.pp] += 1
        told.append({"rank": rank, "place": place._asdict() | {"ep": ep}}
                    | held_at(cut_by, mesh, place.pp, place.tp, ep))
    takes = {name: [value for value in values if exists(cut_by, mesh | {name: value})]
             for name, values in VALUES.items()}
    return {"degrees": {axis: mesh[axis] for axis in ("pp", "dp", "cp", "tp", "ep")},
            "takes": takes | {"chapter": [one for one in CHAPTERS if exists(one, mesh)]},
            "ranks": told}


# ------------------------------------------------------------------------------------------ meshes

def of_mesh(cut_by, mesh):
    """The arguments of chapter 09's run on a mesh, which it may refuse."""
    ranks = ranks_of(cut_by, mesh)
    if exists(cut_by, mesh):
        return accepted(tuple(mesh.values()))
    flags = [f"{planning.as_flag(name)}={value}" for name, value in mesh.items() if value]
    try:
        args = parsed(*flags, f"--batch={ranks}")       # it knows more that can be wrong
        chapter("09").requires(args, ranks)
    except Refused as refused:
        raise Refused(in_words_of_the_page(refused.args[0])) from None
    return args


def ranks_of(cut_by, mesh):
    ranks = math.prod(mesh[axis] for axis in ("pp", "dp", "cp", "tp"))
    if ranks > RANKS:
        raise Refused(f"pp x dp x cp x tp = {ranks} ranks are more than {RANKS} to show")
    others = [name for name in ("pp", "dp", "cp", "ep", "experts")
              if mesh[name] != MESH[name] and cut_by == FOUR]
    if others:
        raise Refused(f"chapter 04 has tp alone; {others[0]}={MESH[others[0]]} would work")
    return ranks


def exists(cut_by, mesh):
    """Whether cuts can be asked about a mesh."""
    try:
        ranks_of(cut_by, mesh)
    except Refused:
        return False
    return mesh["kv_heads"] in VALUES["kv_heads"] and accepted(tuple(mesh.values())) is not None


@functools.lru_cache(maxsize=2**16)
def accepted(values):
    """The arguments, or None if the chapter refuses them. Sliders ask for all neighbours of a mesh:
    so of the command line, which takes longer, one copy is made."""
    mesh, args = dict(zip(MESH, values)), copy.copy(usual())
    args.batch = math.prod(mesh[axis] for axis in ("pp", "dp", "cp", "tp"))
    args.model = replace(args.model, layers=mesh["layers"], kv_heads=mesh["kv_heads"])
    vars(args).update((name, mesh[name]) for name in ("pp", "dp", "cp", "tp", "ep", "experts"))
    try:
        chapter("09").requires(args, args.batch)
    except Refused:
        return None
    return args


def parsed(*flags):
    nine = chapter("09")
    return strict.parse(nine.__file__, "", nine.VARIANTS, nine.flags, [*MODEL, *flags],
                        about("09_5d"))


usual = functools.cache(parsed)


# ------------------------------------------------------------------------------------ what is held

def held_at(cut_by, mesh, pp, tp, ep):
    """What a rank at this place holds: others at the same pp, tp and ep hold the same. Blocks are
    alike, so that a stage is cut which has one."""
    start, end = chapter("09").balanced(mesh["layers"], mesh["pp"])[pp]
    items = ["embedding", *(f"block{i + 1}" for i in range(mesh["layers"])), "head"][start:end]
    shards = shards_of_all(cut_by, mesh["kv_heads"], mesh["experts"], (tp, mesh["tp"]),
                           (ep, mesh["ep"]))
    return {"items": items, "shards": {
        name: shard for name, shard in shards.items()
        if name.startswith(("attn", "mlp")) or name.split(".")[0] in items}}


@functools.lru_cache(maxsize=4096)
def shards_of_all(cut_by, kv_heads, experts, tp, ep):
    """What the meters record of a run's rank, if its stage is all of a model of one block. tp, ep:
    its index, and of how many."""
    mesh = MESH | {"tp": tp[1], "ep": ep[1], "dp": ep[1], "experts": experts, "kv_heads": kv_heads,
                   "layers": 1}
    args, nine = of_mesh(NINE, mesh), chapter("09")
    if cut_by == FOUR:
        stage = gpt(args.model, seed=None)
        with CUTTING, mock.patch.object(dist, "new_subgroups", lambda size: (None, None)):
            chapter("04").parallelize(stage, args.model, Axis(*tp), "megatron")
    else:
        stage = nine.build(args.model)
        axes = {"tp": Axis(*tp), "ep": Axis(*ep)}
        nine.cut_stage(stage, args, {name: axis for name, axis in axes.items() if axis.size() > 1},
                       core=None)
    return meters.shards_of(stage)


# ---------------------------------------------------------------------------------------- examples

def examples():
    """A grid of what the sliders can be moved to, on up to 32 ranks."""
    for cut_by in CHAPTERS:
        for values in itertools.product(*STORED.values()):
            mesh = dict(zip(STORED, values))
            if math.prod(values[:4]) <= 32 and exists(cut_by, mesh):
                yield "cuts", {"chapter": cut_by} | {name: str(value)
                                                     for name, value in mesh.items()}
