"""The lecture: the formulas of its slides, and what they claim without a number, as questions.

It sets no exercise. Where a slide says that something is much larger, slow, or balanced, a question
asks by how much.
"""

from dataclasses import replace

import torch

import common
from lab.bench.machines import MACHINES
from lab.chapters import chapter
from lab.classroom.questions import Case
from lab.sources import worked
from lab.sources.asked import Asked
from lab.sources.row import Row
from lab.sources.worked import LLAMA_7B, ten

GPT3 = "gpt3"
WIDTH, LAYERS, WORDS = 12288, 96, 51200         # h, L and V of GPT-3
COLLECTIVES = (("17", "broadcast"), ("17", "reduce"), ("17", "all_reduce_ring"), ("18", "gather"),
               ("18", "all_gather"), ("18", "scatter"), ("18", "reduce_scatter"),
               ("19", "all_to_all"))


def numbers(*kinds):
    """Weights of a layer of GPT-3, of these kinds of matrices."""
    matrices = ten().MODELS[GPT3].matrices(1)
    return sum(matrices[kind] for kind in kinds)


def table():
    """What a vocabulary twice as large adds to GPT-3's parameters."""
    model = ten().MODELS[GPT3]
    return replace(model, vocab=2 * model.vocab).parameters() - model.parameters()


def normed():
    """What a LayerNorm makes of tokens of some mean and deviation."""
    generator = torch.Generator().manual_seed(0)
    x = 3 + 5 * torch.randn(1, 8, 64, generator=generator)
    with torch.no_grad():
        return common.NORMS[False](64)(x)


def weights_of_a_query():
    """The sum of the softmax of its scores: attention to values that are all 1."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 8, 4, generator=generator)
    return common.plain_attention(q, k, torch.ones_like(k)).mean().item()


def loss(words=256, tokens=16):
    """The mean cross-entropy of tokens, where all words are equally likely."""
    logits, targets = torch.zeros(1, tokens, words), torch.zeros(1, tokens, dtype=torch.int64)
    return common.loss_sum(logits, targets).item() / tokens


def change_of_earlier_tokens():
    """The largest change of all outputs but the last, where the last token's key and value
    change."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64, generator=generator)
    others = [torch.cat([x[..., :-1, :], 1 + x[..., -1:, :]], dim=-2) for x in (k, v)]
    before, now = common.plain_attention(q, k, v), common.plain_attention(q, *others)
    return (now - before)[..., :-1, :].abs().max().item()


def activations(batch, seq=2048, part="all"):
    """Bytes of a layer of GPT-3, whole, in 16 bits; or of its scores."""
    plan = ten()
    model, software = replace(plan.MODELS[GPT3], seq=seq), plan.SOFTWARE["megatron-2021"]
    whole, rest = (plan.kept_by_layer(model, plan.Layout(micro_batch=batch, recompute=how),
                                      software) for how in ("none", "selective"))
    return whole if part == "all" else whole - rest


def all_activations(batch, **more):
    """Bytes of all layers of GPT-3."""
    return LAYERS * worked.kept(GPT3, "megatron-2021", micro_batch=batch, **more)


def work_of_rank(variant, rank):
    """Pairs of a query and a key that one of 4 ranks computes, of a causal mask."""
    return chapter("06").pairs(variant, rank, 4, 4096, diagonal=0.5)


def calls_of_forward():
    """Exchanges of rows in the forward of a layer of experts, as chapter 10 counts them."""
    return ten().messages(ten().MODELS["mixtral"], ten().Layout(ep=8))["ep"][3]


def stage_over_tensor():
    """Bytes that a stage of 12 layers of GPT-3 sends to the next, over those that tp 8 sends in
    these layers: of a micro-batch, forward."""
    plan = ten()
    sent, n, *_ = plan.messages(plan.MODELS[GPT3], plan.Layout(tp=8))["tp"]
    return worked.message(2048, WIDTH) / (12 * 2 * sent * (n - 1) / n)


def micro_batches(batch, micro_batch):
    """Of each of 4 ranks in a step of chapter 02."""
    return Case("02_data_parallel", 4, batch=batch, micro_batch=micro_batch).micro_batches


