"""Rooflines: from how many tokens on a chip computes longer than it sends.

Messages that hide behind compute cost nothing, as long as they take less time. So a layer takes the
longer of the two, and a layout is judged by where the two lines cross. A layer has P weights; tp
gathers and scatters S numbers of a token around it. B tokens are shared by N = X·Y chips of C
FLOP/s: X ranks of dp or ZeRO-3, and Y of tp in each. Links carry W bytes/s, and a ring that spans M
axes of a torus has M times as much. A number has 2 bytes. Forward then takes

    compute     2·B·P / (N·C)           backward: twice as long
    dp          nothing                 backward: gradients, all-reduced, 4·P / (Y·W·M_X)
    zero-3      2·P / (Y·W·M_X)         weights, gathered; backward: again, and gradients scattered
    tp          2·B·S / (X·W·M_Y)       backward: as much

The scaling book's layer is two matrices, D to F and back: P = 2·D·F, S = 2·D, and P/S = F. A whole
layer, with attention and a gated MLP, has more of both: P/S of the 70b is 26,112, and its F 28,672.
The two lines cross where

    dp, zero-3  B/N = C / (W·M_X)       tokens of a chip, whatever the model
    tp          Y = M_Y·(P/S)·W / C     ranks, whatever the batch
    both        B/N = (C/W)² / (M_X·M_Y·P/S): tp, as wide as it may be, divides ZeRO-3's messages

A roofline is the planner without the time that bytes take through HBM and messages through their
hops, and without attention's scores; and it takes (n-1)/n for 1. `planned` has all of them, for the
same layer: it says how much of the roof is left.

ten: chapter 10's module. Source: Austin et al., How To Scale Your Model (2025), part 5.
"""

import math
from dataclasses import replace
from typing import NamedTuple

TORUS = {"tpu-v5p": 3}          # axes of a cluster's mesh; others have a switch
TOKENS = [round(2**(k / 2)) for k in range(8, 33)]      # of a chip: 16 to 65,536
STRATEGIES = "zero-3", "tp", "both"
STATES = 10                     # bytes of a parameter: 2 of weights, 8 of AdamW's moments


class Layer(NamedTuple):
    weights: int                # P
    sent: int                   # S: numbers of a token, which tp gathers and scatters in forward


# ---------------------------------------------------------------------- where the two lines cross

def tokens_of_data_parallel(flops, bandwidth):
    """Tokens of a chip below which dp or ZeRO-3 wait: 8·D·F bytes of a layer's messages take longer
    than the 8·D·F·tokens FLOPs of its backward. Between pods: tokens of a pod, with the bandwidth
    at which one chip leaves it."""
    return flops / bandwidth


def largest_tensor_parallel(ffn, flops, bandwidth):
    """The degree from which on tp waits: messages of 4·B·D bytes for 4·B·D·F/tp FLOPs."""
    return ffn * bandwidth / flops


def best_data_parallel(tokens, chips, ffn, axes=(2, 1)):
    """How many of the chips ZeRO-3 should have, and tp the others: both send equally long then.
    axes: of the torus, that each of the two has."""
    return math.sqrt(tokens / ffn * axes[0] / axes[1] * chips)


def tokens_of_both(ffn, flops, bandwidth, axes=(2, 1)):
    """Tokens of a chip below which ZeRO-3 and tp, at their best, wait together."""
    return (flops / bandwidth) ** 2 / (math.prod(axes) * ffn)


def sending_over_computing(tokens, n, dim, layers, flops, bandwidth):
    """The playbook's A3, of layers with 16·dim² weights: {axis of n ranks: seconds of its messages
    over those of the compute that could hide them}. tokens: of a rank. layers: of a stage."""
    ratio = flops / bandwidth           # of numbers of 2 bytes; of 1 in A3, but for dp's: half
    return {"dp": (n - 1) / n * ratio / tokens,         # gradients, behind backward
            "zero-3": (n - 1) / n * ratio / tokens,     # a layer's weights, behind forward
            "tp": (n - 1) / dim * ratio,                # a gather, behind the next matrix
            "pp": ratio / (16 * dim * layers)}          # a message, behind the next stage


