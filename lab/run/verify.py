"""The single-GPU run beside this one, and the tolerances.

A run is compared with one GPU in its losses, gradients, gradient norms and parameters, not only in
its losses: Adam divides a wrong gradient scale out, so the losses and parameters would not show it.

A difference is relative to the largest magnitude that the reference tensor has had so far. (In a
text of one repeated byte the loss and all gradients are soon zero in truth, and both runs have
nothing but rounding noise there.) A gradient may be zero from the beginning, as k's is in that
text. So its difference is relative to SMALL times the largest of all gradients, if that is more.

If a difference is larger than its tolerance, we ask what rounding alone would do: one GPU takes the
same steps again, rounded differently (rounding.py). Differences of up to TIMES that are rounding.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from common import Batch, part, rounded
from lab.run.rounding import TIMES, Rounding
from lab.run.words import count

LARGEST = 10**7         # numbers of a step that is examined: rank 0 gathers those of all ranks
STEPS = 5               # so many steps are compared: rounding differences grow in any training
SMALL = 1e-4            # in 16 bits the gradients of q and k are no larger than five times that
SENT_ELSEWHERE = 0.5    # of a gradient: what a token that goes to another expert may take along
LOSSY = {               # twice what an honest run was seen to stray, or more
    "bfloat16": {"loss": 5e-3, "gradient norm": 2e-2, "gradients": 1 / 8, "parameters": 1 / 8},
    "float16": {"loss": 1e-3, "gradient norm": 5e-3, "gradients": 0.05, "parameters": 0.05},
    "fp8": {"loss": 1e-2, "gradient norm": 5e-2, "gradients": 0.4, "parameters": 0.4},
    "float32 and fp8": {"loss": 2e-3, "gradient norm": 5e-3, "gradients": 5e-2, "parameters": 5e-2},
    "int8": {"loss": 1e-2, "gradient norm": 5e-2, "gradients": None, "parameters": None},
}


def rounding_of(args: argparse.Namespace, about: object = None) -> str:
    """What a run with these flags rounds to: a key of LOSSY, or its --dtype. about: the about.py of
    its chapter, which may know better than --dtype and --precision."""
    return getattr(about, "rounding", name_of_rounded)(args)


def steps_of(rounding: str) -> int:
    """How many steps are compared: more of int8, which loses something in each."""
    return 50 if rounding == "int8" else STEPS


def name_of_rounded(args: argparse.Namespace) -> str:
    """What --dtype and --precision round parameters and activations to."""
    return str(rounded(args)).removeprefix("torch.")


def tolerances(dtype: str, optimizer: str, tokens: int = 8 * 128, experts: int = 0) -> dict:
    """{kind: the largest difference that passes; None: it is not compared}. tokens: of a global
    batch, by default the tiny preset's. experts: of a mixture.

    In float32 a result is off by up to 2^-24 of itself, and n such errors add up to about sqrt(n)
    of one. So gradients, which are sums over the tokens of what came out of sums over some 256
    features, may be off by sqrt(256 · tokens) · 2^-24, which is 3e-5 by default. So may parameters,
    since a LayerNorm's bias begins at zero and is nothing but gradient after SGD's first step.

    Rounding to 16 bits puts the weights off after the first step, so tensors are compared in that
    alone. AdamW then moves a parameter as far either way, however small its gradient, and Muon a
    matrix along all its directions: those are not compared (None), nor are tensors that were sent
    as int8, where a small one may share the scale of a large one. In float32 both magnify rounding
    likewise.

    In a mixture, rounding in 16 bits may send a token to another expert, with its whole gradient:
    with few valid tokens, that was seen to be 0.42 of the largest.

    FP8 rounds by 2^-4 at most, 2.6% in the mean, so a sum of products is off by 3.7% of its size,
    and what has gone through twelve of them by 13%, which may be a third where they cancel.
    Beside a run that rounds to FP8 itself there is nothing of that, in float64; in float32 a number
    that is 1e-7 from the middle of two of E4M3's may be rounded the other way, so a few of a
    million are off by 6%.
    """
    kinds = "loss", "gradient norm", "gradients", "parameters"
    exact = dict.fromkeys(kinds, 1e-10 if dtype == "float64" else 1e-5)
    if dtype == "float32":
        exact["gradients"] = exact["parameters"] = max(1e-5, (256 * tokens) ** 0.5 * 2**-24)
    allowed = LOSSY.get(dtype, exact)
    if experts and dtype == "bfloat16":
        allowed = allowed | {"gradients": SENT_ELSEWHERE, "parameters": SENT_ELSEWHERE}
    if optimizer in ("adamw", "muon") and dtype != "float64":
        allowed = allowed | {"parameters": None if dtype in LOSSY else 1e-3}
    return allowed


class Verifier:
    """Holds a run to one GPU's, which rank 0 trains beside it on the same batches.

    run: has one_gpu_step and one_gpu (one_gpu.py). steps: how many it has compared; beyond
    `tensor_steps` of them only the loss counts. worst[kind]: the largest difference so far and
    where it was. Communication per step, outside of all measurements: one broadcast of the
    reference's tensors, one small all_reduce, and what DTensors send to become whole.

    tolerance: of each kind; the first step that exceeds both it and what rounding explains is
    examined, and from then on the run is wrong, without asking again what rounding explains.
    evidence: examine(verifier, batch, here, there, scale) of that step; None for a model that is
    too large for it. explained: where a difference was tolerated only because rounding
    explains it.
    """

    def __init__(self, run, tensor_steps: int, tolerance: dict | None = None,
                 examine: Callable | None = None):
        self.run, self.tensor_steps, self.tolerance = run, tensor_steps, tolerance
        self.examine, self.rounding = examine, rounding_of(run.args, run.about)
        self.again = Rounding(run, self.rounding, tensors_of)
        self.explained, self.is_wrong = [], False
        self.steps, self.worst, self.shapes = 0, {}, None
        self.is_examined, self.evidence = False, None
        self.previous = None                            # one GPU's tensors
        self.largest = {}                               # (kind, name): magnitude so far
        self.waits = 0                                  # of all ranks for rank 0

    def compare(self, batch: Batch, loss: torch.Tensor, norm: torch.Tensor,
                parameters: Iterable[tuple]) -> list[float]:
        """Compare the step just taken, each rank what it holds. parameters: (global name,
        parameter) pairs. Returns one GPU's loss and norm."""
        run = self.run
        self.again.batches.append(batch)
        if run.rank == 0:
            there = tensors_of(*run.one_gpu_step(batch), run.one_gpu)
        if run.device.type == "cuda" and run.world > 1:
            self.wait_for_rank_0()
        if self.shapes is None:                         # of all that is compared, by kind and name
            shapes = [None]
            if run.rank == 0:
                shapes = [{key: tensor.shape for key, tensor in there.items()}]
            dist.broadcast_object_list(shapes, 0)
            self.shapes = shapes[0]

        sizes = [shape.numel() for shape in self.shapes.values()]
        reference = torch.empty(sum(sizes), dtype=torch.float64, device=run.device)
        if run.rank == 0:
            flat = [tensor.flatten().double() for tensor in there.values()]
            torch.cat(flat, out=reference)
        dist.broadcast(reference, 0)

        here = compared(loss, norm, parameters)
        fulls = dict(zip(self.shapes, reference.split(sizes)))
        for key, full in fulls.items():
            self.largest[key] = max(self.largest.get(key, 0), full.abs().max())
        scale = scales(self.largest)
        off = torch.full([len(fulls)], -1.0, dtype=torch.float64, device=run.device)
        for i, (key, full) in enumerate(fulls.items()):
            if key in here:                             # else it stays -1
                tensor, owner = here[key]
                expected = part(full.view(self.shapes[key]), getattr(owner, "cuts", ()))
                off[i] = difference(tensor, expected, scale[key])
        dist.all_reduce(off, dist.ReduceOp.MAX)

        counted = {key: math.inf if value < 0 else value        # nobody has it
                   for key, value in zip(self.shapes, off.tolist())
                   if key[0] == "loss" or self.steps < self.tensor_steps}
        too_large = self.exceeding(counted)
        if too_large and not self.is_wrong:             # else it stays wrong, and that takes long
            effects = self.effects(there if run.rank == 0 else None)
            wider = widened(scale, effects, self.tolerance)
            for key in counted:
                counted[key] *= float(scale[key] / wider[key])
            scale, left = wider, self.exceeding(counted)
            self.explained += [f"{' '.join(key).strip()} in step {batch.step + 1}"
                               for key in too_large if key not in left]
        self.is_wrong = self.is_wrong or bool(self.exceeding(counted))
        for (kind, name), value in counted.items():
            largest, _ = self.worst.get(kind, (-1, ""))
            if value > largest:
                where = f"{kind} {name}".strip() + f" in step {batch.step + 1}"
                self.worst[kind] = value, where

        there = {key: full.view(self.shapes[key]) for key, full in fulls.items()}
        is_small = reference.numel() <= LARGEST and not run.is_late     # of old weights
        looks_at_it = self.examine and not self.is_examined and is_small
        if looks_at_it and self.exceeding(counted):
            self.is_examined = True                     # rank 0 alone has the evidence
            self.evidence = self.examine(self, batch, here, there, scale)
        self.previous = {key: x.cpu() for key, x in there.items() if key[1] and is_small}
        self.steps += 1
        return [fulls[kind, ""].item() for kind in ("loss", "gradient norm")]

    def effects(self, there):
        """{key: how far rounding moves it}, the same on all ranks. there: what one GPU has, on rank
        0. Communication: one broadcast."""
        found = torch.zeros(len(self.shapes), dtype=torch.float64, device=self.run.device)
        if self.run.rank == 0:
            effects = [*self.again.effects(there).values()]
            found.copy_(torch.tensor(effects, dtype=torch.float64))     # float32 may overflow
        if self.run.device.type == "cuda" and self.run.world > 1:
            self.wait_for_rank_0()
        dist.broadcast(found, 0)
        return dict(zip(self.shapes, found.tolist()))

    def exceeding(self, off):
        """The keys of these {(kind, name): difference} that aren't tolerated: the same on all
        ranks."""
        allowed = self.tolerance or {}
        return [(kind, name) for (kind, name), value in off.items()
                if allowed.get(kind) is not None and value > allowed[kind]]

    def verdict(self) -> tuple[list[str], dict]:
        """What the comparison came to: lines for the report, and {kind: a line} of what doesn't
        match."""
        if not self.worst:
            return [], {"loss": "no step was compared with one GPU: all were skipped"}
        allowed = self.tolerance
        judged = {kind: off for kind, off in self.worst.items() if allowed[kind] is not None}
        wrong = {kind: f"{where} is off by {value:.1e}, tolerance {allowed[kind]:.0e}"
                 for kind, (value, where) in judged.items() if value > allowed[kind]}
        lines = []
        if self.rounding in LOSSY:
            limits = ", ".join(f"{kind} {allowed[kind]:.0e}" for kind in judged)
            lines.append(f"tolerances for {self.rounding}: {limits}; from step 2 on only the loss "
                         "counts")
        if self.explained:
            first, *others = self.explained
            more = f" and {len(others)} more" if others else ""
            lines.append(f"tolerated, because rounding alone moves it as far on one GPU: "
                         f"{first}{more}")
        off = ", ".join(f"{kind} {value:.0e}" for kind, (value, _) in judged.items())
        same, mark = ("NOT the same", "✗") if wrong else ("same", "✓")
        over = count(self.steps, "step")
        return [*lines, f"{same} as one GPU over {over}: {off}   {mark}"], wrong

    def wait_for_rank_0(self):
        """Until it has computed, wait at the store: ranks that wait for it in a collective
        would be killed by NCCL's watchdog, if one GPU takes longer than that has patience."""
        self.waits += 1
        store, key = dist.distributed_c10d._get_default_store(), f"one GPU, {self.waits}"
        if self.run.rank == 0:
            torch.cuda.synchronize()
            store.set(key, "computed")
        store.wait([key], timedelta(days=1))


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(global name, parameter) pairs: as gpt() named it, or as the module does."""
    return [(getattr(p, "global_name", name), p) for name, p in module.named_parameters()]


def compared(loss: torch.Tensor, norm: torch.Tensor, parameters: Iterable[tuple]) -> dict:
    """All that is compared: {(kind, name): (tensor, the parameter that says how it is cut)}."""
    tensors = {("loss", ""): (loss, None), ("gradient norm", ""): (norm, None)}
    for name, p in parameters:
        updated = getattr(p, "master", p)               # what the optimizer updates
        gradient = torch.zeros_like(updated) if p.grad is None else p.grad
        tensors["gradients", name], tensors["parameters", name] = (whole(gradient), p), (
            whole(updated), p)
    return tensors


def tensors_of(loss: torch.Tensor, norm: torch.Tensor, module: nn.Module) -> dict:
    """{(kind, name): tensor} of all that is compared, of one GPU's step."""
    found = compared(loss, norm, named_parameters(module))
    return {key: tensor.detach() for key, (tensor, _) in found.items()}


