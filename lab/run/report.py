"""The run with all instruments: it measures, compares with one GPU, reports and writes the JSON."""

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from common import Config
from lab.run import meeting, strict, verify
from lab.run.about import About, as_check
from lab.run.bench import Bench
from lab.run.formulas import hold, hold_beginning, updated_parameters
from lab.run.instrument import Instrument
from lab.run.meters import (
    ActivationMeter,
    CommMeter,
    FlopMeter,
    nbytes,
    shapes_of_a_block,
    shards_of,
)
from lab.run.one_gpu import BesideOneGpu
from lab.run.words import name_of_text, quantity

METERED_STEP = 2        # the third step is metered, or the last if there are fewer


class Step(NamedTuple):
    """What is known of a step when its line is printed. expected: one GPU's loss, or None."""

    number: int
    loss: float
    expected: float | None
    norm: float
    seconds: float

    @property
    def difference(self):
        if self.expected is None:
            return None
        return abs(self.loss - self.expected) / (abs(self.expected) or 1)


def or_dash(value, form):
    return "-" if value is None else format(value, form)


# The columns of the report's first table, one line a step: {heading: (width, text of a Step)}.
COLUMNS = {
    "step": (6, lambda step: str(step.number)),
    "loss": (9, lambda step: f"{step.loss:.4f}"),
    "single GPU": (12, lambda step: or_dash(step.expected, ".4f")),
    "difference": (12, lambda step: or_dash(step.difference, ".1e")),
    "grad norm": (11, lambda step: f"{step.norm:.4f}"),
    "ms": (5, lambda step: f"{1e3 * step.seconds:.0f}"),
}



def heading_of_checks(words="per rank and step"):
    """The columns of the report's second table, one line a check: Run.row prints the lines."""
    return f"  {words:<40}{'measured':>12}{'formula':>15}"


