"""A run of a chapter as one rank of a cluster that is not there: see fakes.py.

It takes two steps, and what lab/ meters in a run is metered in the second: states, what is kept for
backward, traffic, FLOPs, each beside the chapter's formula. And every storage is followed: how many
bytes are alive at the peak, what they are, and which lines have made them.
"""

import argparse
import contextlib
import math
import traceback
from types import ModuleType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
from lab import chapters
from lab.rehearsal import fakes, growth, planned
from lab.rehearsal.lines import named, source_of
from lab.run import formulas, report
from lab.run.words import count, quantity

STEPS = 2               # the first makes the optimizer's states
LINES = 5               # of the largest at the peak


class NeedsValues(Exception):
    """A chapter asks a tensor for its value, which a rehearsal has not: where, and in which line
    of the source."""


def no_watch(run):
    """Of a rank that is alone."""


class NoValues(TorchDispatchMode):
    """Formulas may ask a tensor for its value, which is then not a number. It is not shown."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return math.nan
        return func(*args, **(kwargs or {}))


class Run(report.Run):
    """peak: {class: bytes alive at the peak of the metered step}; lines: [bytes, tensors, where,
    source] of the lines that have made most of them. counts, groups, found: see growth.py."""

    is_rehearsal = True

    def __init__(self, args, formulas, files, steps=STEPS, counts=None):
        super().__init__(args, formulas, about=chapters.about(args.chapter), watch=no_watch,
                         instruments=chapters.instruments(args))
        self.kinds, self.packed, self.peak, self.lines, self.spans = {}, {}, {}, [], []
        self.live, self.groups = fakes.LiveMeter(files), growth.Groups(files)
        self.steps, self.counts, self.found = steps, counts, []

    def prepare(self, args):
        """Nothing is written, and nobody waits."""

    def of_all_ranks(self, mine):
        """There are no others."""
        return [mine]

    def mesh(self, **axes):
        with unset_fake_temporarily():                      # it computes with ranks
            return super().mesh(**axes)

    def batches(self, share=0, build=common.gpt, after_step=None):
        """Batches without numbers."""
        args, seq = self.args, self.args.model.seq
        shape = args.batch // args.shares, seq
        for step in range(self.steps):
            self.step = step + 1
            mine = [torch.zeros(shape, dtype=torch.int64) for _ in range(2)]
            pairs = list(zip(*(x.split(args.micro_batch) for x in mine)))
            self.batch = common.Batch(step, None, None, args.batch * seq, pairs,
                                      self.text.starts(step))
            with growth.counted(self, step):
                yield self.batch

    @contextlib.contextmanager
    def measure(self):
        """Meter the second step."""
        if not self.is_metered:
            yield
            return
        with contextlib.ExitStack() as meters:
            self.live.begin()
            self.meter(meters)
            self.kept.note = self.note_packed
            for p in self.model.parameters():
                hook = p.register_post_accumulate_grad_hook(self.note_gradient)
                meters.callback(hook.remove)
            yield

    @contextlib.contextmanager
    def span(self, action, kept, between=()):
        """And note what is kept after it."""
        with super().span(action, kept, between):
            yield
        if self.is_metered:
            self.spans.append([*action, self.kept.bytes])

    def note_packed(self, key):
        """When a storage is kept for backward."""
        self.packed.setdefault(self.live.names.get(key), len(self.live.events))

    def note_gradient(self, p):
        if p.grad is not None:
            self.kinds[self.live.name(p.grad)] = "gradients"

    def log(self, batch, loss, norm, model, updated=None, skipped=False, **shown):
        """After a step: which storages are states; in the second one, what is alive at the peak."""
        self.model, self.updated = model, updated
        self.losses.append(None)
        names = "parameters", "gradients", "optimizer states"
        for name, tensors in zip(names, formulas.held(self)):
            self.kinds |= {self.live.name(x): name for x in tree_leaves(tensors)
                           if torch.is_tensor(x)}
        if self.is_metered:
            self.weigh()
            with unset_fake_temporarily(), NoValues():
                self.answer = self.formulas(self.args, self.rank, self.world, model)
            if self.args.operators == "gpu" and self.answer.get("kept") is not None:
                self.answer["kept"] = self.answer["kept"] | {"fused norms": True}

    def weigh(self):
        """What is alive at the peak, by class and by line."""
        classes, lines = {}, {}
        for size, line, name in self.live.at_peak():
            kind = self.kind(name, self.live.peak_at)
            classes[kind] = classes.get(kind, 0) + size
            before, tensors = lines.get(line, (0, 0))
            lines[line] = before + size, tensors + 1
        self.peak = classes
        largest = sorted(((*seen, line) for line, seen in lines.items() if line), reverse=True)
        self.lines = [[size, tensors, named(line), source_of(line)]
                      for size, tensors, line in largest[:LINES]]

    def kind(self, name, event):
        """The class of what has that name, after so many events."""
        is_kept = self.packed.get(name, event + 1) <= event
        return self.kinds.get(name, "kept for backward" if is_kept else "all else")

    def hold(self, fewer=None):
        """Hold what was metered to the chapter's formulas, and tell what is alive at the peak.
        fewer: the Run in half the cluster, if there is one."""
        formulas.hold(self)
        self.recorded.pop("axes", None)
        if all(check["name"] != "FLOPs of a step" for check in self.checks):
            self.check(("FLOPs", "FLOPs of a step"), self.flops.all, unit="FLOP")
        self.check(("states", "all that is alive", "at the peak"), self.live.peak)
        for kind, size in sorted(self.peak.items(), key=lambda pair: -pair[1]):
            self.note(f"  {quantity(size):>10}  {kind}")
        self.note("made by these lines, the largest first")
        for size, tensors, where, source in self.lines:
            self.note(f"  {quantity(size):>10}  {count(tensors, 'tensor')}, {where}: {source}")
        kept = max((kept for *_, kept in self.spans), default=self.kept.most)
        self.record(peak=self.peak, lines=self.lines, activations=kept)
        self.set_beside_the_planner()
        growth.hold(self, fewer)
        self.problems = [f"{c['name']}: measured {c['measured']}, formula {c['expected']}"
                         for c in self.checks if c["ok"] is False] + self.found
        self.data = super().as_json() | {"rank": self.rank}

    def set_beside_the_planner(self):
        """Add what chapter 10 plans for this layout."""
        plan = planned.plan_of(self.args, self.world)
        if plan is None:
            return self.note("no planner beside: it plans --precision bf16, and not every variant")
        self.record(left_out=planned.left_out(self, plan))
        self.notes += planned.notes(self, plan)
        self.record(planner={what: [measured, planned] for what, measured, planned
                             in planned.rows(self, plan)},
                    seconds={cause: plan.seconds.get(cause, 0) for cause in plan.seconds})

    def as_json(self):
        return self.data                                # the group has gone by now

    def told(self):
        """The lines of the report."""
        args, m = self.args, self.args.model
        lines = [*self.notes, *(f"✗ {problem}" for problem in self.problems)]
        return [f"{args.chapter.replace('_', ' ')} · {args.variant} · rank {self.rank:,} of "
                f"{self.world:,}, rehearsed: no numbers, true shapes · {self.rounding}",
                f"  {m.layers} layers, dim {m.dim}, {m.heads} heads ({m.kv_heads} kv), seq "
                f"{m.seq}, batch {args.batch} · {m.parameters() / 1e6:,.2f} M parameters",
                report.heading_of_checks("in the second step of this rank"),
                *(f"  {line}".rstrip() for line in lines)]


@contextlib.contextmanager
def taken(module, args, steps=STEPS, is_counted=False):
    """The Run after its steps, in its cluster. Raises NeedsValues, or growth.Found."""
    train = module.VARIANTS[args.variant]
    train = train[0] if isinstance(train, tuple) else train
    files = {file_of(train), common.__file__}
    counts = growth.Counts(files) if is_counted else None
    watch = growth.Watch(files, args.attention)
    with fakes.as_rank(args.rank, args.ranks), fakes.cluster(args.operators):
        run = Run(args, module.formulas, files, steps, counts)
        try:
            with run.groups, watch, run.live:
                train(run)
        except Exception as error:
            if watch.found:
                raise growth.Found(*watch.found.values()) from error
            if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
                raise NeedsValues(*asked_in(error, file_of(train))) from error
            raise
        run.found += watch.found.values()
        yield run


def rehearse(module: ModuleType, args: argparse.Namespace,
             half: argparse.Namespace | None = None) -> Run:
    """Take the chapter's steps as rank args.rank of args.ranks; before, if `half` says how, one of
    the same work in half the cluster. Raises NeedsValues, or growth.Found."""
    fewer = None
    with contextlib.suppress(NeedsValues, growth.Found):    # of which the whole one tells
        if half:
            with taken(module, half, 1, is_counted=True) as fewer:
                pass
    with taken(module, args, is_counted=fewer is not None) as run:
        run.hold(fewer)
    return run


def file_of(train):
    return train.__code__.co_filename


def asked_in(error, file):
    """The innermost line of the file in which an error was raised, and its source."""
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [frame.lineno for frame in frames if frame.filename == file]
    return named((file, numbers[-1])), source_of((file, numbers[-1]))