def gathered(units):
    """(global name, parameter) pairs of flat shards: the units of chapters 03, 09 and 11, in the
    precision of their updates, each cut as its parameter is. Communication: an all_gather per
    unit."""
    for unit in units:
        master = getattr(unit.shard, "master", unit.shard)                              # (k,)
        mine = torch.stack([master.data, unit.shard.grad.to(master)]).to(unit.full.device)
        sizes = getattr(unit, "sizes", [len(master)] * unit.group.size())   # unlike, of owners
        mine = F.pad(mine, (0, max(sizes) - len(master)))
        everyones = [torch.empty_like(mine) for _ in sizes]                             # (2, k)
        dist.all_gather(everyones, mine, unit.group)
        everyones = [x[:, :size] for x, size in zip(everyones, sizes)]
        values, grads = map(unit.views, torch.cat(everyones, dim=1))
        for p, value, grad in zip(unit.parameters, values, grads):
            value.grad, value.cuts = grad, getattr(p, "cuts", ())
            yield p.global_name, value


def whole(tensor):
    """All of a DTensor, by communication; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def scales(largest: dict) -> dict:
    """What differences are relative to, never 0. largest: {(kind, name): the magnitude so far}."""
    of_gradients = [value for (kind, _), value in largest.items() if kind == "gradients"]
    least = {"gradients": SMALL * max(of_gradients)}
    found = {key: max(value, least.get(key[0], 0)) for key, value in largest.items()}
    return {key: value if value > 0 else 1.0 for key, value in found.items()}


def widened(scale: dict, effects: dict, tolerance: dict) -> dict:
    """The scales, larger where rounding is. effects: {key: how far rounding moves that tensor}."""
    wider = dict(scale)
    for key, effect in effects.items():
        if tolerance.get(key[0]):                       # a share of the scale
            wider[key] = max(scale[key], TIMES * effect / tolerance[key[0]])
    return wider


def difference(tensor: torch.Tensor, reference: torch.Tensor,
               scale: torch.Tensor | float) -> torch.Tensor | float:
    """max |tensor - reference| / scale; infinite if the shapes differ or anything is not finite."""
    if tensor.shape != reference.shape:
        return math.inf
    distance = (tensor.detach().double() - reference).abs().max()
    return (distance / scale).nan_to_num(math.inf, posinf=math.inf)
