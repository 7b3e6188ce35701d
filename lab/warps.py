"""Where the numbers of a matmul come from: counted from the addresses that its kernels load.

    python -m lab.warps [--m 32] [--n 64] [--k 32] [--plot figures/warps.png]
    python -m lab.warps --registers 168 --shared 0 --warps 4

The kernels of kernels/matmul.py run in Triton's interpreter, on matrices in fp32, and each load is
written down. Printed beside the formulas are

    a warp's load       how many segments of 128 bytes it takes, and how many sectors of 32
    numbers loaded      by all programs
    programs together   how many rows of A's tiles and columns of B's they read between them, which
                        is what comes from memory if the rest comes from L2
    occupancy           how many warps an SM of an H100 has at a time, of a program like this one

An interpreter has no warps. Here, 32 numbers that follow each other in a block, row by row, are
taken to be a warp's, as in a kernel of CUDA. (A compiler may give a thread up to 16 bytes at once:
then a load takes more segments, and as many for each byte.) Matrices begin where a segment does, as
on a GPU. tests/kernels/compile_kernels.py prints registers and shared memory of each kernel.
"""

import os
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch

from common import Refused
from lab import chapters
from lab.cli import commands, refusals
from lab.cli.words import count

SEGMENT, SECTOR, WARP = 128, 32, 32     # bytes, bytes, threads
WIDTH = 4                               # bytes of a number in fp32
MOST = 2**18                            # products of numbers, which take half a minute
TILES = (16, 32), (32, 32), (32, 64)    # of C
TOGETHER, SIDE = 16, 16                 # programs that run at a time; a tile's rows and columns
GROUPS = 1, 2, 4, 8                     # rows of tiles


class Load(NamedTuple):
    """A load of one program."""

    name: str               # "a" or "b"
    warps: list             # for each warp, the bytes from the matrix's beginning to its numbers


# ---------------------------------------------------------------------------------- what is counted

def watch(product: Callable, m: int, n: int, k: int) -> list[Load]:
    """The loads of product(a, b) in Triton's interpreter, of a (m, k) and b (k, n), in order."""
    from triton.runtime.interpreter import interpreter_builder as builder

    a, b = torch.ones(m, k), torch.ones(k, n)
    begins, found, load = {"a": a.data_ptr(), "b": b.data_ptr()}, [], builder.create_masked_load

    def written_down(pointers, mask, *others):
        places, inside = pointers.data.ravel(), mask.data.ravel()
        _, name = max((begin, name) for name, begin in begins.items() if begin <= places.min())
        warps = [[int(place) - begins[name] for place in places[i:i + WARP][inside[i:i + WARP]]]
                 for i in range(0, len(places), WARP)]
        found.append(Load(name, warps))
        return load(pointers, mask, *others)

    with mock.patch.object(builder, "create_masked_load", written_down):
        product(a, b)
    return found


