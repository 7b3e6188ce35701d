"""Predictions about chapter 10: a layout, since it runs nothing."""

from dataclasses import replace

from lab import chapters
from lab.chapters.question import Question


class Planned:
    """As a Case, a layout that nobody has planned: on H100s, with ZeRO-1, micro-batches of one
    sequence, of which a rank has m, and full recomputation."""

    says = "What the planner says"
    name, e = "10_planner", 2

    def __init__(self, model, dp, tp, pp, v, m):
        self.chapter = chapters.chapter("10")
        self.model, self.cluster = self.chapter.MODELS[model], self.chapter.CLUSTERS["h100"]
        self.software = self.chapter.SOFTWARE["megatron-2024"]      # the planner's defaults
        self.ranks, self.batch, self.micro_batches = dp * tp * pp, dp * m, m
        self.layout = self.chapter.Layout(dp, tp, pp=pp, v=v, zero=1, recompute="full")
        flags = {"model": model, "gpus": self.ranks, "batch": self.batch, "tp": tp, "pp": pp,
                 "v": v, "cp": 1, "micro-batch": 1, "zero": 1, "recompute": "full"}
        self.command = " ".join(["python 10_planner.py",
                                 *[f"--{flag} {value}" for flag, value in flags.items()]])
        self.sizes = {"G": self.ranks, "Ψ": self.model.parameters(), "R": self.cluster.memory,
                      "L": self.model.layers, "h": self.model.dim, "tp": tp, "pp": pp, "v": v,
                      "M": m}

    def plan(self, layout, batch):
        gpus = layout.dp * layout.tp * layout.pp
        return self.chapter.Plan(self.model, layout, self.cluster, self.software, gpus, batch)

    def states(self, **layout):
        """Bytes of weights, gradients and optimizer states on a GPU of another layout."""
        memory = self.plan(self.chapter.Layout(**layout), layout["dp"]).memory
        return sum(memory[cause] for cause in ("weights", "gradients", "optimizer"))


def predictions(pick):
    name, tp, pp = pick(("8b", 2, 4), ("8b", 4, 2), ("70b", 8, 4), ("70b", 8, 8), ("gpt3", 8, 8),
                        ("405b", 8, 16))
    case = Planned(name, pick(8, 16, 32), tp, pp, pick(1, 2), pp * pick(1, 2, 4))
    chapter, layout, stage = case.chapter, case.layout, pick(1, 2)
    twice = replace(layout, dp=layout.dp // 2, tp=2 * tp)

    def tp_sends(layout):
        """Numbers that a GPU sends over tp in a layer's forward, of a step's micro-batches."""
        numbers, n, *_ = chapter.messages(case.model, layout)["tp"]
        return case.batch // layout.dp * (n - 1) / n * numbers

    longer = replace(case.model, seq=131072)
    flops = {scores: chapter.step_flops(longer, 1, scores) for scores in ("all", "causal")}
    case.sizes |= {"s": longer.seq, "Ψ_matmul": longer.layers * longer.weights(longer.top_k)
                   + longer.vocab * longer.dim}
    whole, cut = {1: ("(2 + 4)", "12"), 2: ("2", "(4 + 12)")}[stage]
    return case, [
        Question(
            f"With dp alone on all GPUs, and ZeRO-{stage}: how many bytes of weights, gradients "
            "and AdamW's states would a GPU have?", f"{whole} * Ψ + {cut} * Ψ/G",
            case.states(dp=case.ranks, zero=stage), "B",
            "a parameter has 2 bytes of weights, 4 of gradients, and 12 of a master weight and two "
            "moments; ZeRO-1 shards the last, ZeRO-2 the last two. An H100 has 80 GB", also="pp"),
        Question(
            "How many times the memory of one H100 do all weights, gradients and AdamW's states "
            "take, if each of them is kept once?", "(2 + 4 + 12) * Ψ / R",
            case.states(dp=1) / case.cluster.memory, "times",
            "so many GPUs are needed at the least, however they share the model, and activations "
            "come on top", also="G"),
        Question(
            "How large is the bubble of 1f1b (interleaved, if v > 1), as a share of the time that "
            "a stage takes for its micro-batches, if all stages take as long?", "(pp-1) / v / M",
            chapter.bubble(layout, 1, 1, 1) / (3 * case.micro_batches), "%",
            "(pp-1)/v times the time of a micro-batch on a stage: until the first has arrived and "
            "the last has returned", also="tp"),
        Question(
            "Twice the tp on as many GPUs, so half the dp, and the same batch: by what factor do "
            "the bytes that a GPU sends over tp in a step change?",
            "2 * (2*tp-1)/(2*tp) / ((tp-1)/tp)", tp_sends(twice) / tp_sends(layout), "times",
            "half as many replicas have twice as many micro-batches each, and in each of them a "
            "GPU sends all of the same activations but its own part", also="pp"),
        Question(
            "MFU by Megatron's convention counts all scores of attention, by Llama 3's only the "
            "causal half. How many times as large is the first one for the same run, with "
            "sequences of 131,072 tokens?",
            "(6*Ψ_matmul + 12*L*s*h) / (6*Ψ_matmul + 6*L*s*h)", flops["all"] / flops["causal"],
            "times", "of a token: 6 FLOPs for each parameter that multiplies, and 12·s·h in each "
            "layer for scores, or half of that", also="G"),
    ]  # fmt: skip
