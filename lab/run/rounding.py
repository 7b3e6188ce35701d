"""What rounding does to one GPU's steps: they are taken again, rounded differently.

How far rounding moves a result depends on the model, its weights and the optimizer. Addends cancel.
A running sum in bf16 stops growing (4,096 ones add up to 256 on a CPU). A router sends a token to a
different expert. Newton-Schulz magnifies what is small in a badly conditioned matrix. No table of
tolerances can know all that, so we try it: one GPU takes the same steps again, and each operator's
result is off by half a unit in its last place, up or down at random. In 16 bits it also takes them
in 32 bits. (TTrace, Jiang et al., 2025, estimates its tolerances by a perturbation; Monte Carlo
arithmetic, Parker 1997, rounds each operation at random.)
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lab.run.one_gpu import BesideOneGpu

NUDGED = 4              # runs that are rounded at random
TIMES = 4               # times the largest effect is tolerated; rounding to 16 bits reached 2
IN_16_BITS = "bfloat16", "float16", "fp8"


class Rounding:
    """One GPU's steps, taken again. For rank 0; no communication. Computes nothing until `effects`
    is called, and then takes each step once.

    batches: those of the steps so far. rounding: what the run rounds to, a key of verify.LOSSY.
    tensors_of(loss, norm, module): {(kind, name): tensor} of what is compared after a step.
    """

    def __init__(self, run: BesideOneGpu, rounding: str, tensors_of):
        self.run, self.rounding, self.tensors_of = run, rounding, tensors_of
        self.batches, self.again = [], []

    def effects(self, there: dict) -> dict[tuple, float]:
        """{(kind, name): how far rounding moves this tensor by the end of the last step}. there:
        the tensors of one GPU."""
        if not self.again:
            self.again = [nudged(self.run, seed) for seed in range(NUDGED)]
            if self.rounding in IN_16_BITS or self.run.rounded == torch.bfloat16:
                self.again.append(in_other_precision(self.run, self.rounding))
        largest = dict.fromkeys(there, 0.0)
        for run in self.again:
            for batch in self.batches[run.steps_taken:]:
                run.loss_and_norm = run.one_gpu_step(batch)
            run.steps_taken = len(self.batches)
            here = self.tensors_of(*run.loss_and_norm, run.one_gpu)
            for key, tensor in there.items():
                largest[key] = max(largest[key], run.counts * distance(here[key], tensor))
        return largest


def distance(x, y):
    """The largest difference. What overflows counts as 0: it explains nothing."""
    largest = (x.double() - y.double()).abs().max().item()
    return largest if math.isfinite(largest) else 0.0


def another(run):
    """A run whose one GPU begins where this run began."""
    run = run.from_the_start()
    run.steps_taken, run.counts = 0, 1
    return run


def nudged(run: BesideOneGpu, seed: int) -> BesideOneGpu:
    """It rounds each result of forward and backward at random."""
    run = another(run)
    run.rounds = RandomRounding(seed, run.device)
    return run


class RandomRounding(TorchDispatchMode):
    """Each floating-point result of an operator is off by half a unit in its last place, up or down
    at random. Views, and what is written in place, stay as they are."""

    def __init__(self, seed: int, device: torch.device):
        super().__init__()
        self.generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        computes = any(torch.is_tensor(x) for x in tree_leaves((args, kwargs)))
        if not computes or any(x.alias_info for x in operator._schema.returns):
            return results
        return tree_map_only(torch.Tensor, self.nudge, results)

    def nudge(self, x):
        if not x.is_floating_point():
            return x
        signs = torch.randint(2, x.shape, generator=self.generator, device=x.device).to(x) * 2 - 1
        nudged = x + x * signs * (torch.finfo(x.dtype).eps / 2)
        return torch.where(x.isfinite(), nudged, x)     # a mask's -inf stays


def in_other_precision(run: BesideOneGpu, rounding: str) -> BesideOneGpu:
    """A run in bf16, in float32; any other one in bf16, of which fp16 rounds an eighth."""
    is_bf16, optimizer = run.rounded == torch.bfloat16, run.optimizer

    def in_its_dtype(parameters):
        return states_as(optimizer(parameters))

    run = another(run)
    run.counts = 1 / 8 if rounding == "float16" else 1
    run.dtype = torch.float32 if is_bf16 else torch.bfloat16
    run.is_mixed = False
    run.optimizer = in_its_dtype
    return run


def states_as(optimizer):
    """The same optimizer, with states (from a checkpoint) in the dtypes of its parameters."""
    for p, state in optimizer.state.items():
        state |= {key: x.to(p.dtype) for key, x in state.items() if x.ndim}     # no step count
    return optimizer
