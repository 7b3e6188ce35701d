"""What chapter 08 is held to beside all chapters: FLOPs of its experts, and where their rows went.

Of formulas()["mixtures"]: seen, this rank's exchanges in the metered step, pairs of rows sent to
each rank of ep and received from it; chosen, a tensor for each layer, the experts of the last
micro-batch's tokens; crossings, rows of a token that leave its machine by one hop and by two, if
all are chosen alike; dropped, of each layer which share of the picks found no place, and which of
the tokens lost all.

Of formulas()["experts"], chapter 09's: seen, of each stage and block, for each micro-batch of the
metered step, the rows sent to the ranks of ep and received; sent(tp, ep, top_k, cut), what a layer
sends in units of a message between sub-layers.
"""

import statistics

import torch

from lab.chapters import room
from lab.run.instrument import Instrument
from lab.run.words import quantity


def step_flops(cfg, tokens, rows, recompute="none"):
    """FLOPs of a step on a rank that has so many tokens, and whose experts take so many rows, in
    all layers. As in chapter 01, a number that multiplies a row takes 2 forward and 4 backward, and
    2 more where it is computed again."""
    kv, shared = cfg.dim * cfg.kv_heads // cfg.heads, cfg.layers * tokens * cfg.shared_expert
    blocks = cfg.layers * tokens * cfg.dim * (2 * cfg.dim + 2 * kv + cfg.experts)
    blocks += (rows + shared) * cfg.mlp()
    # Attention's core: two matmuls, and four backward, or five where scores are computed again.
    plain, matmuls = cfg.attention == "plain", 6 if cfg.attention == "plain" else 7
    again = 0
    if recompute == "selective":            # the output that ends a plain core is not read again
        matmuls += 1 if plain else 2
    if recompute == "full":
        again, matmuls = blocks - shared * cfg.dim * cfg.hidden, matmuls + 2    # nor a shared down
    core = cfg.layers * 2 * tokens * cfg.seq * cfg.dim * matmuls
    return 6 * (blocks + tokens * cfg.dim * cfg.vocab) + 2 * again + core


def rows_of(args, found):
    """{stage: [rows of each micro-batch through this rank's experts, for each block]}."""
    tokens = args.micro_batch * args.model.seq // (args.cp * args.tp)
    every_pick = args.micro_batches * [tokens * args.top_k]         # without ep
    return {stage: [[sum(received) for _, received in of_block] or every_pick
                    for of_block in of_stage] for stage, of_stage in found["seen"].items()}


def note_folded(run, found):
    """Of chapter 09: what experts that are folded send, beside those that tp cuts."""
    args = run.args
    if args.tp == 1 or args.ep % args.tp:
        return
    message = args.micro_batch * args.model.seq // (args.cp * args.tp) * args.model.dim
    passes = args.micro_batches * sum(map(len, found["seen"].values()))
    size = passes * message * run.rounded.itemsize / 1e6
    beside = [size * units for cut in (False, True)
              for units in found["sent"](args.tp, args.ep, args.top_k, cut)]
    run.note("{:.2f} MB over tp, and {:.2f} over ep if all are chosen alike; if tp cut each "
             "expert, {:.2f} and {:.2f}".format(*beside))


def flops(run, found):
    tokens = run.args.batch // run.world * run.args.model.seq
    rows = sum(sum(received) for _, received in found["seen"])
    return step_flops(run.args.model, tokens, rows, run.args.recompute)


def hold_loads(run):
    """How often all experts of a layer were picked in the last step: it is in the report only if it
    is not so. Nothing else would show it, since a bias moves by a sign, which twice a load has."""
    for load in run.recorded.get("loads", [])[-1:]:
        counted, picks = max(map(sum, load)), run.args.batch * run.args.model.seq
        picks *= run.args.model.top_k
        if counted != picks:
            run.judge(("values", "picks of a layer", "in a step"), counted, picks)


def explain(run, found):
    """Notes about balance, about what is dropped, and about what leaves a machine."""
    n = run.args.ep
    uneven = n > 1 and not found["dropped"]             # places are as many for all
    note_busiest(run, [sum(received) for _, received in found["seen"]] if uneven else [])
    if found["dropped"]:
        dropped, lost = mean_of_all(run, found["dropped"])
        run.note(f"{run.args.model.places} places for each expert and sequence: {dropped:.1%} of "
                 f"the last micro-batch's picks are dropped, and {lost:.1%} of its tokens lose all")
    if run.args.nodes > 1 and n % run.args.nodes == 0:
        machine = run.rank % n * run.args.nodes // n
        counted = [crossings(chosen, run.args.model, machine) for chosen in found["chosen"]]
        (one, two), (even_one, even_two) = mean_of_all(run, counted), found["crossings"]
        e, k = run.rounded.itemsize, run.args.top_k
        row = run.args.model.dim * e
        beside = k * (8 + max(e, 4))                        # choices and gates
        run.note(f"of a token of the last micro-batch, {one:.2f} rows leave its machine by one "
                 f"hop ({quantity(round(one * row))}), {two:.2f} by two, with choices and gates "
                 f"({quantity(round(two * (row + beside)))}); if all choices are equally likely, "
                 f"{even_one:.2f} and {even_two:.2f}")
    sent, _ = found["seen"][0]
    before = run.rank // len(sent) * len(sent)          # the ranks before those that share
    mine = [0] * before + sent + [0] * (run.world - before - len(sent))
    run.record(rows=run.of_all_ranks(mine))


def note_busiest(run, arrived):
    """arrived: of each exchange of the metered step, the rows that came to this rank."""
    ratios = []
    for of_ranks in zip(*run.of_all_ranks(arrived)):
        if sum(of_ranks):
            ratios.append(max(of_ranks) * run.world / sum(of_ranks))
    if ratios:
        run.note(f"in that step, {statistics.mean(ratios):.2f} times as many rows come to the "
                 "busiest rank of a mixture as to the mean of them: others wait for it")


def mean_of_all(run, pairs):
    """Of the pairs of all layers and ranks: the mean of the first ones, and that of the second."""
    everyones = [pair for of_rank in run.of_all_ranks(pairs) for pair in of_rank]
    return [statistics.mean(values) for values in zip(*everyones)]


def crossings(chosen, cfg, machine):
    """Of a token that lies on this machine, how many rows leave it by one hop, which has one for
    each pick, and by two, which has one for each other machine. chosen: (batch, seq, k)."""
    picks = torch.stack([(chosen // (cfg.experts // cfg.nodes) == node).sum(-1)
                         for node in range(cfg.nodes) if node != machine], dim=-1).double()
    return picks.sum(-1).mean().item(), (picks > 0).double().sum(-1).mean().item()


oracle = room("08", "oracle")


class Held(Instrument):
    """Of chapters 08 and 09. One GPU's mixture is not the chapter's own: see oracle.py."""

    after_step_of_one_gpu = staticmethod(oracle.move_biases)

    def replace_in_one_gpu(self, model):
        oracle.take_place(model)

    def rows_of_experts(self, run, answer):
        return rows_of(run.args, answer["experts"]) if answer.get("experts") else None

    def flops(self, run, answer):
        return {"all": flops(run, answer["mixtures"])} if "mixtures" in answer else {}

    def hold(self, run, answer):
        hold_loads(run)

    def explain(self, run, answer):
        if "mixtures" in answer:
            explain(run, answer["mixtures"])
        if answer.get("experts"):
            note_folded(run, answer["experts"])
