"""What the modules of a model hold and keep, to the byte, from the shares that a chapter names.

Chapter 01 derives what a block keeps for backward, class by class; a later chapter says which share
of each class its ranks keep. Here these shares become bytes, as PyTorch keeps them on a CPU. The
same for parameters: how many numbers of each kind a rank holds, and what states they have.

How many numbers a block has in each class, and of each kind, is the same as in chapter 10, which
plans with it: tests/chapters/test_10_planner.py compares the two.

A model is a list of modules (embedding, block, ..., head), and so is what they cost: a stage of a
pipeline is a slice of each list. Bytes: e is the width of a number, `wide` that of the loss and of
other sums, which are in float32 or better.
"""

import argparse
import itertools
import math
from dataclasses import replace

import common
from common import Config, rounded

# Of what is kept, and how.
CLASSES = {"outside", "inputs", "inside", "keys and values", "core", "logits", "ids", "positions",
           "own keys", "met", "how", "vocabulary", "recompute", "every", "fp8", "fused norms"}


def numbers_kept(cfg: Config, batch: int, has_mlp: bool = True) -> dict[str, int]:
    """{class: numbers} that a block keeps, if its attention is plain. has_mlp: not a mixture."""
    tokens, kept_of_mlp = batch * cfg.seq, 4 if cfg.gated else 2    # of its hidden features
    if cfg.gated and cfg.attention == "triton":         # beside which SwiGLU is our kernel
        kept_of_mlp = 3
    x = tokens * cfg.dim
    hidden = tokens * cfg.hidden if has_mlp else 0
    return {"outside": 2 * x, "inputs": 2 * x, "inside": 2 * x + kept_of_mlp * hidden,
            "keys and values": 2 * x * cfg.kv_heads // cfg.heads,
            "core": tokens * cfg.heads * cfg.seq}


# ------------------------------------------------------------------------- kept for backward, by F

def share_of(kept, name):
    """The share of a class that a rank keeps, or what follows from the other shares."""
    follows = {"core": share_of(kept, "inside") if name == "core" else 1, "ids": 0}
    return kept.get(name, follows.get(name, 1))


def local_heads(kept):
    """The share of the heads of a rank that has all positions: what cuts positions cuts no head."""
    return share_of(kept, "inside") / share_of(kept, "positions")


def part(share, size, what):
    """That share of a size. Raises ValueError where it is no whole number: no rank keeps such."""
    whole = round(share * size)
    if abs(share * size - whole) > 1e-9 * size:
        raise ValueError(f"a share of {share:g} of {what}, which are {size}, is no whole number")
    return whole


def keys_and_values(cfg, kept):
    """Their share; of one that is cut by heads, one head at least. A core that is recomputed
    gathers or exchanges them again: then only those of this rank's own tokens are kept."""
    given = kept.get("keys and values")
    given = max(share_of(kept, "inside"), 1 / cfg.kv_heads) if given is None else given
    return kept.get("own keys", given) if share_of(kept, "core") == 0 else given


