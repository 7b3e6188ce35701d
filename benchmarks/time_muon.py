"""Times chapter 11's Muon against torch.optim.Muon, and finds the learning rates of Muon and AdamW.

    python benchmarks/time_muon.py [--steps 20] [--device cpu] [--record]
    python benchmarks/time_muon.py --rates [--train 300] [--seeds 2] [--record]

Steps: both optimizers update models with the same gradients, a step of one in turn with a step of
the other, on one device; the AdamW of tables and norms is in both. PyTorch's always computes in
bf16, so the ratio is that of ours in bf16. At 1.00 or less, it is no slower.

Rates: chapter 01 is trained anew with each optimizer, learning rate and seed, without a warm-up and
without a decay; what counts is the mean loss of the last 20 steps. Half an hour on two cores. The
runs' JSON is kept in runs/rates, and is not made again.

--record writes the table, with date, machine and versions, into benchmarks/RESULTS.md.
"""

import argparse
import json
import statistics
import subprocess
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
RATES = [1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]
LAST = 20                               # steps, whose mean loss counts


def shapes_on(device):
    """{name: Config}, of models whose matrices are updated."""
    presets = common.PRESETS
    small = common.Config(4, 512, 8, 8, 128, 256)
    large = common.Config(4, 2048, 32, 8, 8192, 128256, True, "sdpa", True, 8192)
    return ({"tiny": presets["tiny"], "4 layers of dim 512": small} if device == "cpu" else
            {"gpt2": presets["gpt2"], "4 layers of llama-1b": large})


# ------------------------------------------------------------------------------------ the steps


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


def table_of_steps(args):
    yield (f"{results.machine()}, {args.steps} steps of each side in turn. Milliseconds of an "
           "optimizer's step: medians, with the range of the middle half.\n")
    yield results.header("matrices of", "by hand, in bf16", "by hand, in fp32", "torch.optim.Muon",
                         "ratio in bf16")
    for name, cfg in shapes_on(args.device).items():
        ms = measure(cfg, args.device, args.steps)
        ratio = statistics.median(ms["in bf16"]) / statistics.median(ms["PyTorch's"])
        cells = [results.middle(side, 2) for side in ms.values()]
        yield results.row(name, *cells, f"{ratio:.2f}")


# ------------------------------------------------------------------------------------ the rates


def trained(args, optimizer, rate, seed):
    """The mean loss of the last steps of chapter 01; NaN of a run that stopped."""
    name = f"{optimizer}-{rate:g}-{seed}-{args.train}-{args.device}-{torch.__version__}.json"
    path = ROOT / "runs" / "rates" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, ROOT / "01_single_gpu.py", "--no-verify",
                        f"--steps={args.train}", f"--device={args.device}", f"--json={path}",
                        f"--optimizer={optimizer}", f"--lr={rate}", f"--seed={seed}"],
                       stdout=subprocess.DEVNULL, check=False)      # 1: it was not finite
    losses = json.loads(path.read_text())["loss"]
    return statistics.mean(losses[-LAST:]) if len(losses) == args.train else float("nan")


def table_of_rates(args):
    yield (f"{results.machine()}: `01_single_gpu.py --steps {args.train}`, mean loss of the last "
           f"{LAST} steps, {args.seeds} seeds; neither warm-up nor decay.\n")
    yield results.header("optimizer", *(f"{rate:g}" for rate in RATES))
    for optimizer in ("adamw", "muon"):
        cells = []
        for rate in RATES:
            losses = [trained(args, optimizer, rate, seed) for seed in range(args.seeds)]
            cells.append(", ".join(f"{loss:.2f}" for loss in losses))
        yield results.row(optimizer, *cells)


# ------------------------------------------------------------------------------ the command line


def accept(argv):
    parser = commands.Parser("benchmarks/time_muon.py", description=__doc__,
                             formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, usual, what in (("--steps", 20, "of each side"), ("--train", 300, "steps of a run"),
                              ("--seeds", 2, "runs with each learning rate")):
        parser.add_argument(flag, type=commands.number(int, 1, 2**31, usual), default=usual,
                            help=f"{what}; default: {usual}")
    parser.add_argument("--device", choices=("cpu", "cuda"),
                        default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rates", action="store_true", help="train with each learning rate")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args(argv)
    if args.record:
        results.refuse_record()
    return args


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    if args.rates:
        results.tell(table_of_rates(args), "learning rates of Muon", args.record)
    else:
        results.tell(table_of_steps(args), "Muon", args.record)


if __name__ == "__main__":
    commands.program(main)
