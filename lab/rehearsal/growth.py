"""What a rehearsal sees, and no small run: findings, each a sentence with a line and a number.

    Watch       integers that do not fit into int32, and scores of a core that is to make none
    Counts      how often lines run in a step, and what they make
    Groups      the process groups of a rank

Integers are real in a rehearsal. So whatever makes an int32 is computed in int64 once more.

What grows with the ranks is not told from one rehearsal: a line may run for each micro-batch, block
and parameter, and that can be as often as there are ranks. So the same rank's work is rehearsed
in half the cluster as well: half the ranks, all of them on the data-parallel axis, with half the
batch. Then no line of a step has more to do, and one that runs more often by as many ranks as have
come loops over ranks.

So this sees what grows with data-parallel ranks, in the first step and in the lines of the chapter
and of common: a line that runs more often, by at least the ranks that have come; and one that makes
LARGE bytes more, and a quarter of all it makes. Before and after the steps it sees only groups.
"""

import argparse
import collections
import contextlib
import copy
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import common
from common import Refused
from lab.rehearsal.lines import line_in, named, source_of
from lab.run.words import quantity

MOST = 2**31 - 1        # what an int32 holds
MANY = 1024             # ranks from which on a loop over them is felt in a step
LARGE = 2**20           # bytes; less does not matter, whatever it grows with


class Found(Exception):
    """A rehearsal has ended by an error, behind these findings."""


# ------------------------------------------------------------------------ integers, and scores