def training_seconds(tokens, parameters, chips, peak, share):
    """At a share of the peak: 6 FLOPs of a parameter and token."""
    return 6 * tokens * parameters / (chips * peak * share)


# ------------------------------------------------------------------------------------ the two lines

def mlp(dim, ffn):
    """The scaling book's layer."""
    return Layer(2 * dim * ffn, 2 * dim)


def layer_of(ten, model):
    """A layer of a model without experts, as the planner counts it: all of its matrices."""
    one = ten.Layout(micro_batch=1 / model.seq)         # of a token
    return Layer(model.weights(1), round(ten.messages(model, one)["tp"][0]))


def flops(layer, tokens, dp=1, tp=1):
    """FLOPs of a chip in a layer: forward, backward."""
    forward = 2 * tokens * layer.weights / (dp * tp)
    return forward, 2 * forward


def bytes_sent(strategy, layer, tokens, dp=1, tp=1, width=2):
    """Bytes that pass a chip in a layer: forward, backward. An all_reduce counts as the two that it
    is made of. tokens: of the batch. width: of a number."""
    weights, rows = width * layer.weights / tp, width * tokens * layer.sent / dp
    return {"dp": (0, 2 * weights), "zero-3": (weights, 2 * weights), "tp": (rows, rows),
            "both": (weights + rows, 2 * weights + rows)}[strategy]


def seconds(layer, tokens, dp, tp, peak, links):
    """{what: seconds} of forward. peak: FLOP/s of a chip. links: bytes/s of the rings of ZeRO-3,
    and of tp's, which go along other axes. One rank alone sends nothing."""
    weights, _ = bytes_sent("zero-3", layer, tokens, dp, tp)
    rows, _ = bytes_sent("tp", layer, tokens, dp, tp)
    return {"compute": flops(layer, tokens, dp, tp)[0] / peak,
            "zero-3": weights / links[0] if dp > 1 else 0,
            "tp": rows / links[1] if tp > 1 else 0}


def messages(times):
    """Those of both axes, which go beside each other."""
    return max(times["zero-3"], times["tp"])