class Run(BesideOneGpu, Bench):
    """One run of a chapter: times and meters its steps, compares them with one GPU, and reports.

    formulas: the chapter's; answer: what they gave, once a step was metered. `checks` are
    measurements, beside their formulas where there are any.

    lab/launch.py puts a run together. about: the chapter's about.py. instruments: what it is held
    to beside all others. checkpoint: what it goes on from. saver(run) saves it. watch(run) says
    which rank is lost. examine: looks at a step that does not match one GPU's, for explain(run),
    the sentences below the problems. draw(record, path) draws its picture.
    """

    is_rehearsal = False    # one rank, whose tensors have no values: lab/rehearsal

    def __init__(self, args: argparse.Namespace, formulas: Callable | None = None, *,
                 about: object = None, instruments: Sequence[Instrument] = (),
                 checkpoint: object = None, saver: Callable | None = None,
                 watch: Callable = meeting.Watch, examine: Callable | None = None,
                 explain: Callable | None = None, draw: Callable | None = None):
        self.about, self.instruments, self.checkpoint = about, instruments, checkpoint
        self.explain, self.draw_record = explain, draw
        self.prepare(args)
        super().__init__(args)
        self.formulas, self.answer, self.updated = formulas, None, None
        self.model, self.optimizers, self.remembered = torch.nn.Module(), [], {}
        self.saver = saver(self) if saver else None
        if checkpoint is not None:
            self.first_step = checkpoint.index["step"]
        self.step = self.first_step + 1                 # the first is 1
        self.watch = watch(self)
        torch.set_float32_matmul_precision("highest" if args.verify else "high")    # TF32 on a GPU
        self.started, self.batch, self.profiler, self.peak = time.perf_counter(), None, None, 0
        self.checks, self.notes, self.recorded = [], [], {}
        self.losses, self.grad_norms, self.references, self.seconds = [], [], [], []
        self.losses_in_time = []                        # of one GPU, where this run is late
        self.comm, self.kept, self.flops = CommMeter(self.on_cuda), None, None
        self.actions, self.messages, self.flops_of = [], 0, {}
        self.skipped, self.not_finite, self.stopped = 0, None, False
        self.problems, self.unlike, self.diagnosis = [], [], []         # filled in the end
        self.unwritten = None                           # the hole that the formulas have come to
        self.rounding = verify.rounding_of(args, about)
        self.tolerance = verify.tolerances(self.rounding, args.optimizer,
                                           args.batch * args.model.seq,
                                           getattr(args.model, "experts", 0))
        self.verified_steps = verify.steps_of(self.rounding)
        tensor_steps = 1 if self.rounding in verify.LOSSY else self.verified_steps
        self.verifier = None
        if args.verify:
            self.verifier = verify.Verifier(self, tensor_steps, self.tolerance, examine)

    @property
    def at(self):
        return f"step {self.step}"

    @property
    def so_far(self):
        done = self.first_step + len(self.losses)
        return f"after step {done}" if done else "before the first step"

    # Before the first step.

    def draw(self, model):
        """With what is saved, where the run goes on."""
        model = super().draw(model)
        if self.checkpoint is not None:
            self.checkpoint.load_model(model)
        if self.batch is None:                          # else it is that of one GPU's run
            self.model = model
        for instrument in self.instruments:
            if self.batch is None:
                instrument.begin(self, model)
            else:
                instrument.replace_in_one_gpu(model)
        return model

    def optimizer(self, parameters, **remembered):
        """With the states that are saved, where the run goes on."""
        optimizer = super().optimizer(parameters)
        if self.checkpoint is not None:
            self.checkpoint.load_states(optimizer)
            saved = self.checkpoint.index["remembered"]
            for name in remembered.keys() & saved.keys():
                if saved[name]:
                    now = remembered[name].state_dict()
                    remembered[name].load_state_dict(now | saved[name])
        if self.batch is None:                          # else it is that of one GPU's run
            self.optimizers.append(optimizer)
            self.remembered |= remembered
        return optimizer

    # The steps.

    def batches(self, *args, **more):
        """Yield each step's Batch, below the report's first lines."""
        for instrument in self.instruments:
            if "after_step" in more and instrument.after_step_of_one_gpu:
                more["after_step"] = instrument.after_step_of_one_gpu
        self.header()
        for batch in super().batches(*args, **more):
            self.step = batch.step + 1
            strict.refuse_above_vocabulary(self.args, self.text, int(batch.tokens.max()))
            strict.refuse_above_vocabulary(self.args, self.text, int(batch.targets.max()))
            self.batch = batch
            if self.args.verify and batch.step == self.first_step:
                hold_beginning(self)
            yield batch

    def header(self):
        """Print what is trained, and the heads of the columns."""
        args, m, own = self.args, self.args.model, strict.settings(self.args)
        precision = self.rounding
        if self.is_mixed and args.precision == "bf16":
            precision += f", masters in {args.dtype}"
        if self.on_cuda and not args.verify and self.rounding == "float32":
            precision += " (matmuls in TF32)"
        self.first_line(precision)
        block = f" · RMSNorm, SwiGLU of {m.hidden}" if m.gated else ""
        self.say(f"  {m.layers} layers, dim {m.dim}, {m.heads} heads ({m.kv_heads} kv), seq "
                 f"{m.seq}, batch {args.batch}{block} · {m.parameters() / 1e6:.2f} M parameters")
        self.say(f"  {args.optimizer}, {args.attention} attention{own and ', ' + own} · text: "
                 f"{name_of_text(args)}, {len(self.text.tokens):,} tokens")
        if self.checkpoint is not None:
            for line in self.checkpoint.describe(args):
                self.say(f"  {line}")
        self.say(" ".join(f"{name:>{width}}" for name, (width, _) in COLUMNS.items()))

    def now(self):
        if self.on_cuda:
            torch.cuda.synchronize()                    # the host is ahead of the GPU
        return time.perf_counter()

    @property
    def is_metered(self):
        """Whether the step that comes, or has just been taken, is the one that is metered."""
        taken = self.step - self.first_step - 1
        return taken == min(METERED_STEP, self.args.steps - self.first_step - 1)

    @contextlib.contextmanager
    def measure(self):
        """Around one training step: its seconds, and CUDA's peak memory; in one step what is sent,
        kept and computed; in the last the profile."""
        with contextlib.ExitStack() as meters:
            if self.args.profile and self.rank == 0 and self.step == self.args.steps:
                os.environ.setdefault("KINETO_LOG_LEVEL", "7")      # else it prints its own log
                self.profiler = meters.enter_context(torch.profiler.profile(acc_events=True))
            for instrument in self.instruments:
                meters.enter_context(instrument.around_step(self))
            if self.is_metered:
                self.meter(meters)
            if self.on_cuda:
                torch.cuda.reset_peak_memory_stats()
            start = self.now()
            yield
            self.seconds.append(self.now() - start)
            if self.on_cuda:
                self.peak = max(self.peak, torch.cuda.max_memory_allocated())

    def meter(self, meters):
        """Enter the meters of the one step that is held to formulas."""
        flat = [p.flat[0][0] for p in updated_parameters(self) if hasattr(p, "flat")]
        sharded = flat and [*self.model.parameters(), *(unit.shard for unit in self.updated or ())]
        self.comm = CommMeter(self.on_cuda, flat, sharded)          # its clock starts now
        self.kept = ActivationMeter(tree_leaves(self.batch.micro_batches))
        self.flops = FlopMeter()
        for p in self.model.parameters():
            if p.requires_grad:
                hook = p.register_post_accumulate_grad_hook(self.comm.gradient_is_ready)
                meters.callback(hook.remove)
        if hasattr(self.model, "block1"):
            self.recorded["shapes_of_a_block"] = meters.enter_context(
                shapes_of_a_block(self.model))
        for meter in (self.kept, self.flops, self.comm):
            meters.enter_context(meter)

    @contextlib.contextmanager
    def span(self, action, kept, between=()):
        """In the metered step, note when the action ran, what is kept for backward after it, and
        the most bytes of messages in one."""
        if not self.is_metered:
            yield
            return
        start = self.comm.clock.now()
        yield
        end = self.comm.clock.now()
        self.kept.keep(kept)
        self.actions.append([*action, start, end, self.kept.bytes])
        self.messages = max(self.messages, nbytes(between))

    def log(self, batch, loss, norm, model, updated=None, skipped=False, **shown):
        """After a step: compare it with one GPU and print its line."""
        self.model, self.updated = model, updated
        self.losses.append(loss.item())
        self.grad_norms.append(norm.item())
        for instrument in self.instruments:
            instrument.after_step(batch, norm)
        self.skipped += skipped
        for name, value in shown.items():
            value = value.tolist() if torch.is_tensor(value) else value
            self.recorded.setdefault(name, []).append(value)
        told_to_end = self.note_the_end(loss, norm, skipped)
        step = Step(batch.step + 1, self.losses[-1], self.compare(batch, loss, norm, skipped),
                    self.grad_norms[-1], self.seconds[-1])
        every = max(1, self.args.steps // 10)
        if len(self.losses) <= verify.STEPS or step.number % every == 0:
            line = " ".join(f"{text(step):>{width}}" for width, text in COLUMNS.values())
            self.say(line + "   skipped" * skipped)
        if self.stopped:                                # what followed could only be nonsense
            raise SystemExit(self.finish())
        if self.is_metered and self.formulas:
            try:
                self.answer = self.formulas(self.args, self.rank, self.world, model)
            except NotImplementedError as hole:         # an exercise that is not begun
                self.unwritten = f"the formulas are not written yet: {hole}"
        if self.saver:
            self.saver.stop = told_to_end
            self.saver.after_step(step.number, step.loss, model)

    def note_the_end(self, loss, norm, skipped):
        """Whether any rank is told to end. On all ranks the run has `stopped` if anything is not
        finite on one of them. Communication: an all_reduce of two numbers."""
        finite = math.isfinite(loss) and (skipped or math.isfinite(norm))
        facts = torch.tensor([self.watch.is_told_to_end(), not finite], dtype=torch.int32,
                             device=self.device)
        if self.world > 1:
            dist.all_reduce(facts, dist.ReduceOp.MAX)
        told_to_end, self.stopped = map(bool, facts.tolist())
        if not finite:
            gradients = [p.grad for p in updated_parameters(self)]
            is_from_another = all(g.isfinite().all() for g in gradients if g is not None)
            self.not_finite = [self.step, is_from_another, self.rank,
                               f"loss {loss:.4f}, gradient norm {norm:.4f}"]
        return told_to_end

    def compare(self, batch, loss, norm, skipped):
        """One GPU's loss in this step, of which the verifier compares everything; None: of a step
        that is not compared."""
        if not self.verifier or self.verifier.steps >= self.verified_steps:
            return None
        if skipped:
            self.references.append((None, None))
            return None
        self.references.append(self.verifier.compare(batch, loss, norm, self.pairs()))
        if self.is_late and self.rank == 0:
            self.losses_in_time.append(self.loss_in_time(batch))
        return self.references[-1][0]

    def pairs(self):
        """(global name, parameter) pairs of what is updated, for the comparison. Communication: an
        all_gather of each flat shard."""
        updated = self.updated
        if updated is None:
            return verify.named_parameters(self.model)
        updated = list(updated)
        return verify.gathered(updated) if hasattr(updated[0], "full") else updated

    # What was measured, beside its formula.

    def check(self, about, measured, formula=None, unit="B", within=0):
        """Record a measurement, beside its formula if it has one: they are to be equal, or no
        further apart than `within`, a share of the formula. about: the fields of an About."""
        ok = self.judge(about, measured, formula, within)
        self.row(About(*about).name, measured, formula, unit, ok)

    def judge(self, about, measured, formula=None, within=0):
        """The same without a line in the report. Returns whether they are; None: no formula."""
        ok = None if formula is None else abs(measured - formula) <= within * formula
        self.checks.append(as_check(about, measured, formula, ok))
        return ok

    def row(self, name, measured, formula, unit, ok):
        """A line of the report's second table."""
        values = f"{quantity(measured, unit):>12}{quantity(formula, unit):>15}"
        mark = {None: "", True: "✓", False: "✗"}[ok]
        self.notes.append(f"  {name:<38}{values}   {mark}")

    def note(self, line):
        """Say something below the measurements."""
        self.notes.append(line)

    def record(self, **data):
        """Keep plain numbers, lists and dictionaries for the JSON: pictures are drawn from them."""
        self.recorded |= data

    # The end.

    def judge_and_report(self):
        """Below the steps: what was measured, and what is wrong. Returns the exit status."""
        if not self.stopped:
            hold(self)
        if self.saver:
            self.saver.close()
            self.saver.report()
        if self.on_cuda:
            beside = " (with one GPU's run)" if self.verifier and self.rank == 0 else ""
            self.check(("kept", f"allocated at the peak{beside}"), self.peak)
        failed = [check for check in self.checks if check["ok"] is False]
        everyones = self.of_all_ranks((shards_of(self.model), self.flops_of, self.in_seconds(),
                                       self.not_finite, failed))
        self.watch.let_go()
        if self.rank > 0:
            return 0
        shards, flops, actions, not_finite, failed = zip(*everyones)
        self.record(shards=list(shards), flops=list(flops))
        if any(actions):
            self.record(executed=list(actions))
        for rank, checks in enumerate(failed[1:], start=1):
            self.checks += [c | {"name": f"rank {rank}: {c['name']}", "rank": rank} for c in checks]
        if self.notes or not self.stopped:
            print(heading_of_checks())
        for note in self.notes:
            print(f"  {note}".rstrip())

        first = min(filter(None, not_finite), default=None)
        self.problems = [f"step {first[0]}, rank {first[2]}: {first[3]}"] if first else []
        if self.verifier and (self.verifier.steps or not self.stopped):
            lines, wrong = self.verifier.verdict()
            for line in lines:
                print(f"  {line}")
            self.unlike = list(wrong)
            self.problems += wrong.values()
        self.problems += [self.unwritten] if self.unwritten else []
        self.problems += [f"{c['name']}: measured {c['measured']}, formula {c['expected']}"
                          for c in self.checks if c["ok"] is False]
        if self.saver and self.saver.problem:
            self.problems.append(self.saver.problem)
        self.diagnosis = self.explain(self) if self.explain else []
        return self.report_problems(profile=self.write_trace)

    def in_seconds(self):
        """The actions, with start and end in seconds since the step began."""
        if not self.actions:
            return []
        since = self.comm.clock.since_start()
        return [[*action, since(start), since(end), kept]
                for *action, start, end, kept in self.actions]

    def draw_picture(self, path):
        if self.stopped:
            raise ValueError("the run has stopped before it was measured")
        super().draw_picture(path)

    def write_trace(self, path):
        """The profile of the last step, for Perfetto."""
        path.unlink(missing_ok=True)                    # an old one would pass for the new one
        if self.profiler is None:
            raise ValueError("there was no step")
        self.profiler.export_chrome_trace(str(path))

    def as_json(self):
        """The run as plain data; what is not finite becomes None."""
        args = self.args
        worst = self.verifier.worst if self.verifier else {}
        off = {kind: value for kind, (value, _) in worst.items()}
        flags = {k: v for k, v in vars(args).items() if not isinstance(v, (Path, Config, dict))}
        record = {
            "chapter": args.chapter, "variant": args.variant, "world_size": self.world,
            "backend": dist.get_backend(), "device": str(self.device), "dtype": args.dtype,
            "first_step": self.first_step,
            "config": flags | asdict(args.model) | {"attention": args.attention},
            "loss": self.losses, "reference_loss": [loss for loss, _ in self.references],
            "grad_norm": self.grad_norms, "reference_grad_norm": [n for _, n in self.references],
            "step_seconds": self.seconds, "seconds": time.perf_counter() - self.started,
            "max_loss_diff": off.get("loss"),
            "max_grad_diff": max(off["gradients"], off["gradient norm"]) if off else None,
            "max_param_diff": off.get("parameters"),
            "tolerance": self.tolerance, "unlike": self.unlike, "comm": self.comm.total,
            "checks": self.checks,
            "problems": self.problems, "diagnosis": self.diagnosis,
            "recorded": self.recorded,
        }
        return json.loads(json.dumps(record), parse_constant=lambda name: None)
