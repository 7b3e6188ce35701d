"""The run on one GPU that every other must equal: a plain step, on the whole batch at once."""

import contextlib
import copy
import math

import torch
from torch.nn.utils import clip_grads_with_norm_

import common
from common import Batch


class BesideOneGpu(common.Run):
    """A run that can train the same model on one GPU, in the same precision, on the same batches.

    one_gpu: its model, once a step was taken. build, after_step: as `batches` was given them.
    is_mixed: whether --precision is that of the run's optimizer, and so of one GPU's; a variant of
    PyTorch's has its own, over parameters in --dtype. One GPU's masters are never offloaded.
    is_late: whether a step's gradient is that of weights which are a step old (07's 2bw): one GPU's
    is, too. in_time: then another run, whose one GPU has no delay. rounds: around forward and
    backward (rounding.py).
    """

    one_gpu, in_time, is_mixed, rounds = None, None, False, contextlib.nullcontext()
    about = None                    # the about.py of its chapter

    @property
    def rounded(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return common.rounded(self.args) if self.is_mixed else self.dtype

    @property
    def is_late(self) -> bool:
        return hasattr(self.about, "is_late") and self.about.is_late(self.args)

    def mixed(self, parameters, device=None):
        self.is_mixed = True
        return super().mixed(parameters, device)

    def batches(self, share=0, build=common.gpt, after_step=None):
        self.build, self.after_step = build, after_step
        return super().batches(share)

    def first_model(self) -> torch.nn.Module:
        """One GPU's, with the weights that the run begins with."""
        return self.draw(self.build(self.args.model, seed=None))

    def loss_in_time(self, batch: Batch) -> float:
        """Of one GPU that is not late, which takes this step, too."""
        if self.in_time is None:
            self.in_time = self.from_the_start()
            self.in_time.about = None                   # of a chapter in which nothing is late
        loss, _ = self.in_time.one_gpu_step(batch)
        return loss.item()

    def from_the_start(self) -> "BesideOneGpu":
        """This run, whose one GPU begins again where the run began."""
        run = copy.copy(self)
        run.one_gpu = None
        return run

    def one_gpu_step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the step of this batch on one GPU. Returns its loss and norm. No communication."""
        if self.one_gpu is None:
            self.one_gpu = self.first_model()
            optimizer = self.mixed if self.is_mixed else self.optimizer
            self.one_gpu_optimizer = optimizer(self.one_gpu.parameters())
            self.before = None                          # the weights of a step ago
        parameters = list(self.one_gpu.parameters())
        newest = used = [p.data for p in parameters]
        if self.is_late:
            used = self.before or newest
            self.before = [weights.clone() for weights in newest]
        for p, weights in zip(parameters, used):
            p.data = weights
        if self.args.documents or self.args.window:
            rope = self.one_gpu.block1.attn.rope
            rope.pack(batch.starts.to(self.device), self.args.window)
        self.one_gpu_optimizer.zero_grad()
        with self.rounds:
            logits = self.one_gpu(batch.tokens.to(self.device))
            loss = common.loss_sum(logits, batch.targets.to(self.device)) / batch.valid
            loss.backward()
        norm = common.grad_norm(self.one_gpu.parameters())
        clip_grads_with_norm_(self.one_gpu.parameters(), self.args.clip or math.inf, norm)
        for p, weights in zip(parameters, newest):      # they are updated, whosever gradient it is
            p.data = weights
        self.one_gpu_optimizer.step()
        if self.after_step:
            self.after_step(self.one_gpu)
        return loss.detach(), norm
