"""What was never run on a GPU, in one go: chapters on NCCL, speed, kernels, FP8, profiles.

    python benchmarks/gpu.py                        on the GPUs here, 10 minutes; `make gpu`
    python benchmarks/gpu.py --only 02 kernels      the steps whose names begin so
    python benchmarks/gpu.py --device cpu           the same list in the smallest sizes, without one

It runs on 1, 2, 4 or 8 GPUs: of 3 on two, of 6 on four. CUDA_VISIBLE_DEVICES says on which.

Each step is a program of its own with a limit of time. One that fails is named, and the others go
on. What no time is left for is named, too. After each step, a section of benchmarks/RESULTS.md is
written anew: the machine, a row for each step, the speed of large models, the kernels' tables. What
a step has printed goes to runs/gpu/NAME.txt. With --device cpu it all goes to runs/gpu/.

Chapters that train the tiny model are compared with one GPU's run, tensor by tensor. MFU is chapter
01's: the FLOPs that the model needs over the time and the peak in bf16, of all GPUs together.

This file is the command line. The machine, the steps, how one is played and what it has shown are
in gpu_machine.py, gpu_steps.py, gpu_play.py and gpu_report.py.

Exit status: 0; 1 if a step has failed; 2 for a bad flag, or where there is no GPU; 130 after
Ctrl-C: what is written by then stays.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab.cli import commands, refusals  # noqa: E402  (after the path to it)


def accept(argv):
    """The arguments; raises Refused for those that do not fit."""
    parser = commands.Parser("benchmarks/gpu.py", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=commands.number(float, 0.1, 1440, 10), default=10, help="for all of it")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: smallest sizes, on gloo")
    add("--only", nargs="+", default=[""], metavar="NAME", help="steps whose names begin so")
    add("--tell", action="store_true", help=argparse.SUPPRESS)      # what this machine is
    args = parser.parse_args(argv)
    # Not at the top: it takes seconds, and Ctrl-C is answered in one line by now.
    import torch

    from benchmarks import gpu_steps, results
    from common import Refused

    if args.device == "cuda" and not torch.cuda.device_count():
        raise Refused("there is no GPU here", "--device cpu")
    args.path = gpu_steps.FOLDER / "RESULTS.md" if args.device == "cpu" else results.RESULTS
    try:
        commands.try_to_write(args.path, is_file=True)
    except OSError as error:
        raise Refused(f"cannot write {args.path}: {error.strerror}") from None
    return args


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    from benchmarks import gpu_machine, gpu_play, gpu_steps

    if args.tell:
        print(json.dumps(gpu_machine.machine_of(args.device)))
        return 0
    machine = gpu_machine.asked_another_process(args.device)
    steps = [step for step in gpu_steps.steps_of(machine, args.device)
             if step.name.startswith(tuple(args.only))]
    if not steps:
        refusals.fail(f"--only {' '.join(args.only)} begins the name of no step; "
                      "--only 02 kernels would work")
    return gpu_play.play_all(steps, machine, args.minutes, args.path)


if __name__ == "__main__":
    commands.program(main)
