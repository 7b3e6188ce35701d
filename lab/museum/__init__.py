"""The museum of silent bugs: training goes on, the loss falls, and the numbers are wrong.

Others have built instruments for this, and published what these find. TTrace (Jiang et al., TTrace:
Lightweight Error Checking and Diagnosis for Distributed Training, 2025) collects the tensors of a
distributed run and compares each with that of a trusted reference run. How far apart they may be
is estimated for each tensor, from what a perturbation as small as a rounding error does to it. It
finds 14 bugs of Megatron-LM. TrainCheck (Jiang et al., Training with Confidence: Catching Silent
Errors in Deep Learning Training with Automated Proactive Checks, OSDI 2025) needs no reference: it
infers invariants from runs that are right, such as "replicated parameters have the same values on
all ranks", and watches other runs for one that does not hold. It detects 18 of 20 errors.

Here each run is compared with one GPU, as in TTrace. We compare losses, gradients, their norm and
parameters, not each activation, and try a perturbation only if a fixed tolerance is exceeded
(lab/run/rounding.py). In exchange, what a run sends and keeps is compared with formulas: one
message too many is seen although all tensors are right. All of that needs a model that fits on one
GPU, which an invariant doesn't.
"""

import functools

from lab import chapters
from lab.museum.exhibit import read


@functools.cache
def exhibits():
    """{room: its exhibits}. Raises ValueError if a room's file is wrong."""
    paths = {room: chapters.HERE / room / "exhibits.toml" for room in chapters.ROOMS}
    return {room: read(path) for room, path in paths.items() if path.exists()}
