"""What a run is held to: for each key of a chapter's `formulas`, an instrument and its rows.

A chapter's formulas(args, rank, ranks, model) returns plain data, and is asked once, after the
metered step. All keys are optional:

    parameters    numbers on this rank, or {kind: share} of those of `modules` of the list; with
                  widths, or zero, holders, blocks (of a unit) and secondary: see anatomy.py
    versions      of the parameters on a rank: 2 where the steps of chapter 07 overlap
    states        chapter 11's bytes of parameters, gradients and masters
    sent          {op: (calls, payload, wire)}, or for each axis: {axis: {op: ...}}, whose wire may
                  be left out: it is the payload times the ring's factor for ranks[axis] ranks
    gradients     {kind: name of the group that sums it}: what anatomy.py adds to sent; gathers,
                  reduces: how often of a module
    kept          {class: share} of the activations; None: show them without a formula
    schedule      a rank's actions (where steps overlap, those that leave something alive at a
                  step's end), and the slices of the model that are its stages; its bubble; its
                  program with messages, or all, what an action needs, and the bytes of a message
    flops         {"all": number} or {"attention": number} of the metered step
    experts, mixtures, contexts, settings, noise, sample, most gradients
                  of the instruments in lab/chapters/NN/held.py
    checks        {about: (computed, formula)}, or with a unit behind them; about: see about.py
    overlap       {op: function(flops, bandwidth)}, the time to send it over that of the compute
                  that it can hide behind, at FLOP/s and bytes/s: what is at most 1 can hide. With
                  several conditions of an op: {(op, "the matmul with o"): function, ...}; where
                  sent is by axis, op is "dp: all_gather". What is not sent is left out
    beside, machines, utilization, notes, record                        what explains the numbers

States and traffic are always measured and shown, the others where a chapter names them.
"""

import functools
import itertools
import statistics

import torch
import torch.distributed as dist

from lab.run import anatomy
from lab.run.machines import MACHINES, PEAK_FLOPS
from lab.run.meters import COLLECTIVES, name_of, nbytes
from lab.run.overlap import conditions_of_axes, hold_overlap, over_compute
from lab.run.rectangles import rectangles_of, trained
from lab.run.verify import named_parameters
from lab.run.words import count, quantity

NARROWER = torch.bfloat16, torch.float16, torch.float32    # what a wide dtype may hide
WATCHED_STEPS = 3       # the memory of chapter 01's first steps is watched
KEYS = {"parameters", "modules", "widths", "zero", "holders", "blocks", "versions", "secondary",
        "most gradients", "states", "sent", "ranks", "gradients", "gathers", "reduces", "kept",
        "schedule", "experts", "flops", "checks", "settings", "mixtures", "contexts", "beside",
        "overlap", "machines", "utilization", "noise", "notes", "sample", "record"}
RECOMPUTED = {"none": {}, "selective": {"core": 0}, "full": {"recompute": "full"}}  # of kept
AMOUNTS = "calls", "payload", "on the wire"     # what is checked of each operator that sends


def hold(run):
    """Hold a run to its chapter's formulas, at its end; fills its checks and notes."""
    answer = run.answer or {}
    unknown = [*(answer.keys() - KEYS), *((answer.get("kept") or {}).keys() - anatomy.CLASSES)]
    if unknown:
        raise ValueError(f"formulas() gives {unknown[0]!r}, which no instrument knows")
    for part in (hold_states, hold_activations, hold_flops, hold_traffic, hold_checks):
        part(run, answer)
    if not run.is_rehearsal:
        explain(run, answer)


def hold_checks(run, answer):
    """What the chapter has computed itself, and what its instruments hold."""
    for about, (computed, formula, *unit) in answer.get("checks", {}).items():
        run.check(about, computed, formula, *(unit or [""]))
    for instrument in run.instruments:
        instrument.hold(run, answer)


# ----------------------------------------------------------------------------------- model states

def updated_parameters(run):
    """Those that the run's optimizers update."""
    return list(itertools.chain(*map(trained, run.optimizers)))


def held(run):
    """The tensors that stay between two steps: parameters, gradients, optimizer states. What an
    optimizer updates in place of the model's own parameters (masters) is a state of it."""
    own, updated = list(run.model.parameters()), updated_parameters(run)
    states = [list(optimizer.state.values()) for optimizer in run.optimizers]
    gradients = [p.grad for p in (*own, *updated)]
    if not hasattr(first_updated(run), "full"):
        of_model = set(map(id, own))
        own += [p.versions for p in own if hasattr(p, "versions")]
        return own, gradients, [p for p in updated if id(p) not in of_model] + states

    parameters, masters = [], []                            # of flat shards
    for unit in run.updated:
        parameters += [unit.full, unit.shard, getattr(unit, "secondary", None)]
        gradients.append(unit.shard.grad)
        masters += [unit.shard.master] if hasattr(unit.shard, "master") else []
    return parameters, gradients, masters + states


