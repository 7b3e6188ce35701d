"""The run with all instruments: it measures, compares with one GPU, reports and writes the JSON."""

import argparse
import contextlib
import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from common import Config, Refused, environment
from lab import ROOT
from lab.checkpoints import resuming, saving
from lab.checkpoints.checkpoint import Checkpoint
from lab.diagnose import diagnose
from lab.run import collectives, commands, meeting, noise, oracle, refusals, strict, verify
from lab.run.about import About, as_check
from lab.run.bench import Bench
from lab.run.formulas import WATCHED_STEPS, held, hold, hold_beginning, updated_parameters
from lab.run.meters import (
    ActivationMeter,
    CommMeter,
    FlopMeter,
    MemoryTimeline,
    nbytes,
    shapes_of_a_block,
    shards_of,
)
from lab.run.one_gpu import BesideOneGpu
from lab.run.words import count, name_of_text, quantity

METERED_STEP = 2        # the third step is metered, or the last if there are fewer


class Run(BesideOneGpu, Bench):
    """One run of a chapter: times and meters its steps, compares them with one GPU, and reports.

    answer: what the chapter's `formulas` gave, once a step was metered.
    `checks` are measurements, beside their formulas where there are any.
    """

    def __init__(self, args: argparse.Namespace, formulas: Callable | None = None,
                 checkpoint: Checkpoint | None = None):
        self.checkpoint = checkpoint                        # which the run goes on from, if any
        if args.save:
            saving.make_folder(args.save)
        self.meet(args)
        super().__init__(args)
        if args.resume:
            resuming.refuse_disagreement(self)
        self.formulas, self.answer, self.updated = formulas, None, None
        self.model, self.optimizers, self.remembered = torch.nn.Module(), [], {}
        self.saver = saving.Saver(self) if args.save else None
        if self.checkpoint is not None:
            self.first_step = self.checkpoint.index["step"]
        self.step = self.first_step + 1                 # the first is 1
        self.watch = meeting.Watch(self)
        torch.set_float32_matmul_precision("highest" if args.verify else "high")    # TF32 on a GPU
        self.started, self.batch, self.profiler, self.peak = time.perf_counter(), None, None, 0
        self.checks, self.notes, self.recorded = [], [], {}
        self.losses, self.grad_norms, self.references, self.seconds = [], [], [], []
        self.losses_in_time = []                        # of one GPU, where this run is late
        self.comm, self.kept, self.flops = CommMeter(self.on_cuda), None, None
        self.memory, self.actions, self.messages, self.flops_of = None, [], 0, {}
        self.skipped, self.not_finite, self.stopped, self.noise = 0, None, False, None
        self.unlike, self.diagnosis = [], []            # filled in the end
        self.unwritten = None                           # the hole that the formulas have come to
        self.rounding, self.verified_steps = verify.rounding_of(args)
        tokens = args.batch * args.model.seq
        experts = getattr(args.model, "experts", 0)
        self.tolerance = verify.tolerances(self.rounding, args.optimizer, tokens, experts)
        tensor_steps = 1 if self.rounding in verify.LOSSY else self.verified_steps
        self.verifier = (verify.Verifier(self, tensor_steps, self.tolerance)
                         if args.verify else None)

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
            if getattr(self.args, "noise_scale", False):    # chapter 02, before its replica is made
                self.noise = noise.NoiseMeter(model)
            return model
        return oracle.take_place(model)

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
        if "after_step" in more:
            more["after_step"] = oracle.move_biases         # of one GPU
        self.header()
        if self.args.chapter.startswith("01"):
            self.memory = MemoryTimeline(lambda: held(self))
        for batch in super().batches(*args, **more):
            self.step = batch.step + 1
            strict.refuse_above_vocabulary(self.args, self.text, int(batch.tokens.max()))
            strict.refuse_above_vocabulary(self.args, self.text, int(batch.targets.max()))
            self.batch = batch
            if self.args.verify and batch.step == self.first_step:
                hold_beginning(self)
            yield batch

    def header(self):
        args, m, own = self.args, self.args.model, strict.settings(self.args)
        block = f" · RMSNorm, SwiGLU of {m.hidden}" if m.gated else ""
        tf32 = " (matmuls in TF32)" if self.on_cuda and not args.verify else ""
        tf32 = tf32 if self.rounding == "float32" else ""
        masters = f", masters in {args.dtype}" if self.is_mixed and args.precision == "bf16" else ""
        self.first_line(f"{self.rounding}{masters}{tf32}")
        self.say(f"  {m.layers} layers, dim {m.dim}, {m.heads} heads ({m.kv_heads} kv), seq "
                 f"{m.seq}, batch {args.batch}{block} · {m.parameters() / 1e6:.2f} M parameters")
        self.say(f"  {args.optimizer}, {args.attention} attention{own and ', ' + own} · text: "
                 f"{name_of_text(args)}, {len(self.text.tokens):,} tokens")
        if self.checkpoint is not None:
            chapter, variant, ranks = self.checkpoint.index["by"]
            self.say(f"  goes on after step {self.first_step} of {chapter.replace('_', ' ')} · "
                     f"{variant} · {count(ranks, 'rank')}: {self.checkpoint.reader.folder}")
            for line in resuming.changes(args, self.checkpoint.index["run"]):
                self.say(f"  {line}")
        self.say("  step      loss   single GPU   difference   grad norm    ms")

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
        kept and computed; of chapter 01 the memory over the first ones; in the last the profile."""
        with contextlib.ExitStack() as meters:
            if self.args.profile and self.rank == 0 and self.step == self.args.steps:
                os.environ.setdefault("KINETO_LOG_LEVEL", "7")      # else it prints its own log
                self.profiler = meters.enter_context(torch.profiler.profile(acc_events=True))
            if self.memory and len(self.seconds) < WATCHED_STEPS:
                meters.enter_context(self.memory)
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
        step = batch.step + 1
        self.model, self.updated = model, updated
        self.losses.append(loss.item())
        self.grad_norms.append(norm.item())
        if self.noise:
            self.noise.after_step(batch, norm)
        self.skipped += skipped
        for name, value in shown.items():
            value = value.tolist() if torch.is_tensor(value) else value
            self.recorded.setdefault(name, []).append(value)
        finite = math.isfinite(loss) and (skipped or math.isfinite(norm))
        told_to_end = self.watch.is_told_to_end()
        told_to_end, not_finite = saving.on_any_rank(self, told_to_end, not finite)
        self.stopped = not_finite                       # on all ranks, of which one may know why
        if not finite:
            from_another = saving.gradients_are_finite(self.optimizers)
            self.not_finite = [step, from_another, self.rank,
                               f"loss {loss:.4f}, gradient norm {norm:.4f}"]
        beside = f"{'-':>12} {'-':>12}"
        verified = self.verifier and self.verifier.steps < self.verified_steps
        if verified and skipped:
            self.references.append((None, None))
        elif verified:
            self.references.append(self.verifier.compare(batch, loss, norm, self.pairs()))
            if self.is_late and self.rank == 0:
                self.losses_in_time.append(self.loss_in_time(batch))
            expected = self.references[-1][0]
            off = abs(self.losses[-1] - expected) / (abs(expected) or 1)
            beside = f"{expected:12.4f} {off:12.1e}"
        if len(self.losses) <= verify.STEPS or step % max(1, self.args.steps // 10) == 0:
            self.say(f"{step:6} {self.losses[-1]:9.4f} {beside} {self.grad_norms[-1]:11.4f} "
                     f"{1e3 * self.seconds[-1]:5.0f}{'   skipped' if skipped else ''}")
        if self.stopped:                                # what followed could only be nonsense
            raise SystemExit(self.finish())
        if self.is_metered and self.formulas:
            try:
                self.answer = self.formulas(self.args, self.rank, self.world, model)
            except NotImplementedError as hole:         # an exercise that is not begun
                self.unwritten = f"the formulas are not written yet: {hole}"
        if self.saver:
            self.saver.stop = told_to_end
            self.saver.after_step(step, self.losses[-1], model)

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
        values = f"{quantity(measured, unit):>12}{quantity(formula, unit):>15}"
        self.notes.append(f"  {name:<38}{values}   {'' if ok is None else '✓' if ok else '✗'}")

    def note(self, line):
        """Say something below the measurements."""
        self.notes.append(line)

    def record(self, **data):
        """Keep plain numbers, lists and dictionaries for the JSON: pictures are drawn from them."""
        self.recorded |= data

    # The end.

    def finish(self):
        """Judge and report, and only then write and draw what the flags ask for. Returns the exit
        status: 1 on rank 0 if anything did not match, was not finite or could not be written."""
        with self.guard():                              # in which the last save ends
            status = self.judge_and_report()
        self.watch.stop()
        return status

    def judge_and_report(self):
        if self.memory:
            self.record(memory=[list(column) for column in zip(*self.memory.samples)])
        if not self.stopped:
            hold(self)
        if self.saver:
            self.saver.close()
            self.saver.report()
        if self.on_cuda:
            beside = " (with one GPU's run)" if self.verifier and self.rank == 0 else ""
            self.check(("kept", f"allocated at the peak{beside}"), self.peak)
        failed = [check for check in self.checks if check["ok"] is False]
        everyones, actions = [None] * self.world, self.in_seconds()
        dist.all_gather_object(everyones, (shards_of(self.model), self.flops_of, actions,
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
            print(f"  {'per rank and step':<40}{'measured':>12}{'formula':>15}")
        for note in self.notes:
            print(f"  {note}".rstrip())

        first = min(filter(None, not_finite), default=None)
        self.problems = [f"step {first[0]}, rank {first[2]}: {first[3]}"] if first else []
        if self.verifier and (self.verifier.steps or not self.stopped):
            lines, wrong = verify.verdict(self.verifier.worst, self.verifier.steps, self.rounding,
                                          self.tolerance, self.verifier.explained)
            for line in lines:
                print(f"  {line}")
            self.unlike = list(wrong)
            self.problems += wrong.values()
        self.problems += [self.unwritten] if self.unwritten else []
        self.problems += [f"{c['name']}: measured {c['measured']}, formula {c['expected']}"
                          for c in self.checks if c["ok"] is False]
        if self.saver and self.saver.problem:
            self.problems.append(self.saver.problem)
        self.diagnosis = diagnose.of_run(self)
        self.report_problems()
        outputs = {"json": self.write_json, "plot": self.draw_picture, "profile": self.write_trace}
        written = [self.wrote(flag, write) for flag, write in outputs.items()]
        return 0 if all(written) and not self.problems else 1

    @contextlib.contextmanager
    def as_far_as_written(self):
        """Hold the run to formulas. Chapter 10's may be holes, where that one is an exercise."""
        try:
            yield
        except NotImplementedError as hole:
            where = Path(traceback.extract_tb(hole.__traceback__)[-1].filename)
            if where.parent != ROOT or where.name.startswith(self.args.chapter[:2]):
                raise
            self.note(f"not held to {where.name}, where this is not written yet: {hole}")

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
        path.unlink(missing_ok=True)                    # an old one would pass for the new one
        if self.profiler is None:
            raise ValueError("there was no step")
        self.profiler.export_chrome_trace(str(path))    # which says nothing if it fails
        if not (path.exists() and path.read_bytes().rstrip().endswith(b"}")):
            raise OSError("PyTorch has not written all of the trace")

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


