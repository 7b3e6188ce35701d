"""The run with all instruments: it measures, compares with one GPU, reports and writes the JSON."""

import contextlib
import functools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import common
from common import Config, named_parameters, optimizer_state_bytes
from lab import cli, resuming, saving, schedules, verify
from lab.machines import MACHINES, PEAK_FLOPS
from lab.meters import (
    ActivationMeter,
    Clock,
    CommMeter,
    LiveActivations,
    MemoryTimeline,
    count_flops,
    hidden_share,
    nbytes,
    shapes_of_a_block,
    shards_of,
)

parse = cli.parse
METERED_STEP = 2        # communication is counted in the third step, or the last if there are fewer
WATCHED_STEPS = 3       # the memory of so many steps is watched, if it is
AMOUNTS = "calls", "payload", "on the wire"     # what is checked of each operator that sends


class Run(common.Run):
    """One run of a chapter: times and meters its steps, compares them with one GPU, and reports.

    Only rank 0 prints. `checks` are measurements, beside their formulas where there are any.
    """

    def __init__(self, args):
        cli.refuse_cuda(args)
        cli.refuse_lonely()
        for path in filter(None, (args.json, args.plot, args.profile)):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.checkpoint = resuming.goes_on_from(args)
        args.seed = args.seed if self.checkpoint is None else self.checkpoint
        if args.save:
            saving.make_folder(args.save)
        saving.set_timeout(args.timeout)
        super().__init__(args)
        if args.resume:
            resuming.refuse_disagreement(self)
        self.optimizers, self.remembered = [], {}
        self.saver = saving.Saver(self) if args.save else None
        if self.checkpoint is not None:
            self.first_step = self.checkpoint.index["step"]
        self.step = self.first_step + 1                 # the first is 1
        self.started, self.comm = time.perf_counter(), CommMeter(self.on_cuda)
        self.checks, self.notes, self.recorded, self.peak = [], [], {}, 0
        self.losses, self.grad_norms, self.references, self.parameters = [], [], [], []
        self.memory, self.batch, self.profiler, self.shards, self.flops = None, None, None, {}, {}
        self.live, self.clocks, self.actions, self.known = None, {}, {}, None
        self.skipped, self.not_finite, self.stopped = 0, None, False
        self.rounds_to(args.dtype)

    @property
    def on_cuda(self):
        return self.device.type == "cuda"

    # Said by the chapter before its first step.

    def rounds_to(self, rounding, steps=verify.STEPS):
        """The run rounds to this (a key of verify.LOSSY, or --dtype), which decides how far from
        one GPU it may be; so many steps are compared."""
        self.rounding, self.verified_steps = rounding, steps
        tokens = self.args.batch * self.args.model.seq
        self.tolerance = verify.tolerances(rounding, self.args.optimizer, tokens)
        tensor_steps = 1 if rounding in verify.LOSSY else steps
        self.verifier = verify.Verifier(self, tensor_steps) if self.args.verify else None

    def optimizer(self, parameters):
        """With the states that are saved, where the run goes on."""
        optimizer = super().optimizer(parameters)
        if self.checkpoint is not None:
            self.checkpoint.load_states(optimizer)
        if self.batch is None:                          # else it is that of one GPU's run
            self.optimizers.append(optimizer)
        return optimizer

    def remember(self, **objects):
        """Have checkpoints keep the state_dict of objects, plain numbers, by a name for each."""
        self.remembered |= objects
        saved = self.checkpoint.index["remembered"] if self.checkpoint is not None else {}
        for name in objects.keys() & saved.keys():
            if saved[name]:
                objects[name].load_state_dict(objects[name].state_dict() | saved[name])

    def watch_memory(self, held):
        """Watch the first steps' memory. held(): lists of tensors, as MemoryTimeline wants them."""
        self.memory = MemoryTimeline(held)

    def watch_actions(self, model):
        """In the step whose communication is counted, note when actions of a schedule ran (those
        around which `timed` is), and what was kept for backward after each."""
        self.known = model

    @contextlib.contextmanager
    def timed(self, action, kept=(), of="executed"):
        """Around an action, a tuple of plain data. kept: tensors that are kept for backward without
        autograd's knowing."""
        if of == "executed" and self.live is None:      # another step
            yield
            return
        start = self.clocks[of].now()
        yield
        end = self.clocks[of].now()
        if self.live:
            self.live.keep(kept)
        alive = self.live.bytes if self.live else 0
        self.actions[of].append([*action, start, end, alive])

    # The steps.

    def batches(self, share=0):
        self.header()
        for batch in super().batches(share):
            self.step = batch.step + 1
            cli.refuse_above_vocabulary(self.args, self.text, int(batch.tokens.max()))
            cli.refuse_above_vocabulary(self.args, self.text, int(batch.targets.max()))
            self.batch = batch
            yield batch

    def header(self):
        args, m, own = self.args, self.args.model, cli.settings(self.args)
        chapter, ranks = args.chapter.replace("_", " "), count(self.world, "rank")
        tf32 = " (matmuls in TF32)" if self.on_cuda and not args.verify else ""
        tf32 = tf32 if self.rounding == "float32" else ""
        self.say(f"{chapter} · {args.variant} · {ranks} · {self.where()} · {self.rounding}{tf32}")
        self.say(f"  {m.layers} layers, dim {m.dim}, {m.heads} heads ({m.kv_heads} kv), seq "
                 f"{m.seq}, batch {args.batch} · {m.parameters() / 1e6:.2f} M parameters")
        self.say(f"  {args.optimizer}, {args.attention} attention{own and ', ' + own} · text: "
                 f"{self.text.name}, {len(self.text.tokens):,} tokens")
        if self.checkpoint is not None:
            chapter, variant, ranks = self.checkpoint.index["by"]
            self.say(f"  goes on after step {self.first_step} of {chapter.replace('_', ' ')} · "
                     f"{variant} · {count(ranks, 'rank')}: {self.checkpoint.reader.folder}")
        self.say("  step      loss   single GPU   difference   grad norm    ms")

    def where(self):
        """The device and the backend, and why those."""
        local_world = common.environment("LOCAL_WORLD_SIZE", self.world)
        gpus = torch.cuda.device_count()
        why = f"GPUs: {gpus}, local ranks: {local_world}" if gpus else "no GPU"
        why = why if self.args.device == "auto" else f"--device {self.args.device}"
        machines = count(self.world // local_world, "machine")
        return f"{self.device.type}, {dist.get_backend()} ({machines}, {why})"

    @contextlib.contextmanager
    def guard(self):
        """Around all that ranks do together: with --timeout, say which rank hangs or has ended."""
        try:
            yield
        except BaseException as error:
            if self.saver:
                self.saver.sigterm.put_back()
            if self.args.timeout and isinstance(error, RuntimeError):
                saving.name_the_lost(error, self)
            raise
        finally:
            saving.set_timeout(None)

    def say(self, line):
        if self.rank == 0:
            print(line, flush=True)

    @contextlib.contextmanager
    def measure(self):
        """Around one training step: its seconds, and CUDA's peak memory; in one step what is sent,
        in the first ones the memory over time if it is watched, in the last the profile."""
        step, last = len(self.seconds), self.args.steps - self.first_step - 1
        with contextlib.ExitStack() as meters:
            if self.args.profile and self.rank == 0 and step == last:
                os.environ.setdefault("KINETO_LOG_LEVEL", "7")      # else it prints its own log
                self.profiler = meters.enter_context(torch.profiler.profile(acc_events=True))
            if self.memory and step < WATCHED_STEPS:
                meters.enter_context(self.memory)
            if step == min(METERED_STEP, last):
                self.comm = CommMeter(self.on_cuda)                 # its clock starts now
                for p in self.parameters:
                    hook = p.register_post_accumulate_grad_hook(self.comm.gradient_is_ready)
                    meters.callback(hook.remove)
                meters.enter_context(self.comm)
                if self.known:
                    known = [*self.known.parameters(), *self.known.buffers(),
                             *tree_leaves(self.batch.micro_batches)]
                    self.actions["executed"], self.clocks["executed"] = [], self.comm.clock
                    self.live = LiveActivations(known)
                    meters.enter_context(self.live)
                    meters.callback(setattr, self, "live", None)
            if self.on_cuda:
                torch.cuda.reset_peak_memory_stats()
            start = self.now()
            yield
            self.seconds.append(self.now() - start)
            if self.on_cuda:
                self.peak = max(self.peak, torch.cuda.max_memory_allocated())

    def log(self, batch, loss, norm, model, skipped=False):
        """After a step: compare it with one GPU and print its line.

        loss, norm: of the whole batch and the whole model. model: a module, or (global name,
        parameter) pairs, of what this rank holds. skipped: the optimizer refused the step (fp16's
        overflow, which shows in the norm), so one GPU does not take it.
        """
        step = batch.step + 1
        module = isinstance(model, torch.nn.Module)
        if module:
            self.parameters = [p for p in model.parameters() if p.requires_grad]
            self.shards = shards_of(model)
        self.losses.append(loss.item())
        self.grad_norms.append(norm.item())
        self.skipped += skipped
        finite = math.isfinite(loss) and (skipped or math.isfinite(norm))
        sigterm = self.saver and self.saver.sigterm.came
        sigterm, not_finite = saving.on_any_rank(self, sigterm, not finite)
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
            pairs = named_parameters(model) if module else model
            self.references.append(self.verifier.compare(batch, loss, norm, pairs))
            expected = self.references[-1][0]
            off = abs(self.losses[-1] - expected) / (abs(expected) or 1)
            beside = f"{expected:12.4f} {off:12.1e}"
        if len(self.losses) <= verify.STEPS or step % max(1, self.args.steps // 10) == 0:
            self.say(f"{step:6} {self.losses[-1]:9.4f} {beside} {self.grad_norms[-1]:11.4f} "
                     f"{1e3 * self.seconds[-1]:5.0f}{'   skipped' if skipped else ''}")
        if self.stopped:                                # what followed could only be nonsense
            raise SystemExit(self.finish())
        if self.saver:
            self.saver.stop = sigterm
            self.saver.after_step(step, self.losses[-1], model if module else None)

    def gathered(self, units):
        """What `log` wants of chapter 03's units. Communication: only if the step is compared."""
        return verify.gathered(units)

    # What was measured, beside its formula.

    def check(self, name, measured, formula=None, unit="B", within=0):
        """Record a measurement, beside its formula if it has one: they are to be equal, or no
        further apart than `within`, a share of the formula."""
        self.row(name, measured, formula, unit, self.judge(name, measured, formula, within))

    def judge(self, name, measured, formula=None, within=0):
        """The same without a line in the report. Returns whether they are; None: no formula."""
        ok = None if formula is None else abs(measured - formula) <= within * formula
        self.checks.append({"name": name, "measured": measured, "expected": formula, "ok": ok})
        return ok

    def row(self, name, measured, formula, unit, ok):
        values = f"{quantity(measured, unit):>12}{quantity(formula, unit):>15}"
        self.notes.append(f"  {name:<38}{values}   {'' if ok is None else '✓' if ok else '✗'}")

    def check_bytes(self, name, tensors, formula=None):
        """The bytes behind some tensors, each storage once. (An optimizer has no states yet where
        all steps were skipped.)"""
        if name == "optimizer states" and self.skipped == len(self.losses):
            formula = None
        self.check(name, nbytes(tensors), formula)

    def check_states(self, model, optimizer, numbers=None, tensors=None):
        """Parameters, gradients and optimizer states of `model`. numbers: how many parameters this
        rank should have, in --dtype; None where there is no formula. tensors: in how many; by
        default in as many as the whole model has."""
        parameters = list(model.parameters())
        size = states = None
        if numbers is not None:
            width, tensors = self.dtype.itemsize, tensors or self.args.model.tensors()
            size = width * numbers
            states = optimizer_state_bytes(self.args.optimizer, numbers, tensors, width)
        self.check_bytes("parameters", parameters, size)
        self.check_bytes("gradients", [p.grad for p in parameters], size)
        self.check_bytes("optimizer states", list(optimizer.state.values()), states)

    def check_most_gradients(self, formula):
        """The most bytes of gradients at a time, in the steps whose memory was watched."""
        most = max(gradients for _, _, gradients, *_ in self.memory.samples)
        self.check("gradients, at the most", most, formula)

    def check_shards(self, units, optimizer, sizes):
        """The same of flat shards: chapter 03's units. sizes: {kind: bytes}, in this order."""
        masters = [getattr(unit, "master", unit.shard) for unit in units]       # chapter 09: none
        seconds = [getattr(unit, "secondary", None) for unit in units]
        gradients = [[unit.grad for unit in units], [p.grad for p in masters],
                     [p.grad for unit in units for p in unit.parameters]]
        masters = [master for unit, master in zip(units, masters) if master is not unit.shard]
        held = ([(unit.full, unit.shard) for unit in units] + seconds, gradients,
                [masters, *optimizer.state.values()])
        for (kind, size), tensors in zip(sizes.items(), held):
            self.check_bytes(kind, tensors, size)

    def check_activations(self, model, forward, formula=None, name="activations of a micro-batch"):
        """What autograd keeps at the end of forward(tokens, targets), which returns a loss.

        The formula is the CPU's. CUDA's kernels keep some small things otherwise (a LayerNorm its
        statistics in float32), so there it need only be right to within 10%; and what fused
        attention keeps depends on which of its kernels runs, so of that there is no formula.
        """
        tokens, targets = self.batch.micro_batches[0]
        meter = ActivationMeter([*model.parameters(), *model.buffers(), tokens, targets])
        with meter, shapes_of_a_block(model) as shapes:
            loss = forward(tokens, targets)
        del loss
        self.check_kept(name, meter.bytes, formula)
        self.record(activation_bytes=meter.bytes, shapes_of_a_block=shapes)

    def check_kept(self, name, measured, formula):
        """Bytes kept for backward, beside the CPU's formula, as above."""
        formula = None if self.attention_is_fused_on_cuda() else formula
        self.check(name, measured, formula, within=0.1 if self.on_cuda else 0)
        if self.on_cuda and formula not in (None, measured):
            self.note("CUDA's kernels keep other tensors than the CPU's, which the formula is of: "
                      f"{quantity(abs(measured - formula))} away")

    def check_alive(self, formula):
        """Bytes kept for backward after each action of a schedule. formula: a list of them."""
        over_time = [kept for *_, kept in self.actions["executed"]]
        self.check_kept("activations, at the most", max(over_time), max(formula))
        if not self.on_cuda:
            right = sum(measured == expected for measured, expected in zip(over_time, formula))
            self.check("actions after which that is as computed", right, len(formula), "")

    def check_rendezvous(self, schedule, programs):
        """Raise where chapter 07's messages do not match, or could block, on a strict network."""
        schedules.check_rendezvous(programs, schedule.needs)

    def sleep_through(self, execute, stages, out, milliseconds):
        """Take a step whose stages sleep for args.sleep milliseconds in each F, B and W: that needs
        no cores, and takes as long as simulated, and messages. Where others keep the machine busy,
        the best of five such steps counts. execute(stages, timed): the step."""
        sleeping = {number: schedules.SleepingStage(self.args.sleep / 1e3, out)
                    for number in stages}
        best, within = math.inf, 0.3
        for _ in range(5):
            self.actions["asleep"], self.clocks["asleep"] = [], Clock(self.on_cuda)
            dist.barrier()
            start = self.now()
            execute(sleeping, functools.partial(self.timed, of="asleep"))
            seconds = torch.tensor(self.now() - start, device=self.device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            best = min(best, round(1e3 * seconds.item()))
            if best <= (1 + within) * milliseconds:
                break
        self.check("a step of sleeping stages, simulated", best, milliseconds, "ms", within)

    def check_flops(self, name, forward_and_backward, formula, factor=1):
        """`factor` times the FLOPs of forward_and_backward(tokens, targets), which PyTorch counts.
        Of fused attention on CUDA there is no formula, as above."""
        micro_batch = self.batch.micro_batches[0]
        flops = factor * count_flops(lambda: forward_and_backward(*micro_batch))
        self.flops[name] = flops
        self.check(name, flops, None if self.attention_is_fused_on_cuda() else formula, "FLOP")

    def attention_is_fused_on_cuda(self):
        return self.on_cuda and self.args.attention != "plain"

    def of_metered_step(self, steps):
        """Of a list with something for each step, that of the step whose traffic is counted."""
        return steps[min(METERED_STEP, len(steps) - 1)]

    def check_traffic(self, formula=None):
        """All that this rank sent in the metered step.

        formula: {op: (calls, payload bytes, wire bytes)}; None where there is no formula.
        """
        for op, measured, expected in by_operator(self.comm.total, formula):
            for what, *values in zip(AMOUNTS, measured, expected):
                self.check(f"{op}, {what}", *values, "" if what == "calls" else "B")
        self.note_sent()

    def check_axes(self, axes, node_size):
        """The same, one line for each axis of a mesh and operator, and whether it leaves a machine.

        axes: {name: (a process group of its own, formula as above)}; one of a single rank is left
        out. node_size: ranks of a machine. What was sent on any other group fails a check.
        Communication, after all measurements: an all_gather_object over all ranks.
        """
        others, mine = dict(self.comm.by_group), {}
        for axis, (group, formula) in axes.items():
            seen = others.pop(group.group_name, {})
            if group.size() == 1 and not seen:
                continue
            for op, measured, expected in by_operator(seen, formula):
                oks = [self.judge(f"{axis}: {op}, {what}", *values)
                       for what, *values in zip(AMOUNTS, measured, expected)]
                ok = None if oks == [None] * 3 else False not in oks
                calls = count(measured[0], "call")
                self.row(f"{axis}: {op}, {calls}", measured[1], expected[1], "B", ok)
            mine[axis] = sorted(dist.get_process_group_ranks(group)), wire_bytes(seen)
        stray = round(sum(wire_bytes(seen) for seen in others.values()))
        if stray:
            self.check("on other groups", stray, 0)
        self.note_sent()

        everyones, recorded = [None] * self.world, {}
        dist.all_gather_object(everyones, mine)
        leaves = lambda ranks: ranks[0] // node_size != ranks[-1] // node_size
        for axis, (ranks, sent) in mine.items():
            groups, all_sent = zip(*(of_rank[axis] for of_rank in everyones if axis in of_rank))
            where = "leaves the machine" if leaves(ranks) else "inside a machine"
            few = ranks if len(ranks) <= 8 else [*ranks[:3], "...", ranks[-1]]
            self.note(f"{axis}: ranks {' '.join(map(str, few))}, {quantity(round(sent))} a step, "
                      f"{where}")
            recorded[axis] = {"groups": sorted(map(list, set(map(tuple, groups)))),
                              "wire_bytes": round(sent), "total": round(sum(all_sent)),
                              "leaves": any(map(leaves, groups))}
        self.record(axes=recorded)

    def note_sent(self):
        if self.comm.total:
            self.note("on the wire: not measured, but the payload times the ring algorithm's "
                      "factor, such as 2(N-1)/N for an all_reduce")
        self.record(timeline=self.comm.timeline())

    def note_overlap(self):
        """How much of what was sent in the metered step hides behind its last backward."""
        timeline = self.recorded["timeline"]
        begin, end = timeline["backward"][-1]
        self.note(f"{len(timeline['collectives'])} collectives, backward {1e3 * (end - begin):.1f} "
                  f"ms, hidden behind it: {hidden_share(timeline):.0%} of the communication")

    def compare_traffic(self, other, formula):
        """Note what this run sent beside what another technique sends by its formula."""
        here = wire_bytes(self.comm.total)
        there = sum(wire for _, _, wire in formula.values())
        share = f": {here / there:.0%}" if there else ""
        self.note(f"on the wire {quantity(round(here))} in a step, and {other} sends "
                  f"{quantity(round(there))}{share}")

    # What explains the measurements.

    def note(self, line):
        """Say something below the measurements."""
        self.notes.append(line)

    def on_machines(self, columns):
        """Note what functions of (FLOP/s, bytes/s) give for well-known machines. columns: {what the
        value is: the function}."""
        for number, what in enumerate(columns, start=1):
            self.note(f"({number}) {what}")
        heads = "".join(f"{f'({number})':>12}" for number in range(1, len(columns) + 1))
        self.note(f"  {'':<26}{heads}")
        for machine, rates in MACHINES.items():
            values = [function(*rates) for function in columns.values()]
            values = "".join(f"{v:12,.2f}" if v < 100 else f"{v:12,.0f}" for v in values)
            self.note(f"  {machine:<26}{values}")

    def note_speed(self, **utilizations):
        """Tokens per second, and utilization(seconds, peak) for each name where the GPU's peak is
        known. The first steps, which are watched, do not count."""
        if len(self.seconds) <= WATCHED_STEPS:
            return
        seconds = statistics.median(self.seconds[WATCHED_STEPS:])
        self.note(f"{self.args.batch * self.args.model.seq / seconds:,.0f} tokens/s")
        gpu = torch.cuda.get_device_name(self.device) if self.on_cuda else None
        if gpu in PEAK_FLOPS:
            shares = ", ".join(f"{name.upper()} {utilization(seconds, PEAK_FLOPS[gpu]):.1%}"
                               for name, utilization in utilizations.items())
            self.note(f"{shares} of the {PEAK_FLOPS[gpu] / 1e12:.0f} TFLOP/s of {gpu} in bf16")
        elif gpu:
            self.note(f"no MFU: lab/machines.py has no peak of {gpu}")

    def note_sample(self, write):
        """The mean loss of the last steps and, where the text is bytes, how the model goes on with
        its beginning: write(prompt) returns that, as tokens."""
        last = self.losses[-20:]
        self.note(f"mean loss of the last {count(len(last), 'step')}: "
                  f"{statistics.mean(last):.3f} nats per token")
        if self.text.tokens.itemsize == 1:
            written = printable(write(self.text.tokens[:8].tolist())).splitlines()
            self.note("what it writes by now:" + "".join(f"\n    | {line}" for line in written))

    def record(self, **data):
        """Keep plain numbers, lists and dictionaries for the JSON: pictures are drawn from them."""
        self.recorded |= data

    # The end.

    def finish(self):
        """Judge and report, and only then write and draw what the flags ask for. Returns the exit
        status: 1 on rank 0 if anything did not match, was not finite or could not be written."""
        with self.guard():                              # in which the last save ends
            status = self.judge_and_report()
        if self.saver:
            self.saver.sigterm.put_back()
        return status

    def judge_and_report(self):
        if self.saver:
            self.saver.close()
            self.saver.report()
        if self.memory:
            self.record(memory=[list(column) for column in zip(*self.memory.samples)])
        if self.on_cuda:
            beside = " (with one GPU's run)" if self.verifier and self.rank == 0 else ""
            self.check(f"allocated at the peak{beside}", self.peak)
        if self.known and not self.shards:                      # flat shards say nothing of cuts
            self.shards = shards_of(self.known)
        everyones, failed = [None] * self.world, [c for c in self.checks if c["ok"] is False]
        actions = {of: self.in_seconds(of) for of in self.actions}
        dist.all_gather_object(everyones, (self.shards, self.flops, actions, self.not_finite,
                                           failed))
        if self.rank > 0:
            return 0
        shards, flops, actions, not_finite, failed = zip(*everyones)
        self.record(shards=list(shards), flops=list(flops))
        self.record(**{of: [of_rank[of] for of_rank in actions] for of in actions[0]})
        for rank, checks in enumerate(failed[1:], start=1):
            self.checks += [c | {"name": f"rank {rank}: {c['name']}"} for c in checks]
        if self.notes or not self.stopped:
            print(f"  {'per rank and step':<40}{'measured':>12}{'formula':>15}")
        for note in self.notes:
            print(f"  {note}".rstrip())

        first = min(filter(None, not_finite), default=None)
        self.problems = [f"step {first[0]}, rank {first[2]}: {first[3]}"] if first else []
        if self.verifier and (self.verifier.steps or not self.stopped):
            lines, wrong = verify.verdict(self.verifier.worst, self.verifier.steps, self.rounding,
                                          self.tolerance)
            for line in lines:
                print(f"  {line}")
            self.problems += wrong
        self.problems += [f"{c['name']}: measured {c['measured']}, formula {c['expected']}"
                          for c in self.checks if c["ok"] is False]
        if self.saver and self.saver.problem:
            self.problems.append(self.saver.problem)
        for problem in self.problems:
            print(f"  ✗ {problem}", flush=True)
        outputs = {"json": self.write_json, "plot": self.draw, "profile": self.write_trace}
        written = [self.wrote(flag, write) for flag, write in outputs.items()]
        return 0 if all(written) and not self.problems else 1

    def in_seconds(self, of):
        """The actions, with start and end in seconds since the step began."""
        since = self.clocks[of].since_start()
        return [[*action, since(start), since(end), kept]
                for *action, start, end, kept in self.actions[of]]

    def wrote(self, flag, write):
        """Whether write(path) has worked, if the flag names a path. By now the verdict is printed,
        so what stops it, be it a full disk or a matplotlib that is missing, costs a line."""
        path = getattr(self.args, flag)
        try:
            if path:
                write(path)
        except Exception as error:
            why = (str(error).splitlines() or [""])[0]
            print(f"  ✗ --{flag} {path} is not written: {type(error).__name__}: {why}", flush=True)
            return False
        return True

    def write_json(self, path):
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def draw(self, path):
        from lab.pictures import draw

        if self.stopped:
            raise ValueError("the run has stopped before it was measured")
        draw([self.as_json()], self.args.chapter, path)
        print(f"  picture: {path}", flush=True)

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
            "tolerance": self.tolerance, "comm": self.comm.total, "checks": self.checks,
            "problems": self.problems,
            "recorded": self.recorded,
        }
        return json.loads(json.dumps(record), parse_constant=lambda name: None)


def by_operator(seen, formula):
    """Yield every operator that was seen or is expected, its AMOUNTS, and those by the formula."""
    nothing, unknown = {"calls": 0, "bytes": 0, "wire_bytes": 0}, (None, None, None)
    for op in sorted({*(formula or {}), *seen}):
        expected = unknown if formula is None else formula.get(op, (0, 0, 0))
        yield (op, [round(value) for value in seen.get(op, nothing).values()],
               [value if value is None else round(value) for value in expected])


def wire_bytes(seen):
    return sum(op["wire_bytes"] for op in seen.values())


def count(number, what):
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def printable(tokens):
    """Byte tokens as text, in which whatever a terminal could stumble over is a dot."""
    text = bytes(min(token, 255) for token in tokens).decode("latin-1")
    return "".join(c if c == "\n" or c.isascii() and c.isprintable() else "·" for c in text)


def quantity(value, unit="B"):
    """A number for a person: 3154944 and "B" to "3.15 MB"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value is not None and unit not in ("", "ms") and abs(value) >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return "-" if value is None else f"{value} {unit}".rstrip()


def summary(paths):
    """Print one line for each run whose JSON is given."""
    from lab.pictures import read_runs

    row = "{:<24}{:<16}{:>5}  {:<8}{:>11}{:>14}{:>8}{:>9}  {}"
    runs = read_runs(paths)
    print(row.format("chapter", "variant", "ranks", "backend", "final loss", "from one GPU",
                     "checks", "seconds", "verdict"))
    for run in runs:
        off = [run[f"max_{kind}_diff"] for kind in ("loss", "grad", "param")]
        largest = "-" if None in off else f"{max(off):.0e}"
        loss = "not finite" if run["loss"][-1] is None else f"{run['loss'][-1]:.4f}"
        checks = [check["ok"] for check in run["checks"] if check["ok"] is not None]
        verdict = f"✗ {run['problems'][0]}" if run["problems"] else "✓"
        variant = run["variant"]
        if "balance" in run["config"]:                  # what the runs of chapter 08 differ in
            variant += f", {run['config']['balance']}"
        if run.get("first_step"):                       # it has gone on
            variant += f", from {run['first_step']}"
        print(row.format(run["chapter"], variant, run["world_size"], run["backend"], loss, largest,
                         f"{sum(checks)}/{len(checks)}",
                         f"{run['seconds']:.0f}", verdict))
    for line in costs_of_balance(runs):
        print(line)


def costs_of_balance(runs):
    """Yield a line for each balance of chapter 08, beside a run that is the same without one. A
    seed's difference is no result: another seed's may have the other sign."""
    from lab.pictures import LAST, alike_but_for_balance, largest_load

    runs = [run for run in runs if "loads" in run["recorded"] and None not in run["loss"]]
    without = {}
    for run in sorted(runs, key=lambda run: run["config"]["balance"] != "none"):
        config, alike, last = run["config"], alike_but_for_balance(run), run["loss"][-LAST:]
        loss, load = statistics.mean(last), largest_load(run)
        if config["balance"] == "none":
            without[alike] = loss, load
        elif alike in without:
            loss_without, load_without = without[alike]
            yield (f"{run['chapter']}: with one seed ({config['seed']}), --balance="
                   f"{config['balance']} changes the loss by {loss - loss_without:+.4f} to "
                   f"{loss:.4f} (mean of the last {count(len(last), 'step')}), and the largest "
                   f"load is {load:.2f} times the mean, not {load_without:.2f} times")


if __name__ == "__main__":
    summary(sys.argv[1:])