def blocks_of(found: list[Load], name: str, size: int) -> float:
    """How many blocks of `size` bytes a warp's load of a matrix takes, on average."""
    taken = [len({place // size for place in warp})
             for load in found if load.name == name for warp in load.warps if warp]
    return sum(taken) / len(taken)


def numbers(found: list[Load]) -> int:
    """How many numbers are loaded."""
    return sum(len(warp) for load in found for warp in load.warps)


def different(found: list[Load], name: str) -> int:
    """How many different numbers of a matrix are loaded."""
    return len({place for load in found if load.name == name
                for warp in load.warps for place in warp})


def tiled(matmul, rows, columns, group=1, programs=None):
    """The tiled kernel, with such tiles of C, as a function of a and b. programs: so many of the
    first ones run, and no others."""
    def product(a, b):
        tiles = -(-len(a) // rows) * -(-b.shape[1] // columns)
        return matmul.launch(matmul.tiled_kernel, a, b, programs or tiles, rows, columns, 32,
                             group, True)
    return product


# ------------------------------------------------------------------------------- as it is printed

def of_kernels(matmul, m, n, k):
    """Yield (kernel, what was counted, the same by formula): segments and sectors of A and of B for
    a warp's load, and numbers loaded."""
    row = WIDTH * k
    ways = [("naive, down the columns of C", lambda a, b: matmul.naive(a, b, True), (1, 1), row, 0),
            ("naive, along the rows of C", lambda a, b: matmul.naive(a, b, False), (1, 1), 0,
             WIDTH)]
    ways += [(f"tiles of {rows} x {columns}", tiled(matmul, rows, columns), (rows, columns),
              WIDTH, WIDTH) for rows, columns in TILES]
    for name, product, tile, *steps in ways:            # from one thread of a warp to the next
        found = watch(product, m, n, k)
        counted = [blocks_of(found, matrix, size) for matrix in "ab" for size in (SEGMENT, SECTOR)]
        formula = [matmul.segments(0, step, size) for step in steps for size in (SEGMENT, SECTOR)]
        yield (name, [*counted, numbers(found)], [*formula, matmul.loads(m, n, k, *tile)])


def of_orders(matmul):
    """Yield (rows of tiles in a group, tiles' rows of A and columns of B that programs read which
    run at the same time, the same by formula)."""
    m, n, k = GROUPS[-1] * SIDE, TOGETHER * SIDE, SIDE
    for group in GROUPS:
        found = watch(tiled(matmul, SIDE, SIDE, group, TOGETHER), m, n, k)
        read = [different(found, name) / (SIDE * k) for name in "ab"]
        yield (group, read, [group, TOGETHER // group])


def report(args, matmul):
    """Print all of it. Returns whether all that was counted is as by formula."""
    right = []

    def mark(counted, formula):
        right.append(counted == formula)
        return "✓" if right[-1] else f"✗ by formula {formula}"

    print(f"A ({args.m}, {args.k}) by B ({args.k}, {args.n}) in fp32\n"
          f"{'':30}segments (sectors) a load\n"
          f"{'':30}{'of A':>10}{'of B':>10}{'numbers loaded':>18}{'FLOPs a byte':>15}")
    for name, counted, formula in of_kernels(matmul, args.m, args.n, args.k):
        *taken, loaded = counted
        of_a, of_b = (f"{taken[i]:g} ({taken[i + 1]:g})" for i in (0, 2))
        intensity = 2 * args.m * args.n * args.k / (WIDTH * loaded)
        print(f"{name:30}{of_a:>10}{of_b:>10}{loaded:>18,}{intensity:>15.4g}   "
              f"{mark(counted, formula)}", flush=True)

    print(f"\n{TOGETHER} programs together, of {GROUPS[-1]} x {TOGETHER} tiles, read")
    for group, counted, formula in of_orders(matmul):
        order = "row by row" if group == 1 else f"in groups of {group} rows"
        rows, columns = count(round(counted[0]), "row"), count(round(counted[1]), "column")
        print(f"{order:30}{rows:>7} of A's tiles, {columns:>10} of B's   {mark(counted, formula)}",
              flush=True)

    programs = lambda *limits: 64 * matmul.occupancy(*limits, args.warps) / args.warps
    limits = {"registers": programs(args.registers, 0), "shared memory": programs(1, args.shared),
              "warps": programs(1, 0)}
    fit = programs(args.registers, args.shared)
    print(f"\na program of {count(args.warps, 'warp')}, {args.registers} registers a thread and "
          f"{args.shared:,} bytes of shared memory\n"
          f"fits {', '.join(f'{many:g} times by {what}' for what, many in limits.items())}: "
          f"{fit * args.warps:g} of an SM's 64 warps")
    return all(right)


# ------------------------------------------------------------------------------------- the picture

def moved_and_used(found, name, rows, columns):
    """Of a matrix of numbers in fp32, (rows, columns), which the loads leave where they are, 0,
    which lie in segments that move, 1, and which are used, 2."""
    places = {place for load in found if load.name == name for warp in load.warps for place in warp}
    moved = {place // SEGMENT for place in places}
    flat = [2 if WIDTH * i in places else int(WIDTH * i // SEGMENT in moved)
            for i in range(rows * columns)]
    return torch.tensor(flat).view(rows, columns)


def tiles_together(matmul, group):
    """Which tiles of C have a row of A's tiles and a column of B's that is read by the programs
    which run at the same time: those that they compute. As 2, and the others as 0."""
    m, n, k = GROUPS[-1] * SIDE, TOGETHER * SIDE, SIDE
    found = watch(tiled(matmul, SIDE, SIDE, group, TOGETHER), m, n, k)
    a = moved_and_used(found, "a", m, k)[::SIDE, 0]
    b = moved_and_used(found, "b", k, n)[0, ::SIDE]
    return torch.minimum(a[:, None], b[None, :])


def draw(matmul):
    """A figure: what moves for a warp's load, and what of that is used; and which tiles of C the
    programs compute that run at the same time."""
    from lab.bench.drawing import BLUE, ORANGE, legend, new_figure  # which imports Triton, too

    side = 32
    down, along = (watch(lambda a, b, way=way: matmul.naive(a, b, way), *shape)
                   for way, shape in ((True, (side, 1, side)), (False, (1, side, side))))
    tile = watch(tiled(matmul, side, side), side, side, side)
    panels = []
    for title, found, name in (("A: a warp goes\ndown a column of C", down[:1], "a"),
                               ("B: a warp goes\nalong a row of C", along[1:2], "b"),
                               ("A: a program\nloads a tile", tile[:1], "a")):
        values = moved_and_used(found, name, side, side)
        panels.append((f"{title}:\n{(values == 2).sum():,} of {(values > 0).sum():,} used", values))
    for group, order in ((1, "row by row"), (4, "in groups of 4 rows")):
        tiles = tiles_together(matmul, group) == 2
        rows, columns = (int(tiles.any(dim).sum()) for dim in (1, 0))
        panels.append((f"C: {TOGETHER} programs, {order},\nread {count(rows, 'row')} of A's tiles "
                       f"and {columns} columns of B's", 2 * tiles))

    figure, several = new_figure(13, 3.2, 1, len(panels), width_ratios=[1, 1, 1, 1.8, 1.8])
    colors = torch.tensor([[int(color[i:i + 2], 16) for i in (1, 3, 5)]
                           for color in ("#eeeeee", ORANGE, BLUE)])
    for axes, (title, values) in zip(several, panels):
        down, across = values.shape
        axes.imshow(colors[values.long()].numpy(), extent=(0, across, down, 0))
        axes.set_xticks([0, across // 2, across])
        axes.set_yticks([0, down // 2, down])
        axes.set_title(title, fontsize=9)
        axes.grid(False)
    legend(figure, {"used": BLUE, "moved, and not used": ORANGE, "neither": "#eeeeee"}, 3)
    return figure


# --------------------------------------------------------------------------------- the command line

def parse(argv):
    parser = commands.Parser("-m lab.warps", description=__doc__)
    add = parser.add_argument
    for name, default in (("m", 32), ("n", 64), ("k", 32)):
        add(f"--{name}", type=commands.number(int, 32, 1025, default), default=default,
            help=f"a multiple of 32; default: {default}")
    add("--registers", type=commands.number(int, 1, 256, 118), default=118,
        help="of a thread; default of all three: tiled_kernel's in 16 bits, compiled for Hopper")
    add("--shared", type=commands.number(int, 0, 227 * 1024 + 1, 98304), default=98304,
        help="bytes of a program's shared memory")
    add("--warps", type=int, choices=(1, 2, 4, 8, 16, 32), default=8, help="of a program")
    add("--plot", type=commands.output("warps.png"), help="draw what moves, and what is used")
    args = parser.parse_args(argv)
    for name in "mnk":
        value = getattr(args, name)
        if value % 32:
            raise Refused(f"--{name} {value} is no multiple of 32, a warp's threads",
                          f"--{name} {-(-value // 32) * 32}")
    if args.m * args.n * args.k > MOST:
        raise Refused(f"--m {args.m} --n {args.n} --k {args.k} takes too long in an "
                      "interpreter", "--m 32 --n 64 --k 32")
    try:
        import triton  # noqa: F401
    except ImportError:
        raise Refused("there is no Triton here, whose interpreter runs the kernels (on Linux, "
                      "requirements-kernels.txt has it)") from None
    return args


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    matmul = chapters.kernel("matmul")
    right = report(args, matmul)
    if args.plot:
        from lab.bench.drawing import save  # which imports Triton, too

        args.plot.parent.mkdir(parents=True, exist_ok=True)
        save(draw(matmul), args.plot, dpi=110)
    return 0 if right else 1


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"                # before anybody imports Triton
    commands.program(main)
