"""Chapter 01's settings: each of them goes forward and backward once, beside what it is to keep, to
compute, and to move to the host.

A chapter's answer has, as "settings",

    choose        prepares a model: (model, attention, recompute)
    forward       from tokens to logits: (model, tokens, recompute, k)
    kept          {recompute: shares of what is kept}
    flops         of a step: (cfg, batch, attention, recompute, early stop, k)
    most again    bytes kept at the most while blocks are computed again: (layers, k, bytes of a
                  block's input, bytes that a block keeps)
    best k        the k that keeps least then: (layers, the same two)
    offloaded     bytes that go to the host, and come back: (layers, bytes of an input)
    parts         {part: parameters}: (cfg); rule: 6·N a token, of a step: (cfg, batch)
    textbook      well-known bytes of a block: (cfg, sequences); and {why: bytes} by which they
                  exceed ours: (cfg, sequences, bytes of a LayerNorm's mean)
    width         bytes of a number; autocast: the dtype that PyTorch's is to choose, or None
"""

import contextlib
import functools
import itertools
import math
import statistics
import time
import weakref
from dataclasses import replace
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

from common import CORES, loss_sum
from lab.run import anatomy
from lab.run.formulas import WATCHED_STEPS, attention_is_fused_on_cuda, check_kept, held
from lab.run.instrument import Instrument
from lab.run.meters import ActivationMeter, FlopMeter, nbytes, storage_of
from lab.run.words import count, printable


def choices(args, device):
    """(attention, recompute, k) of each setting. With a tiny preset on a CPU all are tried; with
    --recompute every the smallest k for each number of groups; else the run's own."""
    own, layers = (args.attention, args.recompute, args.k), args.model.layers
    if not args.preset.startswith("tiny") or device.type != "cpu" or args.attention not in CORES:
        return [own]
    if args.recompute == "every":
        ks = {args.k, *(math.ceil(layers / groups) for groups in range(1, layers + 1))}
        return [(args.attention, "every", k) for k in sorted(ks)]
    if args.recompute == "offload":
        return [own]
    return list(itertools.product(CORES, ("none", "selective", "full"), [1]))


def hold(run, given):
    """Hold each setting to the chapter's formulas, on the first micro-batch."""
    cores, most = [block.attn.core for block in run.model[1:-1]], {}
    for attention, recompute, k in choices(run.args, run.device):
        name = f"{attention}, {recompute}" + (f" {k}" if recompute == "every" else "")
        given["choose"](run.model, attention, recompute)
        forward = functools.partial(given["forward"], run.model, recompute=recompute, k=k)
        if given["autocast"]:
            forward = torch.autocast(run.device.type, given["autocast"])(forward)
        cfg = replace(run.args.model, attention=attention)
        kept = given["kept"][recompute] | {"every": k}
        if run.args.precision == "fp8":
            kept |= {"fp8": run.args.scaling or "tile"}
        hold_kept(run, given, name, forward, cfg, None if given["autocast"] else kept, most)
        hold_flops(run, given, name, forward, cfg, (attention, recompute), k)

    if len(most) > 1 and None not in most.values():
        of_block = bytes_of_block(run, given, replace(cfg, attention=run.args.attention), kept)
        run.check(("kept", "k that keeps least in backward"), min(most, key=most.get),
                  given["best k"](cfg.layers, *of_block), "")
    for block, core in zip(run.model[1:-1], cores):
        block.attn.core = core
    run.model.zero_grad()
    explain(run, given)


def loss(run, forward):
    tokens, targets = run.batch.micro_batches[0]
    return loss_sum(forward(tokens), targets)


def hold_kept(run, given, name, forward, cfg, kept, most):
    """What is kept after forward; and of `every` and `offload`, which say so in `kept`, the most
    that is kept in backward while blocks are computed again, and what moves."""
    args = run.args
    formula = again = moved = None
    if kept is not None:                                # autocast keeps several widths
        formula = anatomy.activation_bytes(cfg, args.micro_batch, given["width"], kept)
    with CheckpointMeter(run.batch.micro_batches[0]) as meter:
        result = loss(run, forward)
        check_kept(run, [f"kept per micro-batch: {name}"], meter.most, formula)
        if args.recompute not in ("every", "offload"):
            return
        meter.most = 0
        result.backward()

    if kept is not None:
        of_input, of_layer = bytes_of_block(run, given, cfg, kept)
        away = kept["recompute"] == "offload"           # then one layer is here at a time
        again = given["most again"](1 if away else cfg.layers, kept["every"], of_input, of_layer)
        again += anatomy.shared_bytes(cfg, given["width"], {})
        again += 0 if away else anatomy.copied_input_bytes(cfg, args.micro_batch, given["width"])
        moved = given["offloaded"](cfg.layers, of_input) if away else None
    check_kept(run, [f"most in backward: {name}"], meter.most, again)
    if moved is not None:
        run.check(("kept", "offloaded", "to the host"), meter.sent, moved)
        run.check(("kept", "offloaded", "back"), meter.fetched, moved)
    most[kept and kept["every"]] = meter.most


