"""What chapter 10 plans for the layout of a run, beside what the run has measured.

The planner speaks of the fullest GPU, of whole micro-batches, and of numbers alone: 2 bytes of a
weight and of what is kept, 4 of a gradient, 12 of AdamW. Of what is alive for a moment it knows the
gradient of logits alone, which it counts as an activation of the last stage.
"""

from dataclasses import replace

import torch.distributed as dist

from lab.chapters import chapter
from lab.planner import planning
from lab.planner.models import as_planned
from lab.run import anatomy
from lab.run.meters import name_of
from lab.run.words import quantity

ALIVE = "all of these, and what lives shortly"
STATES = {"weights": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}


def layout_of(args, ranks):
    """(Model, Layout, Software) of the planner; None: it has no such layout."""
    ten, cfg, variant, number = chapter("10"), args.model, args.variant, args.chapter[:2]
    degrees = {"02": {"dp": ranks}, "04": {"tp": ranks, "sp": False}, "05": {"tp": ranks},
               "06": {"cp": ranks}, "08": {"dp": ranks, "ep": ranks}}.get(number)
    if number == "03":
        zero = {"zero1": 1, "zero2": 2, "zero3": 3}.get(variant)
        degrees = zero and {"dp": ranks, "zero": zero}
    if number == "07":
        schedules = {"1f1b": "1f1b", "interleaved": "1f1b", "zb-h1": "zero-bubble",
                     "dualpipe-v": "dualpipe-v"}
        degrees = variant in schedules and {
            "pp": ranks, "schedule": schedules[variant],
            "v": args.chunks if variant == "interleaved" else 1}
    if number == "09":
        degrees = {axis: getattr(args, axis) for axis in ("dp", "tp", "cp", "pp", "ep", "zero")}
        degrees |= {"v": 2, "schedule": "1f1b"} if args.schedule == "interleaved" else {
            "schedule": args.schedule}
    if number == "11":
        degrees = {"dp": ranks, "zero": args.zero}
    if not degrees or variant == "ulysses":
        return None

    model = as_planned(cfg)
    if getattr(cfg, "experts", 0):
        model = replace(model, experts=cfg.experts, top_k=cfg.top_k,
                        shared=int(getattr(cfg, "shared_expert", False)))
    software = replace(
        ten.SOFTWARE["ours"], flash=cfg.attention == "sdpa", optimizer=args.optimizer,
        keeps_gathered=(number, variant) != ("05", "megatron"),
        whole_tables=number != "04", ring=variant in ("zigzag", "ring"))
    recompute = "none" if args.recompute == "selective" and software.flash else args.recompute
    return model, ten.Layout(micro_batch=args.micro_batch, recompute=recompute, **degrees), software


def plan_of(args, ranks):
    """A Plan of the planner, on the cluster of args; None: it has no such layout."""
    ten, asked = chapter("10"), layout_of(args, ranks)
    if asked is None or args.precision != "bf16":
        return None
    model, layout, software = asked
    plan = ten.Plan(model, layout, ten.CLUSTERS[args.cluster], software, ranks, args.batch)
    return plan if plan.memory else None


def measured_on_axes(run):
    """{axis: bytes that went over it in the metered step, beside what is sent once a step}."""
    found = {}
    for name, ops in run.comm.by_group.items():
        axis = name_of(dist.distributed_c10d._resolve_process_group(name))
        found[axis] = sum(op["bytes"] for op in ops.values())
    return found


def rows(run, plan):
    """Yield (what, measured, planned), in bytes."""
    model, layout, *_ = plan.asked
    states = {check["name"]: check["measured"] for check in run.checks}
    for cause, name in STATES.items():
        yield name, states[name], round(plan.memory[cause])
    yield "activations", run.recorded["activations"], round(plan.memory["activations"])
    yield ALIVE, sum(run.peak.values()), round(plan.bytes)
    if run.args.chapter.startswith("09"):               # whose report has axes
        sent = measured_on_axes(run)
        passes = run.args.micro_batches * -(-model.layers // layout.pp)
        if layout.recompute == "none":                  # else what is computed again sends again
            for axis, (numbers, n, *_) in chapter("10").messages(model, layout).items():
                if n > 1 and axis in sent:
                    yield f"sent over {axis}", sent[axis], round(2 * passes * 2 * numbers)


def left_out(run, plan):
    """Bytes of activations that the planner does not count, if the first stage has the most: ids of
    tokens, RoPE's tables, what norms keep of a token, and a copy of the output of fused attention,
    which o reads. None: of a mixture, whose rows are picked."""
    ten, (model, layout, _, software, batch) = chapter("10"), plan.asked
    if model.experts > 1 or run.answer.get("kept") is None:
        return None
    kept = run.answer["kept"]
    ids, block, *_ = anatomy.kept_by_modules(run.args.model, layout.micro_batch, 2, kept)
    alive = ten.micro_batches_alive(layout, batch // (layout.dp * layout.micro_batch))
    layers = alive * -(-model.layers // layout.pp)
    return (layers * (block - ten.kept_by_layer(model, layout, software))
            + with_ids(run) * ids + anatomy.shared_bytes(run.args.model, 2, kept))


def with_ids(run):
    """Micro-batches that are alive on the first stage of all, when most is kept."""
    alive = found = 0
    for kind, stage, *_, kept in run.spans:
        alive += {"F": 1, "W": 0}.get(kind, -1) if stage == 0 else 0
        found = alive if kept == run.recorded["activations"] else found
    return found if run.spans else 1


def notes(run, plan):
    """Yield lines: the plan beside the run, and its seconds."""
    cluster = run.args.cluster
    yield f"  {'beside the planner, of its fullest GPU':<40}{'rehearsed':>12}{'planner':>15}"
    for what, measured, planned in rows(run, plan):
        off = measured - planned
        is_much = abs(off) > 5e-4 * planned
        by = f"{quantity(abs(off))} {'more' if off > 0 else 'less'}" if off else "✓"
        by += f", {off / planned:+.1%}" if is_much else ""
        if off and what == "activations" and off == run.recorded["left_out"]:
            by += ": what it leaves out ✓"
        yield f"    {what:<38}{quantity(measured):>12}{quantity(planned):>15}   {by}"
    seconds = {cause: plan.seconds.get(cause, 0) for cause in planning.CAUSES}
    ten, (model, *_, batch) = chapter("10"), plan.asked
    alive, memory = sum(run.peak.values()), ten.CLUSTERS[cluster].memory
    if alive > memory:
        yield f"  does not fit: {quantity(alive)} alive, and a GPU has {quantity(round(memory))}"
    rate = ten.step_flops(model, batch, "causal") / plan.total / run.world / 1e12
    yield (f"  {'if it fitted, ' * (alive > memory)}a step on {run.world:,} x {cluster} would take "
           f"{plan.total:.2f} s, {rate:.0f} TFLOP/s of a GPU: {ten.largest(seconds)}")
