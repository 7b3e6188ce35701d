"""Times the kernels on a GPU, against eager, torch.compile, a copy, and SDPA's backends.

    python benchmarks/kernels.py [--out runs] [--record]

Prints two tables and writes kernels_pointwise.csv, kernels_attention.csv and a figure of each into
--out; --record puts the tables into benchmarks/RESULTS.md too. Random bf16 inputs, L2 cold, medians
by triton.testing.do_bench. ELU and LayerNorm in GB/s of the bytes that one kernel has to move,
beside those of a copy in the same run; attention in TFLOP/s. It takes a GPU and some minutes.
"""

import argparse
import csv
import datetime
import functools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WIDTHS = 1024, 2048, 4096, 8192, 16384
ROWS = 16384
SEQUENCES = 512, 1024, 2048, 4096, 8192, 16384
TOKENS = 16384          # in a batch, whatever the sequence
DIM = 2048              # heads times head dim


def milliseconds(function):
    """The median of a call, with a cold L2."""
    from triton.testing import do_bench

    return do_bench(function, warmup=10, rep=50, return_mode="median")


def backward_of(function, *inputs):
    """What a backward alone does: the gradients of all inputs, from a random one of the output."""
    output = function(*inputs)
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def pointwise():
    """Rows of the table of ELU and LayerNorm: what, width, and GB/s of each way."""
    from kernels import elu, layernorm

    compiled_elu = torch.compile(F.elu)
    eager_norm = lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)
    compiled_norm = torch.compile(eager_norm)
    for width in WIDTHS:
        make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16,
                                 requires_grad=True)
        x, weight, bias = make(ROWS, width), make(width), make(width)
        target = torch.empty_like(x)
        copy = 2 * x.nbytes / milliseconds(lambda: target.copy_(x)) / 1e6       # noqa: B023
        ways = {
            "ELU": (2, 3, (x,), {"kernel": elu.elu, "eager": F.elu, "compile": compiled_elu}),
            "LayerNorm": (2, 3, (x, weight, bias), {"kernel": layernorm.layer_norm,
                                                    "eager": eager_norm, "compile": compiled_norm}),
        }
        for name, (forward_trips, backward_trips, inputs, functions) in ways.items():
            forward, backward = {}, {}
            for way, function in functions.items():
                with torch.no_grad():
                    ms = milliseconds(functools.partial(function, *inputs))
                forward[way] = forward_trips * x.nbytes / ms / 1e6
                ms = milliseconds(backward_of(function, *inputs))
                backward[way] = backward_trips * x.nbytes / ms / 1e6
            for direction, speeds in (("forward", forward), ("backward", backward)):
                yield {"what": f"{name} {direction}", "width": width} | speeds | {"copy": copy}


def attention():
    """Rows of the table of attention: what, head dim, sequence, and TFLOP/s of each way."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from kernels import flash_attention as flash

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                "efficient": SDPBackend.EFFICIENT_ATTENTION}

    def sdpa(backend, causal):
        def call(q, k, v):
            with sdpa_kernel(backends[backend]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    for dim in (64, 128):
        for causal in (False, True):
            for seq in SEQUENCES:
                batch, heads = TOKENS // seq, DIM // dim
                make = functools.partial(torch.randn, batch, heads, seq, dim, device="cuda",
                                         dtype=torch.bfloat16, requires_grad=True)
                inputs = make(), make(), make()
                kernel = functools.partial(flash.flash_attention, causal=causal)
                ways = {"kernel": kernel} | {name: sdpa(name, causal) for name in backends}
                forward, backward = {}, {}
                for way, function in ways.items():
                    work = functools.partial(flash.flops, batch, heads, seq, seq, dim, causal)
                    with torch.no_grad():
                        ms = milliseconds(functools.partial(function, *inputs))
                    forward[way] = work() / ms / 1e9
                    ms = milliseconds(backward_of(function, *inputs))
                    backward[way] = work(backward=True) / ms / 1e9
                what = "causal" if causal else "full"
                for direction, speeds in (("forward", forward), ("backward", backward)):
                    yield {"what": f"{what} {direction}", "head dim": dim, "sequence": seq} | speeds


def table(rows, others, unit):
    """Lines of Markdown: the rows, and the kernel over each of the others."""
    header = [*rows[0], *(f"kernel / {other}" for other in others)]
    yield f"In {unit}:\n"
    yield f"| {' | '.join(header)} |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        cells = [f"{x:.0f}" if isinstance(x, float) else str(x) for x in row.values()]
        cells += [f"{row['kernel'] / row[other]:.2f}" for other in others]
        yield f"| {' | '.join(cells)} |"
    yield ""


def write(rows, path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def draw(rows, x, ways, unit, path):
    """One panel for each kind of row: the speed of each way, against x."""
    from matplotlib.figure import Figure

    panels = {}
    for row in rows:
        title = ", ".join([row["what"]] + [f"head dim {row['head dim']}"] * ("head dim" in row))
        panels.setdefault(title, []).append(row)
    columns = (len(panels) + 1) // 2
    figure = Figure(figsize=(4 * columns, 6), layout="constrained")
    for axes, (title, group) in zip(figure.subplots(2, columns).flat, panels.items()):
        for way in ways:
            axes.plot([row[x] for row in group], [row[way] for row in group], "o-", markersize=3,
                      label=way)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=9)
    figure.supxlabel(x, fontsize=9)
    figure.supylabel(unit, fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=len(ways),
                  frameon=False)
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs", help="a folder for CSV and PNG")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here, and nothing else to measure these kernels on")
    import triton

    args.out.mkdir(parents=True, exist_ok=True)
    lines = [f"{datetime.date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
             f"Triton {triton.__version__}, bf16\n"]
    print(lines[0])
    measurements = (
        ("pointwise", pointwise, "width", ("eager", "compile", "copy"), "GB/s"),
        ("attention", attention, "sequence", ("flash", "cudnn", "efficient"), "TFLOP/s"),
    )
    for name, measure, x, others, unit in measurements:
        rows = list(measure())
        write(rows, args.out / f"kernels_{name}.csv")
        draw(rows, x, ("kernel", *others), unit, args.out / f"kernels_{name}.png")
        for line in table(rows, others, unit):
            print(line, flush=True)
            lines.append(line)
    if args.record:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from results import record

        record("kernels", lines)


if __name__ == "__main__":
    main()