# ------------------------------------------------------------------------------- a run as a program

def main(file: str, doc: str, variants: dict, requires: Callable, flags: Callable,
         formulas: Callable | None = None, argv: list[str] | None = None) -> int:
    """Run a chapter: refuse what does not fit, train. Returns the exit status. argv: None where the
    chapter is the program, whose output is then made `steady`."""
    if argv is None:
        sys.stdout, argv = commands.steady(sys.stdout), sys.argv[1:]
    strict.refuse_launcher()
    try:
        args, checkpoint = accepted(file, doc, variants, requires, flags, argv)
        trains = hasattr(args, "model")
        run = Run(args, formulas, checkpoint) if trains else collectives.Run(args, formulas)
        train = variants[args.variant]
        train = train[0] if isinstance(train, tuple) else train
        with run.guard():
            run.found = train(run)                      # None, of those that train a model
        return run.finish()
    except Refused as refused:
        refusals.complain(refused)


def accepted(file: str, doc: str, variants: dict, requires: Callable, flags: Callable,
             argv: list[str]) -> tuple:
    """The arguments of a run, and the checkpoint from which it goes on; raises Refused for those
    that do not fit. It changes nothing."""
    args = strict.parse(file, doc, variants, flags, argv)
    requires(args, environment("WORLD_SIZE", 1))
    noise.refuse_alone(args)
    strict.refuse_cuda(args)
    return args, resuming.goes_on_from(args) if hasattr(args, "model") else None


def launch(*chapter):
    """Run a chapter's `main` and leave cleanly, with its status.

    A process group that is still referred to when Python shuts down aborts the process: so collect
    garbage, then destroy it. PyTorch itself never lets go of one whose collectives a dispatch mode
    has seen (the meters are such), and its threads would run on: so leave at once.
    """
    signal.signal(signal.SIGINT, interrupt)
    try:
        status = main(*chapter)
    except SystemExit as leaving:
        status = leaving.code
    except KeyboardInterrupt as interrupted:
        if not interrupted.args and environment("RANK", 0) == 0:
            meeting.say("interrupted before the first step")
        status = 128 + signal.SIGINT
    except RuntimeError as error:
        if not any(words in str(error) for words in meeting.LOST):
            raise
        meeting.say(f"rank {environment('RANK', 0)}: another rank has ended")
        status = 1
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    for stream in filter(None, (sys.stdout, sys.stderr)):       # None: closed, by `>&-`
        stream.flush()
    os._exit(status or 0)


def interrupt(*signal_and_frame):
    """On Ctrl-C, once: it comes from the terminal, and then from torchrun as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