def hold_beginning(run):
    """Before the first step, what the optimizers update is what one GPU begins with, to the last
    bit: masters are no copies of rounded weights. Nothing else would show that, since gradients are
    those of rounded weights in any case. It is in the report only if it is not so."""
    drawn = {name: p.data for name, p in named_parameters(run.first_model())}
    unlike, widths = 0, NARROWER
    for p in updated_parameters(run):
        for name, _, offsets, mine in rectangles_of(p, p.detach()):
            place = tuple(slice(at, at + n) for at, n in zip(offsets, mine.shape))
            there = drawn[name][place].to(mine.device)
            unlike += (mine != there).sum().item()
            widths = [x for x in widths if torch.equal(mine, there.to(x).to(mine))]
    if unlike:
        how = f"rounded to {str(widths[0])[6:]}" if widths else "unlike one GPU's"
        run.judge(("parameters", "numbers that the optimizer begins with", how), unlike, 0)


def hold_masters(run):
    """What computes is what the optimizer has updated, rounded: it is in the report only if it is
    not so. The tensors that are compared with one GPU are the masters, which would not show it."""
    shards = [unit.shard for unit in run.updated] if hasattr(first_updated(run), "full") else []
    pairs = [(p, p.master) for p in shards or run.model.parameters() if hasattr(p, "master")]
    unlike = sum((p != master.detach().to(p)).sum().item() for p, master in pairs)
    if unlike:
        run.judge(("parameters", "numbers that are not their master's", "rounded"), unlike, 0)


def first_updated(run):
    """A flat shard, if it is such that the run updates."""
    return run.updated[0] if isinstance(run.updated, list) else None


def hold_states(run, answer):
    """Parameters, gradients and optimizer states of this rank."""
    expected = dict.fromkeys(("parameters", "gradients", "optimizer states"))
    if "parameters" in answer or answer.get("zero"):
        width = run.dtype.itemsize
        answer = answer | {"moments": moments_of(run)}
        as_it_is = {} if run.is_mixed else {"widths": (width, width, 0)}    # under autocast
        expected = anatomy.state_bytes(run.args, as_it_is | answer, width)
    if "states" in answer:
        expected = dict(answer["states"])
        expected["optimizer states"] = expected.pop("masters") + moments_of(run)
    for (kind, size), tensors in zip(expected.items(), held(run)):
        if kind == "optimizer states" and run.skipped == len(run.losses):
            size = None                                     # all steps skipped: there is none yet
        where = "on the CPU" if kind == "optimizer states" and getattr(
            run.args, "offload", False) else ""
        run.check(("states", kind, where), nbytes(tensors), size)
    if not run.is_rehearsal:                                # which has no values
        hold_masters(run)
    for instrument in run.instruments:
        instrument.hold_states(run, answer)


def moments_of(run):
    """By the first instrument that knows; None: they are those of the optimizer's name."""
    known = (instrument.moments(run) for instrument in run.instruments)
    return next((size for size in known if size is not None), None)


# ------------------------------------------------------------------------------------- activations

def hold_activations(run, answer):
    """What autograd keeps for backward in the metered step."""
    args = run.args
    if answer.get("kept") is not None:
        answer["kept"] = answer["kept"] | RECOMPUTED[args.recompute]
    if any([instrument.hold_activations(run, answer) for instrument in run.instruments]):
        return
    if "kept" in answer:
        formula = None if answer["kept"] is None else anatomy.activation_bytes(
            args.model, args.micro_batch, run.rounded.itemsize, answer["kept"])
        check_kept(run, ["activations of a micro-batch"], run.kept.most, formula)
        run.record(activation_bytes=run.kept.most)


def attention_is_fused_on_cuda(run):
    return run.on_cuda and run.args.attention != "plain"


def check_kept(run, what, measured, formula):
    """Bytes kept for backward, beside the CPU's formula. what: and of which amount.

    CUDA's kernels keep some small things otherwise (a LayerNorm its statistics in float32), so
    there the formula need only be right to within 10%. What fused attention keeps depends on which
    of its kernels runs, so of that there is no formula.
    """
    formula = None if attention_is_fused_on_cuda(run) else formula
    run.check(("kept", *what), measured, formula, within=0.1 if run.on_cuda else 0)
    if run.on_cuda and formula not in (None, measured):
        run.note("CUDA's kernels keep other tensors than the CPU's, which the formula is of: "
                 f"{quantity(abs(measured - formula))} away")


# ------------------------------------------------------------------------------------------- FLOPs

