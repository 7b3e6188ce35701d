"""The axes along which a tensor has types, and the words for these."""

import itertools
from typing import NamedTuple

import torch.distributed as dist
from spmd_types import I, MeshAxis, P, R, V

from lab.typecheck.duality import dual

WORDS = {R: "replicated", V: "varying", P: "partial", I: "invariant"}
LETTERS = {R: "R", V: "V", P: "P", I: "I"}
SAME = R, I             # on all ranks of the axis; they differ in what their gradient is
DUAL = {kind: dual(kind) for kind in WORDS}


class Mesh(NamedTuple):
    """axes: {name: MeshAxis} of all axes of more than one rank; groups: {ranks of one of this
    rank's fibers: the names of its axes}."""
    axes: dict
    groups: dict

    def names(self, group):
        """Those of a process group. None: it lies along no axes, as a part of one does."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return self.groups.get(frozenset(ranks))

    def name(self, axis):
        """Of a MeshAxis."""
        return next(name for name, other in self.axes.items() if other == axis)

    def all(self, kind):
        """The type that is `kind` along each axis."""
        return dict.fromkeys(self.axes.values(), kind)

    def told(self, local_type):
        """{name: letter} of a tensor's type."""
        return {name: LETTERS[local_type[axis]] for name, axis in self.axes.items()
                if axis in local_type}


def mesh_of(rank: int, sizes: dict[str, int]) -> Mesh:
    """sizes: of the axes; along the last one, ranks are neighbours."""
    strides, stride = {}, 1
    for name in reversed(sizes):
        strides[name], stride = stride, stride * sizes[name]
    names = [name for name in sizes if sizes[name] > 1]
    axes = {name: MeshAxis.of(sizes[name], strides[name]) for name in names}
    groups = {}
    for n in range(len(names) + 1):
        for chosen in itertools.combinations(names, n):
            first = rank - sum(rank // strides[name] % sizes[name] * strides[name]
                               for name in chosen)
            steps = itertools.product(*(range(0, sizes[name] * strides[name], strides[name])
                                        for name in chosen))
            groups[frozenset(first + sum(step) for step in steps)] = chosen
    return Mesh(axes, groups)