def splits(chips):
    """[(dp, tp)] of so many chips."""
    return [(chips // tp, tp) for tp in range(1, chips + 1) if chips % tp == 0]


def fastest_split(times_of, chips):
    """The (dp, tp) whose messages take least: all are tried. times_of(dp, tp): their `seconds`. The
    formula is `best_data_parallel`, whose numbers need not divide."""
    return min(splits(chips), key=lambda split: messages(times_of(*split)))


def crossing(times_of, highest=2**24):
    """Tokens of a chip from which on compute takes longer than messages, found by halving what is
    left of 1 to `highest`; 0: it always does; inf: never. times_of(tokens): as `seconds`."""
    def waits(tokens):
        times = times_of(tokens)
        return times["compute"] < messages(times)

    low, high = 1, highest
    if waits(high) or not waits(low):
        return math.inf if waits(high) else 0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if waits(middle) else (low, middle)
    return high


# ---------------------------------------------------------------------------- of a cluster we know

class Roof:
    """A layer of a model on chips of a cluster, by data sheets. axes: of a torus, that dp or ZeRO-3
    and tp have."""

    def __init__(self, ten, model, cluster, axes=(1, 1)):
        self.ten, self.model, self.cluster, self.axes = ten, model, cluster, axes
        self.layer = layer_of(ten, model)
        self.sheet = ten.Machine(by_data_sheet(ten, cluster), ten.Software())

    def links(self, dp, tp):
        """bytes/s of ZeRO-3's rings, and of tp's, whose ranks are neighbours."""
        return self.axes[0] * self.sheet.links(dp, tp), self.axes[1] * self.sheet.links(tp, 1)

    def seconds(self, tokens, dp, tp):
        """{what: seconds} of a layer's forward. tokens: of the batch."""
        return seconds(self.layer, tokens, dp, tp, self.sheet.flops, self.links(dp, tp))

    def planned(self, tokens, dp, tp):
        """The same as the planner has it, with HBM, hops, attention and the rates that are
        reached; None where tp does not divide the heads."""
        ten, model = self.ten, self.model
        if model.heads % tp:
            return None
        layout = ten.Layout(dp, tp, micro_batch=tokens / dp / model.seq, zero=3)
        machine = ten.Machine(self.cluster, ten.SOFTWARE["megatron-2024"])
        forward, _ = ten.layer_seconds(model, layout, machine)
        numbers, n, stride, calls = ten.messages(model, layout)["tp"]
        weights = 2 * self.layer.weights / tp
        return {"compute": sum(forward[cause] for cause in ("matmul", "attention", "elementwise")),
                "zero-3": machine.ring(weights / self.axes[0], dp, tp),
                "tp": machine.ring(2 * numbers / self.axes[1], n, stride, calls)}

    def least_tokens(self, dp, tp):
        """Tokens of a chip from which on a layout computes longer than it sends; inf: it never
        does, since tp waits at every batch."""
        links, peak = self.links(dp, tp), self.sheet.flops
        widest = largest_tensor_parallel(self.layer.weights / self.layer.sent, peak, links[1])
        if tp > max(1, widest):
            return math.inf
        return tokens_of_data_parallel(peak, tp * links[0]) if dp > 1 else 0

    def split(self, strategy, chips, tokens):
        """(dp, tp) of a strategy, of a batch of so many tokens."""
        if strategy == "both":
            return fastest_split(lambda dp, tp: self.seconds(tokens, dp, tp), chips)
        return (1, chips) if strategy == "tp" else (chips, 1)

    def best(self, strategy, chips):
        """(tokens of a chip, (dp, tp)) of the layout that waits last as batches shrink; of several,
        the one with the least tp."""
        tried = splits(chips) if strategy == "both" else [self.split(strategy, chips, 0)]
        least = min(self.least_tokens(*split) for split in tried)
        last = [split for split in tried if self.least_tokens(*split) <= (1 + 1e-9) * least]
        return least, last[0]

    def planned_from(self, dp, tp):
        """Tokens of a chip from which on the planner has compute longer, too; None where it has no
        such layout."""
        if self.model.heads % tp:
            return None
        return crossing(lambda tokens: self.planned(tokens * dp * tp, dp, tp))

    def lines(self, strategy, chips):
        """What is to be drawn over TOKENS of a chip: of each the split, the `seconds` of a layer's
        forward, and the planner's."""
        splits = [self.split(strategy, chips, tokens * chips) for tokens in TOKENS]
        asked = [(tokens * chips, *split) for tokens, split in zip(TOKENS, splits)]
        return {"tokens": TOKENS, "splits": splits, "roof": [self.seconds(*one) for one in asked],
                "planned": [self.planned(*one) for one in asked]}


def in_words(roof, strategy, chips, chip="chip"):
    """From which batch on a strategy computes longer than it sends: the end of a sentence."""
    least, (dp, tp) = roof.best(strategy, chips)
    if strategy == "tp":
        _, bandwidth = roof.links(dp, tp)
        widest = largest_tensor_parallel(roof.layer.weights / roof.layer.sent, roof.sheet.flops,
                                         bandwidth)
        verdict = "messages take longer than compute"
        if tp <= widest:
            verdict = "compute takes longer than messages"
        return f"{verdict} at every batch: up to {widest:.1f} ranks hide them"
    words = "compute takes longer than messages "
    if least:
        words += f"from {least:,.0f} tokens of a {chip} on, {least * chips:,.0f} of a step"
    else:
        words += "at every batch"
    if strategy != "both":
        return words
    if min(dp, tp) > 1:
        return f"{words}, with ZeRO-3 over {dp} and tp over {tp}"
    if dp > 1:
        return f"{words}, with ZeRO-3 alone: tp would not change that"
    return f"{words}, with tp alone"


def by_data_sheet(ten, cluster):
    """The cluster, if matmuls and links reached what their makers say, HBM were no limit, and a
    message had no time of its own."""
    return replace(cluster, matmul=1, hbm=math.inf, nvlink=cluster.nvlink / ten.NVLINK,
                   nic=cluster.nic / ten.NIC, alpha=0, nic_alpha=0)
