"""Megatron's paper of 2021: what chapter 10 predicts of its figures.

All runs of figures 11 to 18 are GPTs on A100s, with full recomputation unless it says otherwise.
Sizes, degrees and batches are those of the scripts that were published with the paper. Nothing is
fitted on these figures: the constants of chapter 10 are those that table 1 and the ZeRO-3 rows of
table 2 gave. A figure here is {curve: {what lies along the axis: predicted}}. ten: chapter 10's
module, whichever is held to them.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM (2021); github.com/NVIDIA/Megatron-LM, examples/sc21.
"""


def equation_1(sequences, micro_batch, p, seconds):
    """Seconds of a step, (b'/b + p - 1) · (t_f(b) + t_b(b)): b' sequences of a pipeline, and what
    a stage takes for forward and backward of a micro-batch."""
    return (sequences / micro_batch + p - 1) * seconds


def message(seq, dim, t, micro_batch=1):
    """Numbers of a micro-batch that each rank of tp sends to the next stage: a t-th, which the
    other side gathers; or with t = 1, without scatter/gather, all."""
    return micro_batch * seq * dim / t


# ------------------------------------------------------------------------------- runs of the paper

def layout(ten, dp=1, tp=1, pp=1, v=1, micro_batch=1, recompute="full"):
    """A Layout of chapter 10, as all were in 2021: without sequence parallelism and ZeRO."""
    return ten.Layout(dp, tp, 1, pp, v, sp=False, micro_batch=micro_batch, recompute=recompute)


def machine(ten):
    """An A100 of theirs, with their software."""
    return ten.Machine(ten.CLUSTERS["a100"], ten.SOFTWARE["megatron-2021"])


def seconds(ten, model, layout, batch, scattered=True):
    """{cause: seconds} of a step. Without scatter/gather, each rank of tp sends a whole message to
    the next stage, through its own network card; with it a part, and gathers the whole on NVLink.
    """
    a100 = machine(ten)
    found = ten.step_seconds(model, layout, a100.cluster, a100.software, batch)
    if not scattered and layout.pp > 1:
        whole, part = (2 * message(model.seq, model.dim, t, layout.micro_batch)
                       for t in (1, layout.tp))
        link = a100.link(layout.pp * layout.stage)
        longer = (whole - part) / link - a100.ring(whole, layout.tp, 1)
        of_stage = 2 * layout.v * longer                # for a micro-batch: there, and back
        found["pp"] += batch // (layout.dp * layout.micro_batch) * of_stage
        found["bubble"] += (layout.pp - 1) / layout.v * of_stage
    return found


def rate(ten, model, layout, batch, scattered=True):
    """TFLOP/s of a GPU, of equation 3's FLOPs."""
    step = sum(seconds(ten, model, layout, batch, scattered).values())
    flops = ten.step_flops(model, batch, recompute=layout.recompute)
    return flops / step / (layout.pp * layout.stage) / 1e12


def fits(ten, model, layout, batch):
    """Whether the planner would take it: 1, or 0."""
    a100 = machine(ten)
    found = ten.memory(model, layout, a100.software, batch // (layout.dp * layout.micro_batch))
    return int(sum(found.values()) <= ten.ROOM * a100.cluster.memory)


# ------------------------------------------------------------------------------------- the figures

BATCHES = 12, 24, 36, 48, 60            # of figures 12 and 18


def figure_7(ten):
    """TFLOP/s of one GPU over its micro-batch, of a step with its optimizer: 1 G parameters."""
    model = ten.gpt(4, 4096, 128)
    sizes = 1, 2, 4, 8, 16
    return {"one GPU": {b: rate(ten, model, layout(ten, micro_batch=b), b) for b in sizes}}


def figure_8(ten):
    """Speed over the micro-batch, as a share of the best, by equation 1 with the times of figure 7
    and p = 8."""
    found = {}
    for batch in (128, 512):
        times = {b: equation_1(batch, b, 8, b / of) for b, of in figure_7(ten)["one GPU"].items()}
        found[f"batch {batch}"] = {b: min(times.values()) / time for b, time in times.items()}
    return found


def over_batch(ten, v, scattered=True, batches=BATCHES):
    """{batch: TFLOP/s} of GPT-3 on 96 GPUs, tp 8, pp 12."""
    of = layout(ten, tp=8, pp=12, v=v)
    return {batch: rate(ten, ten.MODELS["gpt3"], of, batch, scattered) for batch in batches}


def figure_12(ten):
    """TFLOP/s over the batch: 8 layers in one slice of a stage, or in 4 slices."""
    return {"1f1b": over_batch(ten, 1), "interleaved": over_batch(ten, 4)}


def figure_18(ten):
    """The same of 4 slices, with scatter/gather and without."""
    return {"scatter/gather": over_batch(ten, 4), "whole messages": over_batch(ten, 4, False)}


def figure_13(ten):
    """TFLOP/s over tp, on 64 GPUs, of which tp · pp is all: 162 G parameters."""
    model = ten.gpt(32, 20480, 128)
    return {f"batch {batch}": {tp: rate(ten, model, layout(ten, tp=tp, pp=64 // tp), batch)
                               for tp in (2, 4, 8, 16, 32)} for batch in (32, 128)}


def instead_of_dp(ten, axis):
    """TFLOP/s over this axis, on 64 GPUs, of which dp has the others: 5.9 G parameters."""
    model = ten.gpt(32, 3840, 32)
    return {f"batch {batch}": {n: rate(ten, model, layout(ten, 64 // n, **{axis: n}), batch)
                               for n in (2, 4, 8, 16, 32)} for batch in (32, 128, 512)}


def figure_15(ten):
    return instead_of_dp(ten, "tp")


def figure_16(ten):
    """TFLOP/s over the micro-batch, tp 8, pp 8: 91 G parameters."""
    return {f"batch {batch}": {b: rate(ten, *run_of_16(ten, b), batch) for b in (1, 2, 4, 8)}
            for batch in (128, 512)}


def run_of_16(ten, micro_batch):
    """Its model and layout."""
    return ten.gpt(32, 15360, 128), layout(ten, tp=8, pp=8, micro_batch=micro_batch)


def figure_17(ten):
    """Sequences a second over the batch, tp 8, pp 16: 145 G parameters, recomputed or not."""
    names = {"none": "nothing again", "full": "recomputed"}
    return {name: {batch: batch / sum(seconds(ten, *run_of_17(ten, again), batch).values())
                   for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
            for again, name in names.items()}


def run_of_17(ten, recompute):
    """Its model and layout."""
    return ten.gpt(80, 12288, 96), layout(ten, tp=8, pp=16, recompute=recompute)


def best(curve):
    """Where a curve is highest."""
    return max(curve, key=curve.get)


def falls(curve):
    """From how many of its points it falls to the next."""
    values = list(curve.values())
    return sum(after < before for before, after in zip(values, values[1:]))