ROWS = (
    # 4 to 12: the Transformer
    Row("4", "parameters of the embedding, V · h, GPT-3", WORDS * WIDTH, table, "",
        by="10_planner.Model"),
    Row("5", "parameters of a LayerNorm, 2h", 2 * WIDTH, lambda: ten().MODELS[GPT3].norm, "",
        by="10_planner.Model"),
    Row("5", "the mean of a token that a LayerNorm gives, γ = 1 and β = 0", 0,
        lambda: normed().mean(-1).abs().max().item(), "", 1e-6, "common.NORMS"),
    Row("5", "its variance", 1, lambda: normed().var(-1, unbiased=False).mean().item(), "", 1e-4,
        "common.NORMS"),
    Row("7", "parameters of queries, keys and values, 3h²", 3 * WIDTH**2,
        lambda: numbers("queries", "keys") * 3 / 4, "", by="10_planner.Model"),
    Row("8", "the softmax of a query's scores, added up", 1, weights_of_a_query, "", 1e-6,
        "common.plain_attention"),
    Row("8", "scores of twice the sequence: s²", 4,
        lambda: activations(1, 4096, "scores") / activations(1, 2048, "scores"), "times",
        by="10_planner.kept_by_layer"),
    Row("9", "parameters of attention, 4h²", 4 * WIDTH**2, lambda: numbers("queries", "keys"), "",
        by="10_planner.Model"),
    Row("10", "parameters of an MLP, 8h²", 8 * WIDTH**2, lambda: numbers("mlp"), "",
        by="10_planner.Model"),
    Row("11", "the loss of 256 words that are equally likely, ln 256", 5.545, loss, "", 0.0005,
        by="common.loss_sum"),
    Row("11", "parameters in all, about V h + 12 L h²", WORDS * WIDTH + 12 * LAYERS * WIDTH**2,
        lambda: ten().MODELS[GPT3].parameters(), "", within=0.001, by="10_planner.Model"),
    Row("12", "what a later token changes in earlier ones, under a causal mask", 0,
        change_of_earlier_tokens, "", by="common.plain_attention"),
    # 14 and 15: memory
    Row("14", "activations of twice the batch", 2, lambda: activations(2) / activations(1),
        "times", by="10_planner.kept_by_layer"),
    Row("14", "activations of all layers of GPT-3, a sequence of 2,048 tokens", None,
        lambda: all_activations(1), "B", by="10_planner.kept_by_layer"),
    Row("15", "what recomputation leaves of them", None,
        lambda: all_activations(1, recompute="full") / all_activations(1), "%",
        by="10_planner.kept_by_layer"),
    Row("15", "FLOPs it adds: about one forward of three", 1 / 3,
        lambda: worked.recomputed("full"), "%", 0.01, by="01_single_gpu.step_flops"),
    # 17 to 19: collectives
    *(Row(slide, f"{name.removesuffix('_ring')} of 1,000 bytes on 8 workers: all of them send",
          None, lambda name=name: chapter("00").sent(name, 8, 1000), "B", by="00_collectives.sent")
      for slide, name in COLLECTIVES),
    Row("19", "a barrier of 8 workers, in messages of a byte", None,
        lambda: chapter("00").sent("barrier", 8, 0), "B", by="00_collectives.sent"),
    # 20 to 28: data parallelism, ZeRO
    Row("21", "the all_reduce of twice the parameters", 2,
        lambda: chapter("02").wire_bytes(2, 8) / chapter("02").wire_bytes(1, 8), "times",
        by="02_data_parallel.wire_bytes"),
    Row("22", "FLOPs of 4 micro-batches, over those of a batch as large", 4,
        lambda: 4 * chapter("01").step_flops(LLAMA_7B, 1, "plain", "none")
        / chapter("01").step_flops(LLAMA_7B, 4, "plain", "none"), "times",
        by="01_single_gpu.step_flops", why="It takes 4 times as long as a micro-batch, and no "
        "longer than the whole batch would, if that fitted."),
    Row("23", "Adam's moments over parameters, all in fp32", 2,
        lambda: chapter("03").held(1, 1, 1)[2] / chapter("03").held(1, 1, 1)[0], "times",
        by="03_zero.held"),
    Row("23", "model states with twice the workers, under data parallelism", 1,
        lambda: worked.states(0, 16) / worked.states(0, 8), "times", by="03_zero.held"),
    Row("25", "ZeRO-1's reduce_scatter and all_gather over an all_reduce", 1,
        lambda: worked.sent_in_zero(1, 8) / chapter("02").wire_bytes(1, 8), "times", 1e-6,
        by="03_zero.traffic"),
    Row("26", "ZeRO-2's messages over ZeRO-1's, one micro-batch", 1,
        lambda: worked.sent_in_zero(2, 8) / worked.sent_in_zero(1, 8), "times",
        by="03_zero.traffic"),
    Row("27", "ZeRO-3's states on 64 workers, over all: 1/N", 1 / 64,
        lambda: worked.states(3, 64) / worked.states(0, 64), "times", by="03_zero.held"),
    *(Row("28", f"states of 7.5 billion parameters, ZeRO-{stage} on 64 workers", None,
          lambda stage=stage: 7.5e9 * worked.states(stage, 64), "B", by="03_zero.held")
      for stage in range(4)),
    # 29 to 34: tensor, sequence and context parallelism
    *(Row("29", f"a product by {cut} of A: the difference", 0,
          lambda cut=cut: worked.off_by(f"matmul_by_{cut}"), "", 1e-12,
          f"04_tensor_parallel.matmul_by_{cut}") for cut in ("columns", "rows")),
    Row("30", "all_reduces of a block's forward: after attention and after the MLP", 2,
        lambda: worked.sent_in_layer("04", 0) / 2, "calls", by="04_tensor_parallel.traffic"),
    Row("31", "parameters of a 7B model on a rank of 8, over all: about 1/8", 1 / 8,
        lambda: chapter("04").parameters_per_rank(LLAMA_7B, 8) / LLAMA_7B.parameters(), "times",
        0.001, by="04_tensor_parallel.parameters_per_rank"),
    Row("32", "sequence parallelism sends, over tensor parallelism alone: similar", 1,
        lambda: worked.sent_in_layer("05", 2, variant="kept") / worked.sent_in_layer("04", 2),
        "times", by="05_sequence_parallel.traffic"),
    Row("32", "the same, if the shards alone are kept for backward", 1,
        lambda: worked.sent_in_layer("05", 2) / worked.sent_in_layer("04", 2), "times",
        by="05_sequence_parallel.traffic", why="Backward gathers them once more, so that there are "
        "5 halves of an all_reduce for 4."),
    Row("32", "activations of a worker of 8, over all: 1/8", 1 / 8,
        lambda: worked.kept(GPT3, "megatron-2021", tp=8) / worked.kept(GPT3, "megatron-2021"),
        "times", by="10_planner.kept_by_layer"),
    Row("33", "hops of keys and values on 8 workers: N - 1", 7,
        lambda: chapter("06").hops_needed("ring", 8, 8192), "hops",
        by="06_context_parallel.hops_needed"),
    Row("33", "the share of tokens' activations that a worker of 8 keeps", 1 / 8,
        lambda: chapter("06").kept("ring", LLAMA_7B, 8)["outside"], "times",
        by="06_context_parallel.kept"),
    Row("34", "the last worker's attention over the first's, 4 workers, in order", None,
        lambda: work_of_rank("ring", 3) / work_of_rank("ring", 0), "times",
        by="06_context_parallel.pairs"),
    Row("34", "the same in a zig-zag: balanced", 1,
        lambda: work_of_rank("zigzag", 3) / work_of_rank("zigzag", 0), "times",
        by="06_context_parallel.pairs"),
    # 35 to 39: pipelines, experts
    *(Row("36", f"bubble of {called}, 8 stages, 32 micro-batches: (P-1)/m", 7 / 32,
          lambda name=name: chapter("07").bubble(name, 8, 32, 1), "%", by="07_pipeline_parallel."
          "bubble") for called, name in (("AFAB", "afab"), ("1F1B", "1f1b"))),
    *(Row("36", f"micro-batches that {called} keeps: {what}", told,
          lambda name=name: worked.alive(name, 8, 32), "micro-batches",
          by="07_pipeline_parallel.most_alive")
      for called, name, what, told in (("AFAB", "afab", "m", 32), ("1F1B", "1f1b", "P", 8))),
    Row("37", "a stage's message over the messages of tp 8 in its 12 layers: much less", None,
        stage_over_tensor, "%", by="10_planner.messages"),
    Row("38", "exchanges of a layer's forward: to the experts and back", 2, calls_of_forward,
        "calls", by="10_planner.messages"),
    # 40 to 44: together
    Row("40", "GPUs of N_d 16, P 8, N_tp 8", 1024,
        lambda: 8 * ten().Layout(dp=16, tp=8).stage, "GPUs", by="10_planner.Layout"),
    Row("44", "accumulation steps A of a batch of 64, with 4 workers and 4 sequences at a time", 4,
        lambda: micro_batches(64, 4), "micro-batches", by="lab.classroom.questions.Case"),
)

