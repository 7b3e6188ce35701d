"""Times the kernels on a GPU: against eager, compile, a copy, cuBLAS, SDPA, torch._scaled_mm.

    python benchmarks/time_kernels.py [--only attention] [--record]

Prints four tables; --record puts them into benchmarks/RESULTS.md. Random bf16 inputs (and fp32 of
matmuls), L2 cold, medians by triton.testing.do_bench. Pointwise kernels and norms in GB/s of the
bytes that one kernel has to move, next to those of a copy in the same run; matmuls, attention and
products in TFLOP/s. It takes a GPU and some minutes; FP8 takes a Hopper or newer.

"eager" is PyTorch's own operator, which is fused too; "chain" is the same in simple operators, as
in the lessons. nan: a backend that refuses. All calls go through Python, whose own time can show
where a kernel takes little.
"""

import datetime
import functools
import itertools
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import results  # noqa: E402  (after the path to it)
from common import Refused  # noqa: E402
from lab.run import commands, refusals  # noqa: E402

DEVICE = "cuda"
WIDTHS = 1024, 2048, 4096, 8192, 16384
NUMBERS = 2**28         # of x, whatever the width: so many that Python's own time does not show
DIMS = 64, 128          # of a head
SEQUENCES = 512, 1024, 2048, 4096, 8192, 16384
SIZES = 1024, 2048, 4096, 8192, 16384       # of square matrices
MOST_NAIVE = 2048       # size; a naive matmul takes seconds beyond
TOKENS = 16384          # in a batch, whatever the sequence
DIM = 2048              # heads times head dim
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}


def milliseconds(function):
    """The median of a call, with a cold L2."""
    from triton.testing import do_bench

    return do_bench(function, warmup=10, rep=200, return_mode="median")


def backward_of(function, *inputs):
    """What a backward alone does: the gradients of all inputs, from a random one of the output."""
    output = function(*inputs)
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def random(*shape):
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def chain_norm(x, weight, bias):
    """LayerNorm operator by operator, each of which goes through memory."""
    centered = x - x.mean(-1, keepdim=True)
    return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias


