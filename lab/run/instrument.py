"""What a run is held to beside all others: lab/chapters/NN/held.py has an Instrument of its own.

lab/launch.py gives a run those of its chapter. formulas.py calls them, each at its place in the
report. Here none of them does anything.
"""

import argparse
import contextlib
from contextlib import AbstractContextManager

import torch
from torch import nn

from common import Batch


class Instrument:
    """answer: what the chapter's `formulas` gave."""

    after_step_of_one_gpu = None    # in place of the after_step that a chapter gives to `batches`

    def refuse(self, args: argparse.Namespace) -> None:
        """Raise Refused for flags that do not fit."""

    def begin(self, run, model: nn.Module) -> None:
        """The run's model has been drawn, and is not yet cut."""

    def replace_in_one_gpu(self, model: nn.Module) -> None:
        """The model that one GPU trains has been drawn."""

    def around_step(self, run) -> AbstractContextManager:
        """Is entered around each step."""
        return contextlib.nullcontext()

    def after_step(self, batch: Batch, norm: torch.Tensor) -> None:
        """A step is taken."""

    def moments(self, run) -> int | None:
        """Bytes of the optimizer's states but masters, where they are not AdamW's or SGD's."""

    def hold_states(self, run, answer: dict) -> None:
        """Check more of parameters, gradients and optimizer states."""

    def hold_activations(self, run, answer: dict) -> bool:
        """Whether this has held what is kept for backward to its formulas."""
        return False

    def rows_of_experts(self, run, answer: dict) -> dict | None:
        """{stage: [rows of each micro-batch, for each block]} through this rank's experts."""

    def flops(self, run, answer: dict) -> dict:
        """{"all" or "attention": FLOPs by the formula}. May hold what it measures by itself."""
        return {}

    def add_traffic(self, run, sent: dict, by_axis: bool) -> None:
        """Add to {op: (calls, payload, wire)}, or to that of each axis, what else is sent."""

    def overlap(self, run, answer: dict, sent: dict) -> dict:
        """{op: function(flops, bandwidth)}: what its sending can hide behind."""
        return {}

    def hold(self, run, answer: dict) -> None:
        """Check whatever else the answer has for it."""

    def explain(self, run, answer: dict) -> None:
        """Notes below the measurements."""

    def finish(self, run, answer: dict) -> None:
        """The last notes."""