def bytes_of_block(run, given, cfg, kept):
    """Of its input, and of all that it keeps."""
    batch, e = run.args.micro_batch, given["width"]
    shares = {name: share for name, share in kept.items() if name == "fp8"}
    of_input = batch * cfg.seq * cfg.dim * e
    return of_input, anatomy.kept_by_modules(cfg, batch, e, shares)[1]


def hold_flops(run, given, name, forward, cfg, choice, k):
    """FLOPs of a step; and where PyTorch's checkpoint stops early, which it cannot where linears in
    FP8 keep their inputs when all is done. Our own kernels are not counted."""
    args = run.args
    if choice[0] == "triton" or getattr(args, "fp8_kernels", False):
        return
    whole, stopped = (given["flops"](cfg, args.batch, *choice, stop, k) for stop in (False, True))
    if args.precision == "fp8" and "recompute" in given["kept"][choice[1]]:
        stopped = whole
    for early_stop, formula in ((False, whole), (True, stopped)):
        if early_stop and stopped == whole:
            continue
        with set_checkpoint_early_stop(early_stop), FlopMeter() as meter:
            loss(run, forward).backward()
        about = "FLOPs", f"computed: {name}", "early stop" if early_stop else ""
        run.check(about, args.batch // args.micro_batch * meter.all,
                  None if attention_is_fused_on_cuda(run) else formula, "FLOP")


def explain(run, given):
    """Notes that set the run's numbers beside well-known ones."""
    args, cfg = run.args, run.args.model
    parts, n = given["parts"](cfg), cfg.parameters()
    run.note("parameters: " + ", ".join(f"{part} {size / n:.1%}" for part, size in parts.items())
             + f"; 12·h² a layer would be {12 * cfg.layers * cfg.dim**2 / n:.1%}")

    if cfg.mlp() == 8 * cfg.dim**2 and not cfg.gated:
        bytes_of_block, difference = given["textbook"]
        textbook = bytes_of_block(cfg, args.micro_batch)
        unlike = difference(cfg, args.micro_batch, 4 if run.on_cuda else 2)
        run.note(f"a block in 16 bits keeps {(textbook - sum(unlike.values())) / 1e6:.3f} MB; the "
                 f"textbook's s·b·h·(34 + 5·a·s/h) is {textbook / 1e6:.3f} MB:")
        for reason, size in unlike.items():
            if size:
                run.note(f"  {size / 1e6:8.3f} MB {reason}")

    needed, full, stopped = (given["flops"](cfg, args.batch, "plain", *again)
                             for again in (("none",), ("full",), ("full", True)))
    run.note(f"recomputing every block takes {full / needed:.2f} times the FLOPs, "
             f"{stopped / needed:.2f} times where the checkpoint stops early, as in training")
    embedding = "" if cfg.tie else "has the embedding, which multiplies nothing, and "
    run.note(f"6·N·tokens is {given['rule'](cfg, args.batch) / needed:.2f} of the FLOPs: N "
             f"{embedding}leaves out attention's scores")


# ------------------------------------------------------------------------------------------ meters