QUESTIONS = (
    Asked(26, "", "Where are the parameters of a Transformer? (slide 11)", (
        Row("11", "of GPT-3's, in attention", None,
            lambda: LAYERS * numbers("queries", "keys") / ten().MODELS[GPT3].parameters(), "%",
            by="10_planner.Model"),
        Row("11", "in MLPs", None, lambda: LAYERS * numbers("mlp")
            / ten().MODELS[GPT3].parameters(), "%", by="10_planner.Model"),
        Row("11", "in the embedding, which is the head", None,
            lambda: table() / ten().MODELS[GPT3].parameters(), "%", by="10_planner.Model")),
        "4h² in attention, 8h² in an MLP, and a table of V·h. So a deep and wide model has a third "
        "in attention and two thirds in MLPs; a small one has much of it in tables.",
        "python 01_single_gpu.py --steps 5"),
    Asked(27, "", "From when on do activations need more memory than parameters? (slide 14)", (
        Row("14", "sequences of 2,048 tokens whose activations are GPT-3's weights, in 16 bits",
            None, lambda: 2 * ten().MODELS[GPT3].parameters() / all_activations(1), "sequences",
            by="10_planner.kept_by_layer"),
        Row("14", "that are its model states", None,
            lambda: 16 * ten().MODELS[GPT3].parameters() / all_activations(1), "sequences",
            by="10_planner.kept_by_layer"),
        Row("14", "the same, if all layers are recomputed", None,
            lambda: 16 * ten().MODELS[GPT3].parameters()
            / all_activations(1, recompute="full"), "sequences", by="10_planner.kept_by_layer")),
        "Activations grow with batch and sequence, and parameters do not. With the scores of "
        "attention in memory, two sequences of GPT-3 need more than its weights, and eleven more "
        "than all of its states. With recomputation it takes some hundreds.",
        "python 01_single_gpu.py --recompute none"),
    Asked(28, "", "Does gradient accumulation take longer? (slide 22)", (
        Row("22", "FLOPs of 4 micro-batches, over those of a batch as large", None,
            lambda: 4 * chapter("01").step_flops(LLAMA_7B, 1, "plain", "none")
            / chapter("01").step_flops(LLAMA_7B, 4, "plain", "none"), "times",
            by="01_single_gpu.step_flops"),
        Row("22", "a step of Llama 3 8B on 8 H100s with micro-batches of 1, over one with 4", None,
            lambda: worked.seconds_of_micro_batch(1) / worked.seconds_of_micro_batch(4), "times",
            by="10_planner.step_seconds")),
        "It computes the same, and sends gradients once. What is lost is that smaller matrices use "
        "a GPU less well, and that weights are read more often.",
        "torchrun --nproc_per_node=4 02_data_parallel.py --micro-batch 1"),
    Asked(29, "", "How large must a batch be for an all_reduce to hide? (slide 21)", (
        Row("21", "tokens of a GPU, 8 H100s over NVLink, bf16 gradients", None,
            lambda: chapter("02").tokens_to_hide(2, 8, *MACHINES["H100, NVLink 4"]), "tokens",
            by="02_data_parallel.tokens_to_hide"),
        Row("21", "over InfiniBand, very many GPUs", None, lambda: chapter("02").tokens_to_hide(
            2, float("inf"), *MACHINES["H100, InfiniBand NDR"]), "tokens",
            by="02_data_parallel.tokens_to_hide")),
        "Backward computes 4 FLOPs for each parameter and token, and the all_reduce sends 2 "
        "(N-1)/N bytes for each byte of a gradient. The parameters cancel: what counts are tokens.",
        "torchrun --nproc_per_node=4 02_data_parallel.py"),
    Asked(30, "", "When does ZeRO-3 hide behind computing? (slide 41)", (
        Row("41", "tokens of a micro-batch that hide its gathers in forward, 8 H100s over NVLink",
            None, lambda: chapter("03").tokens_to_hide(2, 1, 8, *MACHINES["H100, NVLink 4"]),
            "tokens", by="03_zero.tokens_to_hide"),
        Row("41", "over InfiniBand, 1,024 GPUs", None, lambda: chapter("03").tokens_to_hide(
            2, 1, 1024, *MACHINES["H100, InfiniBand NDR"]), "tokens",
            by="03_zero.tokens_to_hide")),
        "It gathers 2 bytes of each parameter, and computes 2 FLOPs with it for each token of the "
        "micro-batch. So accumulation does not help, and large micro-batches or long sequences do; "
        "a pipeline asks for the opposite, many small ones.",
        "torchrun --nproc_per_node=4 03_zero.py --variant zero3"),
    Asked(31, "", "Up to how many GPUs does tensor parallelism pay? (slide 31)", (
        Row("31", "ranks, H100s over NVLink, dim 8,192", None,
            lambda: chapter("04").ranks_that_pay(8192, 2, *MACHINES["H100, NVLink 4"]), "ranks",
            by="04_tensor_parallel.ranks_that_pay"),
        Row("31", "dim 2,048", None,
            lambda: chapter("04").ranks_that_pay(2048, 2, *MACHINES["H100, NVLink 4"]), "ranks",
            by="04_tensor_parallel.ranks_that_pay")),
        "The matmuls of a rank shrink as 1/t, and the all_reduce stays as large. They take equally "
        "long at t - 1 = 8h/2 · bandwidth / FLOP/s: wider models can be cut into more parts.",
        "torchrun --nproc_per_node=4 04_tensor_parallel.py"),
    Asked(32, "", "How unequal is the work under a causal mask, and what mends it? (slide 34)", (
        Row("34", "the busiest of 4 workers over the mean, in order", None,
            lambda: work_of_rank("ring", 3) * 4 / sum(
                work_of_rank("ring", rank) for rank in range(4)), "times",
            by="06_context_parallel.pairs"),
        Row("34", "in a zig-zag", None, lambda: work_of_rank("zigzag", 3) * 4 / sum(
            work_of_rank("zigzag", rank) for rank in range(4)), "times",
            by="06_context_parallel.pairs")),
        "The last quarter of a sequence sees all of it, and the first only itself. In a zig-zag a "
        "worker has a chunk from the front and one from the back, which together see as much as "
        "everybody's.",
        "torchrun --nproc_per_node=4 06_context_parallel.py --variant ring"),
    Asked(33, "", "How many micro-batches does a pipeline need? (slide 37)", (
        Row("37", "bubble of 8 stages, 8 micro-batches", None,
            lambda: chapter("07").bubble("1f1b", 8, 8, 1), "%", by="07_pipeline_parallel.bubble"),
        Row("37", "128 micro-batches", None, lambda: chapter("07").bubble("1f1b", 8, 128, 1), "%",
            by="07_pipeline_parallel.bubble"),
        Row("37", "8 micro-batches, zero bubble (ZB-H1)", None,
            lambda: chapter("07").bubble("zb-h1", 8, 8, 1), "%", by="07_pipeline_parallel.bubble")),
        "The wait over the work is (P-1)/m: with 10 times as many micro-batches as stages it is "
        "less than a tenth. Or W, the weights' half of backward, fills the wait: then a third of "
        "it is left.",
        "python -m lab.schedules zb-h1 --ranks 8 --micro-batches 8"),
    Asked(34, "", "How costly are the exchanges of experts? (slide 39)", (
        Row("39", "bytes of a token in a layer of Mixtral on 8 GPUs, forward", None,
            lambda: 2 * ten().messages(ten().MODELS["mixtral"], ten().Layout(ep=8))["ep"][0]
            * 7 / 8 / 4096, "B", by="10_planner.messages"),
        Row("39", "their time over a layer's computing, H100s over NVLink", None,
            lambda: worked.travel("H100, NVLink 4"), "%",
            by="08_expert_parallel.travel_over_compute"),
        Row("39", "over InfiniBand", None, lambda: worked.travel("H100, InfiniBand NDR"), "%",
            by="08_expert_parallel.travel_over_compute")),
        "Each token sends K rows of its width there and gets K back. Inside a machine that is a "
        "small part of what a layer computes; over a network card it is not, and has to hide.",
        "torchrun --nproc_per_node=4 08_expert_parallel.py"),
    Asked(35, "", "How large is the global batch of Llama 3, and how is it made? (slide 44)", (
        Row("44", "accumulation steps of dp 128, one sequence at a time: its batch of 2,048", None,
            lambda: worked.micro_batches_of_llama(1), "micro-batches",
            by="lab.planner.published.LLAMA_3"),
        Row("44", "tokens of a step", None, lambda: worked.tokens_of_llama(1), "tokens",
            by="lab.planner.published.LLAMA_3"),
        Row("44", "with 128K: accumulation steps of dp 8", None,
            lambda: worked.micro_batches_of_llama(2), "micro-batches",
            by="lab.planner.published.LLAMA_3")),
        "N_d · b · A sequences: replicas, times sequences at a time, times accumulation steps. The "
        "steps are the pipeline's micro-batches, so dp and the bubble compete for the batch.",
        "python 10_planner.py --published"),
)
LEFT_OUT = ("figures 1 to 27: they are copies of the playbook's, and stand there",)