def hold_flops(run, answer):
    """FLOPs of the metered step. Of fused attention on CUDA there is no formula, as above."""
    known = dict(answer.get("flops", {}))
    for instrument in run.instruments:
        known |= instrument.flops(run, answer)
    for what, formula in known.items():
        measured = getattr(run.flops, what)
        about = "FLOPs", "FLOPs of a step", "" if what == "all" else what
        run.flops_of[what] = measured
        run.check(about, measured, None if attention_is_fused_on_cuda(run) else formula, "FLOP")


# ----------------------------------------------------------------------------------------- traffic

def hold_traffic(run, answer):
    """What this rank sent in the metered step, by operator, or by axis and operator."""
    sent, axes = answer.get("sent"), None
    if "gradients" in answer:
        sent = sent | anatomy.gradient_traffic(run.args.model, answer, run.rounded.itemsize,
                                               run.dtype.itemsize)
    by_axis = bool(sent) and all(isinstance(ops, dict) for ops in sent.values())
    for instrument in run.instruments if sent is not None else ():
        instrument.add_traffic(run, sent, by_axis)
    if by_axis:
        sent = with_wire_bytes(sent, answer.get("ranks", {}))
        axes = hold_axes(run, sent)
    else:
        for op, measured, expected in by_operator(run.comm.total, sent):
            for what, *values in zip(AMOUNTS, measured, expected):
                ok = run.judge(("sent", op, what), *values)
                if what == "on the wire" and ok:        # both have the same factor: it was not
                    ok = None                           # measured, so nothing says that it is right
                run.row(f"{op}, {what}", *values, "" if what == "calls" else "B", ok)
    if run.comm.total:
        run.note("on the wire: not measured, but the payload times the ring algorithm's factor, "
                 "such as 2(N-1)/N for an all_reduce")
    if not run.is_rehearsal:                                # which has no seconds
        run.record(timeline=run.comm.timeline())
        conditions = dict(answer.get("overlap", {}))
        for instrument in run.instruments:
            conditions |= instrument.overlap(run, answer, sent)
        if axes and run.flops.all:
            conditions = conditions_of_axes(answer, sent, run.flops.all, run.args.micro_batches)
        hold_overlap(run, conditions, by_axis)
    if axes:
        note_axes(run, axes)
        flops = statistics.mean(run.of_all_ranks(run.flops.all))
        if flops:
            note_machines(run, time_on_axes(sent, flops))
        note_speed(run, {"mfu": flops})


def with_wire_bytes(sent: dict, ranks: dict[str, int]) -> dict:
    """Of each axis {op: (calls, payload, wire)}, in bytes, where a chapter may leave wire to the
    ring's factor for as many ranks as it says: ranks[axis]."""
    factors, whole = dict(COLLECTIVES.values()), {}
    for axis, ops in sent.items():
        whole[axis] = {op: (calls, payload, *(wire or [factors[op](ranks[axis]) * payload]))
                       for op, (calls, payload, *wire) in ops.items()}
    return whole


def hold_axes(run, sent):
    """One line for each axis and operator; what was sent on any other group fails a check. Returns
    {axis: (the ranks of its group, bytes that this rank sent there)}."""
    seen_on, mine, others = {}, {}, []
    for name, ops in run.comm.by_group.items():
        group = dist.distributed_c10d._resolve_process_group(name)
        if name_of(group) in sent and name_of(group) not in seen_on:
            seen_on[name_of(group)] = group, ops
        else:
            others.append(ops)
    for axis, formula in sent.items():
        group, seen = seen_on.get(axis, (None, {}))
        for op, measured, expected in by_operator(seen, formula):
            oks = [run.judge(("sent", op, what, axis), *values)
                   for what, *values in zip(AMOUNTS, measured, expected)]
            run.row(f"{axis}: {op}, {count(measured[0], 'call')}", measured[1], expected[1], "B",
                    False not in oks)
        if group:
            mine[axis] = sorted(dist.get_process_group_ranks(group)), wire_bytes(seen)
    stray = round(sum(map(wire_bytes, others)))
    if stray:
        run.check(("sent", "on other groups"), stray, 0)
    return mine


def note_axes(run, mine):
    """What goes on each axis, and whether it leaves a machine of args.node_size ranks.
    Communication, after all measurements: an all_gather_object."""
    size = run.args.node_size
    everyones, recorded = run.of_all_ranks(mine), {}

    def leaves(ranks):
        return ranks[0] // size != ranks[-1] // size

    for axis, (ranks, here) in mine.items():
        groups, all_sent = zip(*(of_rank[axis] for of_rank in everyones if axis in of_rank))
        where = "leaves the machine" if leaves(ranks) else "inside a machine"
        few = ranks if len(ranks) <= 8 else [*ranks[:3], "...", ranks[-1]]
        run.note(f"{axis}: ranks {' '.join(map(str, few))}, {quantity(round(here))} a step, "
                 f"{where}")
        recorded[axis] = {"groups": sorted(map(list, set(map(tuple, groups)))),
                          "wire_bytes": round(here), "total": round(sum(all_sent)),
                          "leaves": any(map(leaves, groups))}
    run.record(axes=recorded)