def core_bytes(cfg, batch, e, kept):
    """What a core of attention keeps beside q, k and v: the weights; or its output, and a number
    for each row of scores. (The output is kept anyway where it is the input of o without a copy.)

    kept["how"]: "blocks", where every core is a fused one; "apart", where its output is moved, too,
    before o has it; or "gathered" keys, of which its queries meet a share, "met", and a fused core
    on a CPU has a mask.
    """
    share, how = share_of(kept, "core"), kept.get("how")
    if not share:                                           # it is recomputed
        return 0
    rows = part(share, batch * cfg.heads * cfg.seq, "rows of scores")
    met = kept.get("met", 1)
    if cfg.attention == "plain" and how in (None, "gathered"):
        return part(share * met, numbers_kept(cfg, batch)["core"] * e, "bytes of the core")
    is_input_of_o = part(local_heads(kept), cfg.heads, "heads") == 1 or cfg.seq == 1 and how is None
    if how in ("apart", "gathered") or "fp8" in kept:
        is_input_of_o = False
    masks = part(share_of(kept, "positions") * met, cfg.seq * cfg.seq * e, "bytes of a mask")
    masks = masks if how == "gathered" else 0
    return rows * max(e, 4) + masks + (0 if is_input_of_o else rows * cfg.dim // cfg.heads * e)


def saved_by_fp8(cfg, batch, e, kept):
    """Bytes that a block keeps less where its linears keep their inputs in FP8, a byte a number,
    and the scales of kept["fp8"], in float32."""
    if "fp8" not in kept:
        return 0
    scales = {"tensor": lambda rows, columns: 1, "row": lambda rows, columns: rows,
              "tile": lambda rows, columns: rows * math.ceil(columns / 128)}[kept["fp8"]]
    tokens, inputs, inside = batch * cfg.seq, share_of(kept, "inputs"), share_of(kept, "inside")
    of_inputs = part(inputs, tokens, "inputs"), cfg.dim     # of q, k and v together; of up
    of_o = tokens, part(inside, cfg.dim, "inside")
    of_down = tokens, part(inside, cfg.hidden, "inside")
    return sum((e - 1) * rows * columns - 4 * scales(rows, columns)
               for rows, columns in (of_inputs, of_inputs, of_o, of_down))


def norm_is_fused(cfg, kept=()):
    """Whether RMSNorm is one operator: on a CPU only our kernel, which "triton" chooses."""
    return cfg.attention == "triton" or "fused norms" in kept


def norm_bytes(cfg, tokens, e, kept=()):
    """What a norm keeps: its input, and of each token LayerNorm two numbers. RMSNorm has one, and
    where it is no single operator its output before the weight, all in float32."""
    if cfg.gated and norm_is_fused(cfg, kept):
        return e * tokens * cfg.dim + 4 * tokens
    if cfg.gated:
        return max(e, 4) * (2 * tokens * cfg.dim + tokens)
    return e * (tokens * cfg.dim + 2 * tokens)


def copied_input_bytes(cfg, batch, e):
    """Of a block that is computed again, its input, where its first norm keeps another one: RMSNorm
    on a CPU, of 16 bits, keeps that in float32."""
    copied = cfg.gated and e < 4 and not norm_is_fused(cfg)
    return batch * cfg.seq * cfg.dim * e if copied else 0


def shared_bytes(cfg, e, kept):
    """What all blocks keep together: RoPE's tables."""
    if "recompute" in kept:
        return 0
    return part(share_of(kept, "positions"), cfg.seq * cfg.dim // cfg.heads * e, "positions")


def kept_by_modules(cfg: Config, batch: int, e: int, kept: dict, rows: list | None = None,
                    ep: int = 1) -> list[int]:
    """Bytes that each module keeps of a micro-batch of so many sequences, between F and B.

    kept: {class: share}. rows: those that go through this rank's experts, in each block, if its
    MLPs are mixtures; their experts lie on `ep` ranks.
    """
    tokens, wide = batch * cfg.seq, max(e, 4)
    x = tokens * cfg.dim * e                                # one (batch, seq, dim)
    norm = norm_bytes(cfg, tokens, e, kept)

    def share(name, size):
        return part(share_of(kept, name), size, name)

    if kept.get("recompute") == "offload":                  # to the host
        block = [0] * cfg.layers
    elif kept.get("recompute") == "full":                   # the input of every k, from the last
        first = [i == 0 or (cfg.layers - i) % kept.get("every", 1) == 0 for i in range(cfg.layers)]
        block = [share("outside", x) if inputs else 0 for inputs in first]
    else:
        numbers = numbers_kept(cfg, batch, has_mlp=rows is None)     # experts: below
        of_norms = share("outside", numbers["outside"] * e + 2 * (norm - x))
        of_norms += share("inputs", numbers["inputs"] * e)
        kv = part(keys_and_values(cfg, kept), numbers["keys and values"] * e, "keys and values")
        inside = share("inside", numbers["inside"] * e) + kv + core_bytes(cfg, batch, e, kept)
        block = [of_norms + inside - saved_by_fp8(cfg, batch, e, kept)] * cfg.layers
        if rows is not None:                                # the second norm is the mixture's
            block = [of_norms // 2 + inside + mixture_bytes(cfg, batch, e, kept, n, ep)
                     for n in rows]

    ids = share("ids", 8 * tokens)                             # int64
    if kept.get("vocabulary") == "cut":                     # and padded
        columns = math.ceil(round(share_of(kept, "logits") * cfg.vocab, 6))
        loss = tokens * columns * wide + ids + 2 * tokens   # whose targets: two masks
        ids += tokens                                       # whose tokens: a mask
    else:
        loss = share("logits", tokens * cfg.vocab * wide) + wide + ids     # and a scalar
    return [ids, *block, share("outside", norm + x) + loss]


def mixture_bytes(cfg, batch, e, kept, rows, ep):
    """The same of a mixture of experts and of the norm before it."""
    wide = max(e, 4)
    mine = part(share_of(kept, "outside"), batch * cfg.seq, "tokens")   # those that this rank has
    picks = mine * cfg.top_k

    norm = norm_bytes(cfg, mine, e, kept) + mine * cfg.dim * wide   # whose output routes
    weight = cfg.experts * cfg.dim * 4 if e < 4 else 0      # the router's, in float32
    scores = cfg.experts * wide + 8 * cfg.top_k             # of each expert; who is chosen
    if cfg.top_k > 1:
        scores += (cfg.experts + cfg.top_k) * wide          # the same as logits; gates
    route = mine * scores + batch * cfg.experts * wide
    sent = picks * (8 + cfg.dim * e)                        # their order; what comes back
    if cfg.top_k == 1 or e < 4:
        sent += picks * e                                   # gates: not yet counted, cast
    order = 8 if ep > 1 else 0
    of_mlp = (4 if cfg.gated else 2) * cfg.hidden * e       # gate, silu(gate), up, their product
    experts = rows * (cfg.dim * e + of_mlp + order)
    if cfg.shared_expert:                                   # and its input, unless the router's is
        experts += mine * (of_mlp + (cfg.dim * e if e < 4 else 0))
    return norm + weight + route + sent + experts


def activation_bytes(cfg: Config, batch: int, e: int, kept: dict) -> int:
    """Bytes kept at the end of forward, by all modules and by the loss."""
    return sum(kept_by_modules(cfg, batch, e, kept)) + shared_bytes(cfg, e, kept)


# ------------------------------------------------------------------------------------- model states

KINDS = "queries", "keys", "mlp", "norms", "tables"         # of parameters


def numbers_by_modules(cfg):
    """{kind: (numbers, tensors)} of each module; a tied head has no table of its own."""
    h, experts, shared = cfg.dim, getattr(cfg, "experts", 0), getattr(cfg, "shared_expert", False)
    of_mlp, of_norm = (3, 1) if cfg.gated else (2, 2)       # up, down, gate; weight, bias
    block = {"queries": (2 * h * h, 2),                     # q and o
             "keys": (2 * h * h * cfg.kv_heads // cfg.heads, 2),    # k and v
             "mlp": (max(experts, 1) * cfg.mlp(), of_mlp),
             # And what is whole wherever norms are: the router, and a shared expert.
             "norms": (2 * of_norm * h + experts * h + shared * cfg.mlp(),
                       2 * of_norm + (experts > 0) + shared * of_mlp)}
    table = cfg.vocab * h, 1
    last = {"norms": (of_norm * h, of_norm)}
    if not cfg.tie:
        last["tables"] = table
    return [{"tables": table}, *[block] * cfg.layers, last]


def held_by_modules(cfg, shares, modules):
    """The same of those modules that a rank holds, and of its share of each kind. (If the head is
    tied to an embedding on another rank, it has a table, too, of the kind "tied".)"""
    whole, held, last = numbers_by_modules(cfg), [], cfg.layers + 1
    modules = range(last + 1) if modules is None else modules
    apart = cfg.tie and (0 in modules) != (last in modules)
    for module in modules:
        kinds = {kind: (part(shares.get(kind, 1), numbers, kind), tensors)
                 for kind, (numbers, tensors) in whole[module].items()}
        if apart and module in (0, last):
            kinds.pop("tables", None)
            kinds["tied"] = cfg.vocab * cfg.dim, 1
        held.append(kinds)
    return held


def tensors(cfg: Config) -> int:
    """How many parameters the whole model has. (A list of all blocks may be too long.)"""
    embedding, block, head = (sum(tensors for _, tensors in kinds.values())
                              for kinds in numbers_by_modules(replace(cfg, layers=1)))
    return embedding + cfg.layers * block + head


def optimizer_state_bytes(optimizer: str, numbers: int, tensors: int, width: int,
                          matrices: tuple[int, int] = (0, 0)) -> int:
    """AdamW has two moments of `width` bytes for each number, and a step count for each tensor.
    Muon has a momentum for each number of its matrices: (numbers, tensors), among all these."""
    adamw = 2 * width * numbers + 4 * tensors
    muon = adamw - width * matrices[0] - 4 * matrices[1]
    return {"adamw": adamw, "muon": muon, "momentum": width * numbers, "sgd": 0}[optimizer]


def matrices_of_blocks(cfg: Config) -> tuple[int, int]:
    """Those that Muon updates: all numbers and tensors but tables and gains of norms."""
    norms = (2 * cfg.layers + 1) * (1 if cfg.gated else 2)
    tables = 1 if cfg.tie else 2
    others = norms * cfg.dim + tables * cfg.vocab * cfg.dim
    return cfg.parameters() - others, tensors(cfg) - norms - tables


def state_bytes(args: argparse.Namespace, answer: dict, width: int) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states on a rank, after a step, by the names of
    the report. answer: what a chapter's `formulas` gave; width: bytes of a number in --dtype."""
    if answer.get("zero"):
        return sharded_state_bytes(args, answer, width)
    numbers, count = answer["parameters"], None
    if isinstance(numbers, dict):
        modules = held_by_modules(args.model, numbers, answer.get("modules"))
        kinds = list(itertools.chain(*(module.values() for module in modules)))
        numbers, count = sum(size for size, _ in kinds), sum(count for _, count in kinds)
    of_master = width if args.precision == "bf16" else 0
    of_parameter, of_gradient, of_master = answer.get(
        "widths", (rounded(args).itemsize, width, of_master))
    moments = answer.get("moments") or optimizer_state_bytes(
        args.optimizer, numbers, count or tensors(args.model), of_master or width)
    return {"parameters": answer.get("versions", 1) * of_parameter * numbers,
            "gradients": of_gradient * numbers,
            "optimizer states": of_master * numbers + moments}


def flat_units(cfg, answer):
    """(numbers, ranks that share them, who they are) of each flat unit: a module's parameters that
    the same ranks hold. Where nobody is named, those are kinds that are cut into as many parts."""
    shares, holders, names = (answer.get(key, {}) for key in ("parameters", "holders", "gradients"))
    units, k = [], answer.get("blocks", 1)                 # more than one in chapter 03 alone
    modules = held_by_modules(cfg, shares, answer.get("modules"))
    ends = [*range(1, len(modules) - 1, k), len(modules) - 1] if k > 1 else range(len(modules))
    for start, end in zip([0, *ends], [*ends, len(modules)]):
        sizes = {}
        for kind, (numbers, _) in itertools.chain(*(held.items() for held in modules[start:end])):
            n = holders if isinstance(holders, int) else holders[kind]
            key = names.get(kind, shares.get(kind, 1)), n
            size, *_ = sizes.get(key, (0, n))
            sizes[key] = size + numbers, n, names.get(kind)
        units += sizes.values()
    return units


def gradient_traffic(cfg: Config, answer: dict, e: int, sums: int) -> dict:
    """What a rank sends in a step for gradients and, under ZeRO, parameters, to those who hold the
    same parts: {name of the group: {op: (calls, payload, wire)}}. e, sums: bytes of a number of
    parameters, and of summed gradients.

    Without ZeRO an all_reduce for each unit, or of all, if they are few; else a reduce_scatter,
    answer["reduces"] times (once if it waits for another stage: a tied table's), and an all_gather,
    answer["gathers"] times.
    """
    by_group, sent = {}, {}
    for size, n, name in flat_units(cfg, answer):
        by_group.setdefault((name, n), []).append(size)
    for (name, n), sizes in by_group.items():
        share, calls = (n - 1) / n, len(sizes)
        if answer.get("zero"):
            is_tied = name == answer["gradients"].get("tied")
            reduces, gathers = 1 if is_tied else answer["reduces"], answer["gathers"]
            padded = sum(-(-size // n) * n for size in sizes)
            reduced, gathered = reduces * sums * padded, gathers * e * padded
            sent[name] = {"reduce_scatter": (reduces * calls, reduced, share * reduced),
                          "all_gather": (gathers * calls, gathered, share * gathered)}
        elif n > 1:
            size = sum(sizes) * sums
            few = sum(size for size, *_ in flat_units(cfg, answer)) <= common.ONE_BUCKET
            sent[name] = {"all_reduce": (1 if few else calls, size, 2 * share * size)}
    return sent


def sharded_state_bytes(args, answer, width):
    """The same of flat units under ZeRO."""
    stage, e = answer["zero"], rounded(args).itemsize
    has_masters = args.precision == "bf16" or getattr(args, "offload", False)

    units = flat_units(args.model, answer)
    shard = sum(-(-size // n) for size, n, _ in units)
    whole = sum(-(-size // n) * n for size, n, _ in units)     # with its padding
    *_, (head, n, _) = units                            # has none: its backward comes at once
    blocks = whole - -(-head // n) * n
    secondary = blocks // answer["secondary"] if answer.get("secondary") else 0
    masters = width * shard if has_masters else 0
    moments = answer.get("moments") or optimizer_state_bytes(args.optimizer, shard, len(units),
                                                             width)
    parameters = shard if stage == 3 else whole
    gradients = whole if stage == 1 else shard
    return {"parameters": e * (parameters + secondary), "gradients": width * gradients,
            "optimizer states": masters + moments}
