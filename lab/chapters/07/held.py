"""What the schedules of chapters 07 and 09 are held to: what is kept after each action, the bubble,
and messages."""

from lab import schedules
from lab.run.about import AS_COMPUTED
from lab.run.anatomy import (
    kept_by_modules,
    keys_and_values,
    norm_is_fused,
    part,
    share_of,
    shared_bytes,
)
from lab.run.formulas import check_kept
from lab.run.instrument import Instrument


def waiting_by_modules(cfg, batch, e, kept):
    """Bytes that each module keeps between B and W: inputs of linears, and gradients of their
    outputs. (Experts have none: their weights' gradients come with B.)"""
    x = batch * cfg.seq * cfg.dim * e

    def of(name, size):
        return part(share_of(kept, name), size, name)

    heads = keys_and_values(cfg, kept | {"core": 1})        # their share, for its own tokens:
    kv = part(heads * share_of(kept, "positions"), 2 * x * cfg.kv_heads // cfg.heads,
              "keys and values")
    inputs = of("inputs", x) + of("inside", x)              # of q, k and v together; of o
    gradients = of("inside", x) + kv + of("inputs", x)      # of q; of k and v; of o
    if not getattr(cfg, "experts", 0):
        hidden = of("inside", batch * cfg.seq * cfg.hidden * e)
        inputs += of("inputs", x) + hidden                  # of up, and of a gate; of down
        gradients += (2 if cfg.gated else 1) * hidden + of("inputs", x)
    logits = of("logits", batch * cfg.seq * cfg.vocab * e)
    return [0, *[inputs + gradients] * cfg.layers, of("outside", x) + logits]


def own_inputs(cfg, batch, e, kept, inputs):
    """{module: bytes} of those inputs that a stage keeps to read their gradients from, of which no
    module keeps the same tensor: RMSNorm may keep it in float32. (A block that is recomputed keeps
    its input itself, and tokens have no gradient.)"""
    if not cfg.gated or e >= 4 or norm_is_fused(cfg, kept):
        return {}
    as_it_is = {0, *range(1, cfg.layers + 1)} if kept.get("recompute") == "full" else {0}
    x = part(share_of(kept, "outside"), batch * cfg.seq * cfg.dim * e, "outside")
    return dict.fromkeys(set(inputs) - as_it_is, x)


def alive_over_time(cfg, batch, e, kept, schedule, rows=None, ep=1):
    """Bytes kept after each of a rank's actions (kind, stage, micro-batch).

    schedule: its `actions`; `slices`, (start, end) of each stage in the list of modules; where
    there are more stages than slices, they begin again; and `inputs`, the modules whose inputs have
    gradients of their own. rows[stage]: for each of its blocks, the rows of each micro-batch.
    """
    slices = [slice(*ends) for ends in schedule["slices"]]
    waiting = waiting_by_modules(cfg, batch, e, kept)
    own = own_inputs(cfg, batch, e, kept, schedule["inputs"])
    now, over_time = shared_bytes(cfg, e, kept), []
    for kind, stage, i in schedule["actions"]:
        where = slices[stage % len(slices)]
        of_blocks = None
        if rows is not None:                                # of the blocks that are not here, none
            before = [0] * max(0, where.start - 1)
            here = [of_block[i] for of_block in rows[stage]]
            of_blocks = [*before, *here, *[0] * (cfg.layers - len(before) - len(here))]
        alive = sum(kept_by_modules(cfg, batch, e, kept, of_blocks, ep)[where])
        alive += sum(own.get(module, 0) for module in range(where.start, where.stop))
        rest = sum(waiting[where]) if kind != "BW" else 0
        now += {"F": alive, "W": -rest}.get(kind, rest - alive)
        over_time.append(now)
    return over_time


def hold_alive(run, answer):
    """The same after each action of a schedule."""
    args, over_time = run.args, [kept for *_, kept in run.actions]
    known = (instrument.rows_of_experts(run, answer) for instrument in run.instruments)
    rows = next(filter(None, known), None)
    formula = alive_over_time(
        run.args.model, run.args.micro_batch, run.rounded.itemsize, answer["kept"],
        answer["schedule"], rows, getattr(run.args, "ep", 1))
    if answer.get("versions", 1) > 1:                       # a step begins with some of the last
        *_, at_end = [shared_bytes(args.model, run.rounded.itemsize, answer["kept"]),
                      *formula]
        reads = formula and 0 in answer["modules"]          # the tokens of the next batch
        at_end += 8 * args.batch * args.model.seq if reads else 0
        return check_kept(run, ["activations", "when a step ends"], over_time[-1], at_end)
    check_kept(run, ["activations", "at the most"], max(over_time), max(formula))
    if not run.on_cuda:
        right = sum(measured == expected for measured, expected in zip(over_time, formula))
        run.check(AS_COMPUTED, right, len(formula), "")


class Held(Instrument):
    def hold_activations(self, run, answer):
        if "schedule" in answer:
            hold_alive(run, answer)
        return "schedule" in answer

    def hold(self, run, answer):
        schedule = answer.get("schedule", {})
        if "bubble" in schedule:
            schedules.hold_bubble(run, schedule)
        if {"program", "programs"} & schedule.keys() and run.world > 1:
            schedules.hold_messages(run, schedule)