class CheckpointMeter(ActivationMeter):
    """Also counts what is kept in backward, which a checkpoint computes again, and what hooks move
    to the host and back (sent, fetched). Of several hooks PyTorch asks the innermost alone: so all
    that are made while this is entered tell it."""

    def __init__(self, known=()):
        super().__init__(known)
        self.sent = self.fetched = 0

    def __enter__(self):
        meter, hooks = self, torch.autograd.graph.saved_tensors_hooks
        begin = hooks.__init__

        def begin_and_tell(self, pack, unpack):
            begin(self, lambda x: meter.packed(pack, x), lambda kept: meter.unpacked(unpack, kept))

        self.patch = mock.patch.object(hooks, "__init__", begin_and_tell)
        self.patch.start()
        super().__enter__()
        return self

    def __exit__(self, *exception):
        self.patch.stop()
        return super().__exit__(*exception)

    def packed(self, pack, x):
        try:
            kept = pack(x)
        except BaseException:                   # so a checkpoint ends, when it has got the last one
            self.pack(x)
            raise
        for tensor in filter(torch.is_tensor, tree_leaves(kept)):
            if storage_of(tensor)._cdata == storage_of(x)._cdata:
                self.pack(x)
            else:
                self.sent += tensor.nbytes
        return kept

    def unpacked(self, unpack, kept):
        x = unpack(kept)
        tensors = list(filter(torch.is_tensor, tree_leaves(kept)))
        if tensors and all(storage_of(x)._cdata != storage_of(t)._cdata for t in tensors):
            self.fetched += x.nbytes
        return x


class MemoryTimeline(TorchDispatchMode):
    """Adds up the storages that are alive, by kind, after every operator that changed their sum,
    before every update, and at the end.

    held() returns lists of tensors: parameters, gradients, optimizer states. samples: (seconds in
    operators so far, bytes of each of the three, bytes of all else); all else is activations and
    what an operator needs for a moment. The seconds are the host's: on CUDA it does not wait for an
    operator, so there they tell how long the launches took.
    """

    def __init__(self, held):
        super().__init__()
        self.held, self.live, self.total, self.sampled = held, {}, 0, 0
        self.samples, self.seconds = [], 0.0
        self.watch(held())

    def watch(self, tensors):
        for tensor in tree_leaves(tensors):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in self.live:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = storage.nbytes()
                self.total += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, key):
        self.total -= self.live.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start
        self.watch(result)
        if self.total != self.sampled:
            self.sample()
        return result

    def sample(self):
        kinds = [nbytes(tensors) for tensors in self.held()]
        self.samples.append((self.seconds, *kinds, self.total - sum(kinds)))
        self.sampled = self.total

    def __enter__(self):                    # before an update, all gradients are there
        self.hook = register_optimizer_step_pre_hook(lambda *update: self.sample())
        return super().__enter__()

    def __exit__(self, *exception):
        self.hook.remove()
        self.sample()                       # the optimizer has filed its states by now
        return super().__exit__(*exception)


# ----------------------------------------------------------------------------------- what it writes

def note_sample(run, forward):
    """The mean loss of the last steps and, where the text is bytes, how the model goes on with its
    beginning. forward: tokens (1, seq) to logits (1, seq, vocab)."""
    last = run.losses[-20:]
    run.note(f"mean loss of the last {count(len(last), 'step')}: "
             f"{statistics.mean(last):.3f} nats per token")
    if run.text.tokens.itemsize == 1:
        written = sample(forward, run.text.tokens[:8].tolist(), run.args.model.seq, run.device)
        lines = printable(written).splitlines()
        run.note("what it writes by now:" + "".join(f"\n    | {line}" for line in lines))


@torch.no_grad()
def sample(forward, prompt, seq, device="cpu", length=160, temperature=0.7):
    """Let a model continue a text, token by token. Returns all tokens, the prompt's first."""
    generator, tokens = torch.Generator().manual_seed(0), list(prompt)
    for _ in range(length):
        logits = forward(torch.tensor([tokens[-seq:]], device=device))[0, -1]
        if not logits.isfinite().all():                         # the last step has overflowed
            break
        probabilities = (logits.float().cpu() / temperature).softmax(0)
        tokens.append(torch.multinomial(probabilities, 1, generator=generator).item())
    return tokens


# ----------------------------------------------------------------------------------- the instrument

class Held(Instrument):
    memory = None

    def around_step(self, run):
        """Of the first steps, the memory."""
        if self.memory is None:
            self.memory = MemoryTimeline(lambda: held(run))
        return self.memory if len(run.seconds) < WATCHED_STEPS else contextlib.nullcontext()

    def hold_states(self, run, answer):
        run.record(memory=[list(column) for column in zip(*self.memory.samples)])
        if "most gradients" in answer and not run.skipped:  # else there was no update to see
            most = max(gradients for _, _, gradients, *_ in self.memory.samples)
            run.check(("states", "gradients", "at the most"), most, answer["most gradients"])

    def hold_activations(self, run, answer):
        if "settings" in answer:
            hold(run, answer["settings"])
        return "settings" in answer

    def finish(self, run, answer):
        if "sample" in answer:
            note_sample(run, answer["sample"])
