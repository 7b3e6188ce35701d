"""What chapters 06 and 09 are held to beside all: FLOPs of attention, and who works most.

Of formulas()["contexts"] in 06: layout, of the metered step; parts of its sequences around a ring;
make, which lays a step out; core, of its blocks; inner, how many ranks exchange heads. In 09:
blocks, of each run its queries, and where its keys begin and end; passes of a micro-batch through a
block; parts; and runs_of(part, parts, starts).
"""

import copy

import torch

from lab.run.instrument import Instrument
from lab.run.words import count

MATMULS = 7             # two forward; four backward, and one that computes scores again


def pairs_of(blocks):
    """How many pairs of a query and a key a core computes that takes blocks as they are."""
    return sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, *_ in blocks)


def attention_flops(cfg, batch, pairs, inner=1, recompute="none"):
    """FLOPs of a layer's attention on a rank, as PyTorch counts them; with `recompute`, the two of
    forward again."""
    matmuls = MATMULS + (0 if recompute == "none" else 2)
    return matmuls * 2 * batch * cfg.dim // inner * pairs


def gathered_flops(args, about):
    """FLOPs of a step's attention where autograd has it: six matmuls if scores are kept, which the
    plain core does. Of that alone, the last matmul is not computed again: nobody reads it."""
    pairs = [rows * (end - begin) for rows, begin, end in about["blocks"]]
    is_plain, again = args.model.attention == "plain", 0 if args.recompute == "none" else 2
    computed = ((MATMULS - is_plain) + again) * sum(pairs)
    if is_plain and args.recompute == "selective":
        computed -= pairs[-1]
    return about["passes"] * 2 * args.micro_batch * args.model.dim // args.tp * computed


def flops(run, about):
    """Of a step; None where PyTorch's counter does not see our kernels."""
    args = run.args
    if "blocks" in about:
        return gathered_flops(args, about)
    if args.kernels:
        return None
    pairs = sum(map(pairs_of, about["layout"].blocks))
    of_a_layer = attention_flops(args.model, args.micro_batch, pairs, about["inner"],
                                 args.recompute)
    return args.batch // args.micro_batch * args.model.layers * of_a_layer


def conditions(attention, sent):
    """What `overlap` is in formulas(): of each operator that attention sends by, the time that it
    takes, over that of attention's FLOPs."""
    def over_attention(op, flops, bandwidth):
        _, _, wire = sent[op]
        return wire / bandwidth / (attention / flops)

    ops = [op for op in ("send", "all_gather", "all_to_all") if op in sent]
    return {(op, "attention"): lambda *rates, op=op: over_attention(op, *rates) for op in ops}


def work(layout: object) -> list[int]:
    """How many pairs of a query and a key that it sees each part of the sequences has."""
    return [int((mine - layout.first[mine] + 1).sum()) for mine in layout.positions]


def imbalance(layout: object) -> float:
    """The work of the busiest part of a chapter 06's Layout over the mean of what is not padding:
    a token of a document is seen by the later ones, wherever its padding lies."""
    of_parts, token = work(layout), layout.source >= 0
    real = (torch.arange(len(token)) - layout.first + 1)[token].sum().item()
    return max(of_parts) * len(of_parts) / real


def hops_of(variant: str, parts: int, starts: torch.Tensor, window: int | None) -> int:
    """From how many hops away at the most a part of the sequence needs keys: chunk by chunk (of
    which a part has two in a zig-zag of the sequence) from what a token sees up to itself."""
    chunks = 2 * parts if variant == "zigzag" else parts
    chunk = torch.arange(len(starts)) * chunks // len(starts)
    first = starts.maximum(torch.arange(len(starts)) - (window or len(starts)) + 1)
    owner = [min(i, chunks - 1 - i) if variant == "zigzag" else i for i in range(chunks)]
    seen = set(zip(chunk[first].tolist(), chunk.tolist()))
    return max((owner[last] - owner[between]) % parts
               for begin, last in seen for between in range(begin, last + 1))


def hold_hops(run, about):
    """The hops of a ring beside those that the documents of the step ask for: it is in the report
    only if they are not the same."""
    args, layout = run.args, about["layout"]
    if args.variant in ("zigzag", "ring"):
        variant = "ring" if args.cut == "document" else args.variant
        starts = layout.starts
        expected = hops_of(variant, about["parts"], starts, args.window)
        if args.cut == "document":                      # each lies on all of them
            expected = about["parts"] - 1 if args.window != 1 and len(starts) > 1 else 0
        found = len(layout.blocks) - 1
        if found != expected:
            run.judge(("sent", "send", "hops"), found, expected)


def explain(run, about):
    """Notes about kernels, hops and balance, and what the runs are drawn from."""
    if "blocks" in about:
        return explain_gathered(run, about)
    args, layout, parts = run.args, about["layout"], about["parts"]
    if args.kernels and "kernels" not in about["core"].forward.__module__:
        run.note("--kernels: no GPU, or no Triton, for them here; attention is PyTorch's")
    hops = len(layout.blocks) - 1
    if parts > 1 and args.variant in ("zigzag", "ring") and hops < parts - 1:
        run.note(f"{count(hops, 'hop')} of {parts - 1}: from further away no rank needs keys")
    if args.documents and parts > 1:
        starts = run.text.starts(args.steps - 1)
        both = {cut: about["make"](with_cut(args, cut), 0, parts, starts)
                for cut in ("sequence", "document")}
        padding = len(both["document"].starts) / len(starts) - 1
        run.note(f"work of the busiest rank over the mean, in the last step: "
                 f"{imbalance(both['sequence']):.2f} if the sequence is cut, "
                 f"{imbalance(both['document']):.2f} if each document is cut in a zig-zag (with "
                 f"{padding:.0%} of padding)")
    run.record(documents={"starts": layout.starts.tolist(), "first": layout.first.tolist(),
                          "positions": [part.tolist() for part in layout.positions],
                          "work": work(layout)})


def explain_gathered(run, about):
    if run.args.documents and about["parts"] > 1:
        starts, parts = run.text.starts(run.args.steps - 1), about["parts"]
        of_parts = [sum(int((mine - starts[mine] + 1).sum()) for mine in about["runs_of"](
            part, parts, starts)) for part in range(parts)]
        run.note(f"work of the busiest rank of cp over the mean, in the last step: "
                 f"{max(of_parts) * parts / sum(of_parts):.2f}")


def with_cut(args, cut):
    """The same flags with another --cut; a plain ring cuts no document."""
    other = copy.copy(args)
    other.cut, other.variant = cut, "zigzag" if cut == "document" else args.variant
    return other


class Held(Instrument):
    """Of chapters 06 and 09."""

    def flops(self, run, answer):
        about = answer.get("contexts")
        if about and "layout" in about:
            hold_hops(run, about)
        return {"attention": flops(run, about)} if about else {}

    def overlap(self, run, answer, sent):
        is_of_06 = "layout" in answer.get("contexts", {})
        attention = run.flops_of.get("attention")
        return conditions(attention, sent) if is_of_06 and attention else {}

    def explain(self, run, answer):
        if "contexts" in answer:
            explain(run, answer["contexts"])