def time_on_axes(sent, flops_of_rank):
    """What `note_machines` wants: for each axis, how long it takes to send what goes there, in
    times of what the step computes. Gradients are summed over dp, by ranks that hold the same."""
    wire = dict.fromkeys(("tp", "ep", "cp", "pp", "dp"), 0)
    for axis, ops in sent.items():
        axis = "dp" if axis.startswith("gradients") else axis
        if axis in wire:
            wire[axis] += sum(on_the_wire for _, _, on_the_wire in ops.values())

    return {f"what goes on {axis}: time to send it, over time to compute":
            functools.partial(over_compute, size, flops_of_rank)
            for axis, size in wire.items() if size}


def by_operator(seen, formula):
    """Yield every operator that was seen or is expected, its AMOUNTS, and those by the formula."""
    nothing, unknown = {"calls": 0, "bytes": 0, "wire_bytes": 0}, (None, None, None)
    for op in sorted({*(formula or {}), *seen}):
        expected = unknown if formula is None else formula.get(op, (0, 0, 0))
        yield (op, [round(value) for value in seen.get(op, nothing).values()],
               [value if value is None else round(value) for value in expected])


def wire_bytes(seen):
    return sum(op["wire_bytes"] for op in seen.values())


# --------------------------------------------------------------------- what explains the numbers

def explain(run, answer):
    """Notes that set the numbers beside others."""
    if "beside" in answer:
        note_beside(run, *answer["beside"])
    for instrument in run.instruments:
        instrument.explain(run, answer)
    for line in answer.get("notes", []):
        run.note(line)
    if run.losses_in_time:
        note_late(run)
    if "machines" in answer:
        note_machines(run, answer["machines"])
    if "utilization" in answer:
        note_speed(run, answer["utilization"])
    if "loss_scale" in run.remembered and run.remembered["loss_scale"].state_dict():
        scale = run.remembered["loss_scale"].state_dict()["scale"]
        run.note(f"loss scale {scale:.0f} in the end; {run.skipped} steps skipped")
    for instrument in run.instruments:
        instrument.finish(run, answer)
    run.record(**answer.get("record", {}))


def note_late(run):
    """Where gradients come late: the loss beside that of one GPU where they do not."""
    step, there = len(run.losses_in_time), run.losses_in_time[-1]
    here = run.losses[step - 1]
    run.note(f"one GPU that waits for its gradients has loss {there:.4f} in step "
             f"{run.first_step + step}, and this {here:.4f}: {here / there - 1:+.2%}")
    run.record(losses_in_time=run.losses_in_time)


def note_beside(run, other, formula):
    """What this run sent beside what another technique sends by its formula."""
    here = wire_bytes(run.comm.total)
    there = sum(wire for _, _, wire in formula.values())
    share = f": {here / there:.0%}" if there else ""
    run.note(f"on the wire {quantity(round(here))} in a step, and {other} sends "
             f"{quantity(round(there))}{share}")


def note_machines(run, columns):
    """What functions of (FLOP/s, bytes/s) give for well-known machines. columns: {what the value
    is: the function}."""
    for number, what in enumerate(columns, start=1):
        run.note(f"({number}) {what}")
    heads = "".join(f"{f'({number})':>12}" for number in range(1, len(columns) + 1))
    run.note(f"  {'':<26}{heads}")
    for machine, rates in MACHINES.items():
        values = [function(*rates) for function in columns.values()]
        values = "".join(f"{v:12,.2f}" if v < 100 else f"{v:12,.0f}" for v in values)
        run.note(f"  {machine:<26}{values}")


def note_speed(run, utilizations):
    """Tokens per second; and where the GPU's peak is known, what share of it the FLOPs of a step
    are, by name. The first steps, which are watched, do not count."""
    if len(run.seconds) <= WATCHED_STEPS:
        return
    seconds = statistics.median(run.seconds[WATCHED_STEPS:])
    run.note(f"{run.args.batch * run.args.model.seq / seconds:,.0f} tokens/s")
    gpu = torch.cuda.get_device_name(run.device) if run.on_cuda else None
    if gpu in PEAK_FLOPS:
        peak = PEAK_FLOPS[gpu]
        shares = ", ".join(f"{name.upper()} {flops / (seconds * peak):.1%}"
                           for name, flops in utilizations.items())
        run.note(f"{shares} of the {peak / 1e12:.0f} TFLOP/s of {gpu} in bf16")
    elif gpu:
        run.note(f"no MFU: lab/run/machines.py has no peak of {gpu}")