class Watch(TorchDispatchMode):
    """Sees every operator of a rehearsal. found: {"scores" or the line: sentence}.

    files: of the sources, in whose lines it is. core: what --attention says; sdpa keeps no scores.
    Scores are a tensor of four dimensions or more in an Attention's forward, whose last two are
    both as long as a run of its tokens: (batch, heads, queries, keys).
    """

    def __init__(self, files, core):
        super().__init__()
        self.files, self.is_fused, self.found = set(files), core == "sdpa", {}
        self.attention = []                             # (tokens, head_dim) of those that run

    def __enter__(self):
        self.hooks = [register_module_forward_pre_hook(self.begin),
                      register_module_forward_hook(self.end, always_call=True)]
        return super().__enter__()

    def __exit__(self, *exception):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*exception)

    def begin(self, module, inputs):
        if isinstance(module, common.Attention):
            self.attention.append((inputs[0].shape[1], module.head_dim))

    def end(self, module, inputs, output):
        if isinstance(module, common.Attention):
            self.attention.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        true = wide(func, args, kwargs)                 # before func writes to what it is given
        result = func(*args, **kwargs)
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        for x, y in zip(tensors, true):
            if x.dtype == torch.int32 and y.numel():
                self.look_beyond(y)
        for x in tensors if self.attention and self.is_fused else []:
            self.look_for_scores(x)
        return result

    def look_beyond(self, integers):
        """Whether all of these, in int64, fit into an int32."""
        largest = max(integers.max().item(), -1 - integers.min().item())
        if largest > MOST:
            self.find(line_in(self.files),
                      f"an int32 holds {MOST:,} at the most, and this is {largest:,}")

    def look_for_scores(self, x):
        """Whether a core has made all scores."""
        tokens, head_dim = self.attention[-1]
        if x.is_floating_point() and x.ndim > 3:
            a_run = tokens // 2                         # of two, in a zig-zag
            last = x.shape[-2:]
            if min(last) >= max(a_run, 2) and not {head_dim, head_dim // 2} & {*last}:
                shape = " x ".join(map(str, x.shape))
                size = quantity(x.numel() * x.element_size())
                self.find("scores", f"scores of {shape}, {size}, are in memory, and --attention "
                          "sdpa is to make none")

    def find(self, key, what):
        line = line_in(self.files)
        if line:                                        # the first time tells enough
            self.found.setdefault(key, f"{named(line)}: {what}: {source_of(line)}")


def wide(func, args, kwargs):
    """The tensors that an operator gives if each int32 of its arguments is an int64: none, if there
    is no int32, or its values are unknown, or do not depend on its arguments alone."""
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    is_narrow = any(x is torch.int32 for x in leaves) or any(
        x.dtype == torch.int32 for x in tensors)
    is_other = (func.namespace == "c10d" or "empty" in func._schema.name
                or torch.Tag.nondeterministic_seeded in func.tags)
    if not is_narrow or is_other or any(isinstance(x, FakeTensor) for x in tensors):
        return []

    def widen(x):
        if isinstance(x, torch.Tensor) and x.dtype == torch.int32:
            return x.to(torch.int64)
        return torch.int64 if x is torch.int32 else x

    args, kwargs = tree_map(widen, (args, kwargs))
    given = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    return [] if any(isinstance(x, FakeTensor) for x in given) else given


# ------------------------------------------------------------------------- what grows with ranks

class Groups:
    """While it is entered, counts the process groups that are made and that this rank is in: `own`,
    {line of the sources: number}."""

    def __init__(self, files):
        self.files, self.own = set(files), collections.Counter()
        self.maker = c10d._new_process_group_helper     # which all that make a group call
        self.patch = mock.patch.object(c10d, "_new_process_group_helper", self.make)

    def __enter__(self):
        self.patch.start()
        return self

    def __exit__(self, *exception):
        self.patch.stop()

    def make(self, *args, **kwargs):
        """Make a group, and count it."""
        group, store = self.maker(*args, **kwargs)
        self.own[line_in(self.files)] += group is not c10d.GroupMember.NON_GROUP_MEMBER
        return group, store


class Counts:
    """Of one step, for each line of the sources: times, how often it runs, which Python's own
    tracer sees; size, the bytes that it makes."""

    def __init__(self, files):
        self.files, self.times, self.size = set(files), collections.Counter(), collections.Counter()

    @contextlib.contextmanager
    def of_step(self, live):
        """Around a step, from what runs it. live: a LiveMeter."""
        first, before, frame = len(live.made), sys.gettrace(), sys._getframe(2)
        while frame:                                    # those that run already
            if frame.f_code.co_filename in self.files:
                frame.f_trace = self.line
            frame = frame.f_back
        sys.settrace(self.call)
        try:
            yield
        finally:
            sys.settrace(before)
        for size, line, _ in live.made[first:]:
            self.size[line] += size

    def call(self, frame, event, arg):
        return self.line if frame.f_code.co_filename in self.files else None

    def line(self, frame, event, arg):
        if event == "line":
            self.times[frame.f_code.co_filename, frame.f_lineno] += 1
        return self.line


def counted(run, step):
    """Around a step of a rehearsal: the first one is counted, if any is."""
    is_counted = run.counts is not None and step == 0
    return run.counts.of_step(run.live) if is_counted else contextlib.nullcontext()


def halved(chapter: ModuleType, args: argparse.Namespace, argv: list[str],
           parse: Callable) -> argparse.Namespace | None:
    """The arguments of the same rank's work in half the cluster, by parse(chapter, argv); None, if
    that is small, or its ranks are not data-parallel, or they would do other work."""
    shares, places = args.shares, getattr(chapter, "places_of_ranks", None)
    if args.ranks < MANY or shares < 4 or shares % 2 or args.batch % 2:
        return None
    rank, axis = args.rank // 2, []
    if places:                                          # chapter 09, whose ranks have other axes
        there, axis = copy.copy(args), [f"--dp={shares // 2}"]
        there.dp = shares // 2
        at = places(args)[args.rank]
        rank = places(there).index(at._replace(dp=at.dp // 2))
    try:
        half = parse(chapter, [*argv, f"--ranks={args.ranks // 2}", f"--rank={rank}", *axis,
                               f"--batch={args.batch // 2}"])
    except Refused:
        return None
    same = all(getattr(half, name, None) == getattr(args, name, None)
               for name in ("micro_batch", "ep"))
    return half if same and 2 * half.shares == shares else None


def hold(run, fewer=None):
    """Find, beside the rehearsal in half the cluster, what a step runs or makes more of, and in how
    many groups more a rank is."""
    if fewer is None:
        if run.world >= MANY:
            run.note("what grows with the ranks was not looked at: no half of them is beside")
        return
    more = run.args.shares - fewer.args.shares          # ranks on the axis that was halved
    full, half, problems = run.counts, fewer.counts, []
    rises = {line: full.times[line] - half.times[line] for line in full.times}
    loops = [line for line, times in rises.items() if times >= more]
    for line in (max(block, key=rises.get) for block in blocks_of(loops)):
        problems.append((line, "runs {} times in a step", full.times, half.times, "{:,}".format))
    for line, size in full.size.items():
        if line not in loops and size - half.size[line] >= max(LARGE, size / 4):
            problems.append((line, "makes {} in a step", full.size, half.size, quantity))
    for line, groups in run.groups.own.items():
        if groups - fewer.groups.own[line] >= more:
            problems.append((line, "puts this rank into {} groups", run.groups.own,
                             fewer.groups.own, "{:,}".format))
    for line, words, now, before, in_words in problems:
        if line:
            run.found.append(f"{named(line)} {words.format(in_words(now[line]))} with "
                             f"{run.world:,} ranks, and {in_words(before[line])} with "
                             f"{fewer.world:,}: {source_of(line)}")
    if not problems:
        run.note(f"beside {fewer.world:,} ranks, with half the data-parallel ones: in a step no "
                 f"line runs {more:,} times more often, or makes a quarter and {quantity(LARGE)} "
                 f"more; none puts this rank into {more:,} groups more")


def blocks_of(lines):
    """Lists of lines, (file, number), that follow each other."""
    lines = sorted(lines)
    starts = [i for i, (file, number) in enumerate(lines)
              if not i or lines[i - 1][0] != file or number - lines[i - 1][1] > 2]
    return [lines[i:j] for i, j in itertools.pairwise([*starts, len(lines)])]