def chain_rms_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def eager_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def eager_rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def pointwise():
    """Rows of the table of ELU, SwiGLU and the norms: what, width, and GB/s of each way. (SwiGLU
    has no operator of PyTorch's own: eager is the chain.)"""
    from kernels import elu, layernorm, rmsnorm, swiglu

    chain = swiglu.swiglu_reference
    for width in WIDTHS:
        x, gate = random(NUMBERS // width, width), random(NUMBERS // width, width)
        weight, bias, target = random(width), random(width), torch.empty_like(x)
        copy = 2 * x.nbytes / milliseconds(functools.partial(target.copy_, x.detach())) / 1e6
        torch._dynamo.reset()                   # or it would compile for any width, or give up
        for name, inputs, moved, kernel, chained, eager in (
                # moved: forward (x, y, and SwiGLU's gate), backward (x, dy, dx, and two of gate)
                ("ELU", (x,), (2, 3), elu.elu, elu.elu_reference, F.elu),
                ("SwiGLU", (x, gate), (3, 5), swiglu.swiglu, chain, chain),
                ("LayerNorm", (x, weight, bias), (2, 3), layernorm.layer_norm, chain_norm,
                 eager_norm),
                ("RMSNorm", (x, weight), (2, 3), rmsnorm.rms_norm, chain_rms_norm,
                 eager_rms_norm)):
            ways = {"kernel": kernel, "chain": chained, "eager": eager,
                    "compile": torch.compile(eager, dynamic=False)}
            forward, backward = {}, {}
            for way, function in ways.items():
                with torch.no_grad():
                    ms = milliseconds(functools.partial(function, *inputs))
                forward[way] = moved[0] * x.nbytes / ms / 1e6
                ms = milliseconds(backward_of(function, *inputs))
                backward[way] = moved[1] * x.nbytes / ms / 1e6
            for direction, speeds in (("forward", forward), ("backward", backward)):
                yield {"what": f"{name} {direction}", "width": width} | speeds | {"copy": copy}


def sdpa(backend, causal, q, k, v):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attention():
    """Rows of the table of attention: what, head dim, sequence, and TFLOP/s of each way."""
    from kernels import flash_attention as flash

    for dim, causal, seq in itertools.product(DIMS, (False, True), SEQUENCES):
        batch, heads = TOKENS // seq, DIM // dim
        inputs = [random(batch, heads, seq, dim) for _ in "qkv"]
        ways = {"kernel": functools.partial(flash.flash_attention, causal=causal)}
        ways |= {name: functools.partial(sdpa, x, causal) for name, x in BACKENDS.items()}
        flops = functools.partial(flash.flops, batch, heads, seq, seq, dim, causal)
        forward, backward = {}, {}
        for way, function in ways.items():
            forward[way] = backward[way] = math.nan
            try:
                with torch.no_grad():
                    ms = milliseconds(functools.partial(function, *inputs))
                forward[way] = flops() / ms / 1e9
                ms = milliseconds(backward_of(function, *inputs))
                backward[way] = flops(backward=True) / ms / 1e9
            except RuntimeError as error:       # no kernel for this in this backend
                if way not in BACKENDS or isinstance(error, torch.OutOfMemoryError):
                    raise
                print(f"{way}, head dim {dim}, sequence {seq}: {error}", file=sys.stderr)
        what = "causal" if causal else "full"
        for direction, speeds in (("forward", forward), ("backward", backward)):
            yield {"what": f"{what} {direction}", "head dim": dim, "sequence": seq} | speeds


def matmuls():
    """Rows of the table of matmuls: what, size, and TFLOP/s of each way. Square matrices, in tiles
    and with a thread for each number of C, along its rows and down its columns; and by cuBLAS."""
    from kernels import matmul

    ways = {"kernel": matmul.matmul, "cuBLAS": torch.matmul,
            "along": functools.partial(matmul.naive, down=False),
            "down": functools.partial(matmul.naive, down=True)}
    for dtype, size in itertools.product((torch.bfloat16, torch.float32), SIZES):
        a, b = (random(size, size).detach().to(dtype) for _ in "ab")
        yield {"what": f"matmul {str(dtype).removeprefix('torch.')}", "size": size} | {
            way: math.nan if way in ("along", "down") and size > MOST_NAIVE else
            2 * size**3 / milliseconds(functools.partial(function, a, b)) / 1e9
            for way, function in ways.items()}


def products():
    """Rows of the table of FP8: what, size, and TFLOP/s of each way. A product of square matrices
    that are in FP8 already, with our scales of tiles, with torch._scaled_mm's one scale, and in
    bf16; and with the time that rounding takes: a linear layer's forward and backward."""
    from kernels import fp8

    def linear(x, w):
        return fp8.linear8(x, "tile", w)[0]

    def train(layer, x, w):
        layer(x, w).backward(x)

    for size in SIZES:
        x, w = random(size, size), random(size, size)
        (of_x, of_w), one = fp8.SCALINGS["tile"], torch.ones((), device=DEVICE)
        a, b = fp8.in_fp8(x.detach(), of_x), fp8.in_fp8(w.detach(), of_w)
        ways = {"kernel": functools.partial(fp8.product, a, b, torch.bfloat16),
                "scaled_mm": functools.partial(torch._scaled_mm, a.values, b.values.T, one, one,
                                               out_dtype=torch.bfloat16),
                "bf16": functools.partial(F.linear, x.detach(), w.detach())}
        yield {"what": "product", "size": size} | {
            way: 2 * size**3 / milliseconds(function) / 1e9 for way, function in ways.items()}
        ms = {way: milliseconds(functools.partial(train, layer, x, w))
              for way, layer in (("kernel", linear), ("bf16", F.linear))}
        yield {"what": "linear, forward and backward", "size": size,
               "kernel": 6 * size**3 / ms["kernel"] / 1e9, "scaled_mm": math.nan,
               "bf16": 6 * size**3 / ms["bf16"] / 1e9}


TABLES = {              # name: its rows, and their unit
    "pointwise": (pointwise, "GB/s"), "matmul": (matmuls, "TFLOP/s"),
    "attention": (attention, "TFLOP/s"), "fp8": (products, "TFLOP/s"),
}


def table(rows, unit):
    """Lines of Markdown: the rows, and the kernel over each way that follows it in a row."""
    yield f"In {unit}:\n"
    for number, row in enumerate(rows):
        others = list(row)[list(row).index("kernel") + 1:]
        if number == 0:
            yield results.header(*row, *(f"kernel / {other}" for other in others))
        cells = [f"{x:.0f}" if isinstance(x, float) else x for x in row.values()]
        yield results.row(*cells, *(f"{row['kernel'] / row[other]:.2f}" for other in others))
    yield ""


def tables(names):
    """Time the kernels of these tables; yields their lines."""
    import triton

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    yield (f"{datetime.date.today()}, {name}, torch {torch.__version__}, Triton "
           f"{triton.__version__}, bf16\n")
    for name in names:
        if name == "fp8" and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            yield "This GPU has no FP8: its products are not timed.\n"
            continue
        measure, unit = TABLES[name]
        yield from table(measure(), unit)


def accept(argv):
    """The arguments; raises Refused for those that do not fit."""
    parser = commands.Parser("benchmarks/time_kernels.py", description=__doc__)
    parser.add_argument("--only", choices=TABLES, help="one table")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args(argv)
    if args.record:
        results.refuse_record()
    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise Refused("there is no GPU here, and nothing else to measure these kernels on")
    return args


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    results.tell(tables([args.only] if args.only else TABLES),
                 f"kernels: {args.only}" if args.only else "kernels", args.record)


if __name__ == "__main__":
    commands.program(main)
