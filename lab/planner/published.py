"""What was published, beside what chapter 10 predicts.

    python 10_planner.py --published

The tables are in published.toml. ten: chapter 10's module, whichever is compared.
"""

import functools
import itertools

from lab.planner import tables
from lab.planner.tables import errors, find_table, mean_and_largest, runs

LEFT_OUT = 0.025        # the mean of table 1, each row left out of the fit
NEAR = 0.2              # of how many mixtures the planner is as near as this is printed
TABLES = [table["name"] for table in tables.load("published")["table"]]
DENSE = [name for name in TABLES if "constant" in find_table(name)]
MIXTURES = [name for name in TABLES if name.startswith("experts")]


def tables_missed(ten):
    """The tables of which the planner is further off than it may be."""
    missed = []
    for name in TABLES:
        table, of_table = find_table(name), runs(ten, name)
        mean, largest = mean_and_largest(errors(of_table))
        if mean > table["mean"] or largest > table["largest"]:
            missed.append(name)
        if table.get("fits") and not all(run.fits for run in of_table):
            missed.append(f"{name}, bytes")
    left_out, _ = mean_and_largest(leave_one_out(ten))
    return missed + ["table 1, left out"] * (left_out > LEFT_OUT)


# ---------------------------------------------------------------------------------------- the lines

def in_words(errors):
    """The mean and the largest, in percent."""
    mean, largest = mean_and_largest(errors)
    return f"mean {mean:.1%}, largest {largest:.1%}"


def table_lines(ten, name):
    """Yield the lines of a table."""
    table, of_table = find_table(name), runs(ten, name)
    columns = " ".join(name for name in table["columns"] if name not in tables.MEASURED)
    yield table["source"]
    yield f"  {columns:<70}{'published':>10}{'planner':>9}"
    for run in of_table:
        size = f"{run.bytes / 1e9:7.0f} GB of 80" if table.get("fits") else ""
        yield (f"  {run.words:<70}{run.published:10.4g}{run.predicted:9.4g}{run.error:+8.1%}{size}")
    constant = ""
    if "constant" in table:
        rates = [run.constant(table["constant"]) / run.published - 1 for run in of_table]
        constant = f" (a constant rate: {in_words(rates)})"
    yield (f"  errors: {in_words(errors(of_table))}{constant}; to be at most {table['mean']:.0%} "
           f"and {table['largest']:.0%}")
    for assumed in table.get("assumed", ()):
        others = runs(ten, name, **assumed["otherwise"])
        rates = ", ".join(f"{run.predicted:.0f}" for run in others)
        sizes = ", ".join(f"{run.bytes / 1e9:.0f}" for run in others)
        yield f"  {assumed['what']}: else {rates} TFLOP/s and {sizes} GB"


def lines(ten):
    """Yield the lines of all tables, and whether the planner is near enough."""
    for name in TABLES:
        yield from table_lines(ten, name)
    of_mixtures = list(itertools.chain.from_iterable(runs(ten, name) for name in MIXTURES))
    near = sum(abs(run.error) <= NEAR for run in of_mixtures)
    yield f"{near} of {len(of_mixtures)} rows with experts are within {NEAR:.0%}"
    yield (f"table 1, each row predicted by constants fitted on the other nine: "
           f"{in_words(leave_one_out(ten))}")
    missed = tables_missed(ten)
    yield f"✗ further off than may be: {'; '.join(missed)}" if missed else "✓ as near as it must be"


# ------------------------------------------------------------------------------------------ the fit

def runs_with(ten, hbm, nvlink):
    """Table 1, with these shares in place of the planner's HBM and NVLINK."""
    cluster = ten.CLUSTERS[find_table("table 1")["cluster"]]
    return runs(ten, "table 1", hbm=cluster.hbm * hbm / ten.HBM,
                nvlink=cluster.nvlink * nvlink / ten.NVLINK)


def fit(ten, without=None, start=(0.685, 0.584)):
    """HBM and NVLINK with the least squares of table 1's errors, but for a row: by small steps.
    They are shares, from 0.1 to 1."""
    def squares(constants):
        kept = [error for row, error in enumerate(errors(runs_with(ten, *constants)))
                if row != without]
        return sum(error**2 for error in kept)

    best, step = list(start), 0.02
    while step > 1e-3:
        near = [[min(1, max(0.1, x + move)) for x, move in zip(best, moves)]
                for moves in itertools.product((-step, 0, step), repeat=2)]
        better = min(near, key=squares)
        if better == best:
            step /= 2
        best = better
    return best


@functools.cache
def leave_one_out(ten):
    """The error of each row of table 1, if it had not been there for the fit."""
    rows = range(len(find_table("table 1")["rows"]))
    return [errors(runs_with(ten, *fit(ten, without=row)))[row] for row in rows]
