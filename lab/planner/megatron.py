"""Megatron's paper of 2021: what chapter 10 predicts of its figures.

The runs of figures 7 and 11 to 18 are in megatron.toml. Nothing is fitted on these figures: the
constants of chapter 10 are those that table 1 and the ZeRO-3 rows of table 2 gave. ten: chapter
10's module.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM (2021).
"""

from lab.planner import tables


def equation_1(sequences, micro_batch, p, seconds):
    """Seconds of a step, (b'/b + p - 1) · (t_f(b) + t_b(b)): b' sequences of a pipeline, and what
    a stage takes for forward and backward of a micro-batch."""
    return (sequences / micro_batch + p - 1) * seconds


def message(seq, dim, t, micro_batch=1):
    """Numbers of a micro-batch that each rank of tp sends to the next stage: a t-th, which the
    other side gathers; or with t = 1, without scatter/gather, all."""
    return micro_batch * seq * dim / t


def machine(ten):
    """An A100 of theirs, with their software."""
    return ten.Machine(ten.CLUSTERS["a100"], ten.SOFTWARE["megatron-2021"])


def longer_unscattered(run):
    """{cause: seconds} that a step takes longer without scatter/gather: each rank of tp then sends
    a whole message to the next stage, through its own network card; with it a part, and gathers the
    whole on NVLink."""
    layout, model, a100 = run.layout, run.model, machine(run.ten)
    if layout.pp == 1:
        return {}
    whole, part = (2 * message(model.seq, model.dim, t, layout.micro_batch)
                   for t in (1, layout.tp))
    longer = (whole - part) / a100.link(run.gpus) - a100.ring(whole, layout.tp, 1)
    of_stage = 2 * layout.v * longer                    # for a micro-batch: there, and back
    return {"pp": run.batch // (layout.dp * layout.micro_batch) * of_stage,
            "bubble": (layout.pp - 1) / layout.v * of_stage}


# ------------------------------------------------------------------------------------- the figures

def curve(ten, table, scattered=True, **changes):
    """{what lies along the axis: predicted} of a figure's table with these changes."""
    points = {}
    for row, run in zip(table["rows"], tables.runs(ten, table["name"], **changes)):
        longer = 0 if scattered else sum(longer_unscattered(run).values())
        points[row[0]] = run.in_unit(run.seconds + longer)
    return points


def figure(ten, number):
    """{curve: its points} of a figure."""
    if number == 8:
        return figure_8(ten)
    table = tables.find_table(f"figure {number}")
    return {name: curve(ten, table, **changes) for name, changes in table["curves"].items()}


def figure_8(ten):
    """Speed over the micro-batch, as a share of the best, by equation 1 with the times of figure 7
    and p = 8."""
    curves = {}
    for batch in (128, 512):
        times = {b: equation_1(batch, b, 8, b / rate)
                 for b, rate in figure(ten, 7)["one GPU"].items()}
        curves[f"batch {batch}"] = {b: min(times.values()) / time for b, time in times.items()}
    return curves


def best(curve):
    """Where a curve is highest."""
    return max(curve, key=curve.get)


def falls(curve):
    """From how many of its points it falls to the next."""
    values = list(curve.values())
    return sum(after < before for before, after in zip(values, values[1:]))
