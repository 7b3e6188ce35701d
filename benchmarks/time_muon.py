"""Times chapter 11's Muon against torch.optim.Muon.

    python benchmarks/time_muon.py [--steps 20] [--device cpu] [--record]

Both optimizers update models with the same gradients, a step of one in turn with a step of the
other, on one device; the AdamW of tables and norms is in both. PyTorch's always computes in bf16,
so the ratio is that of ours in bf16. At 1.00 or less, it is no slower.

--record writes the table, with date, machine and versions, into benchmarks/RESULTS.md.
"""

import statistics
import sys
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402  (after the path to it)
from benchmarks import results  # noqa: E402
from lab import chapters, scaling  # noqa: E402
from lab.run import commands, refusals  # noqa: E402

SETUP_STEPS = 3                         # the first ones allocate


def shapes_on(device):
    """{name: Config}, of models whose matrices are updated."""
    presets = common.PRESETS
    small = common.Config(4, 512, 8, 8, 128, 256)
    large = common.Config(4, 2048, 32, 8, 8192, 128256, True, "sdpa", True, 8192)
    return ({"tiny": presets["tiny"], "4 layers of dim 512": small} if device == "cpu" else
            {"gpt2": presets["gpt2"], "4 layers of llama-1b": large})


class Theirs:
    """torch.optim.Muon for what is ours' matrices, and the same AdamW for the rest."""

    def __init__(self, parameters):
        is_matrix = chapters.chapter("11").is_matrix
        self.muon = torch.optim.Muon([p for p in parameters if is_matrix(p)], 5e-4,
                                     weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.adamw = common.OPTIMIZERS["adamw"]([p for p in parameters if not is_matrix(p)], None)

    def step(self):
        self.muon.step()
        self.adamw.step()


def parameters_of(cfg, device, rounded):
    """With gradients, of the model's parameters, or of masters of rounded ones."""
    parameters = []
    for p in common.gpt(cfg, seed=None).parameters():
        copy = nn.Parameter(torch.empty(p.shape, device=device).normal_(0, 0.02))
        vars(copy).update(vars(p), rounded=rounded)
        copy.grad = torch.randn_like(copy)
        parameters.append(copy)
    return parameters


def measure(cfg, device, steps):
    """{side: [ms of each step]}."""
    ours = chapters.chapter("11").ShardedMuon
    sides = {"in bf16": ours(parameters_of(cfg, device, torch.bfloat16)),
             "in fp32": ours(parameters_of(cfg, device, torch.float32)),
             "PyTorch's": Theirs(parameters_of(cfg, device, torch.float32))}
    times = {side: [] for side in sides}
    for step in range(steps + SETUP_STEPS):
        for side in list(sides)[::1 if step % 2 else -1]:   # the first one is slower
            start = scaling.now(torch.device(device))
            sides[side].step()
            times[side].append(1e3 * (scaling.now(torch.device(device)) - start))
    return {side: ms[SETUP_STEPS:] for side, ms in times.items()}


def table(args):
    yield (f"{results.machine()}, {args.steps} steps of each side in turn. Milliseconds of an "
           "optimizer's step: medians, with the range of the middle half.\n")
    yield results.header("matrices of", "by hand, in bf16", "by hand, in fp32", "torch.optim.Muon",
                         "ratio in bf16")
    for name, cfg in shapes_on(args.device).items():
        ms = measure(cfg, args.device, args.steps)
        ratio = statistics.median(ms["in bf16"]) / statistics.median(ms["PyTorch's"])
        cells = [results.middle(side, 2) for side in ms.values()]
        yield results.row(name, *cells, f"{ratio:.2f}")


# ------------------------------------------------------------------------------ the command line


def accept(argv):
    parser = commands.Parser("benchmarks/time_muon.py", description=__doc__)
    parser.add_argument("--steps", type=commands.number(int, 1, 2**31, 20), default=20,
                        help="of each side; default: 20")
    parser.add_argument("--device", choices=("cpu", "cuda"),
                        default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args(argv)
    if args.record:
        results.refuse_record()
    return args


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    results.tell(table(args), "Muon", args.record)


if __name__ == "__main__":
    commands.program(main)
