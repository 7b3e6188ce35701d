"""What the five texts say that doesn't hold, with what holds and why.

    python -m lab.texts --contradictions

Each entry has two numbers. `claimed` is the text's, and `assumed` computes it from what the text
takes for granted. `ours` comes from the course's own functions, which chapters check against real
ranks or a simulation of them. Some texts are right about their own assumption and count something
else: the entry says what.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import common
from lab.chapters import chapter
from lab.planner import rooflines
from lab.texts import computed as ours
from lab.texts.computed import AXES, GLU, GPT_3, NVLINK, SEVEN_B, F, ten, tpu


class Contradiction(NamedTuple):
    """One claim of a text. Its number has an error of half its last digit."""

    source: str             # the text's number: "000"
    where: str              # of the text
    says: str
    holds: str
    derivation: str         # of what holds
    claimed: float
    assumed: Callable[[], float]        # gives what is claimed
    ours: Callable[[], float]
    unit: str = ""          # "B", "FLOP", "s", "%" (of shares), or what is counted
    error: float = 0        # of `claimed`
    by: str = ""            # the functions that give ours


CONTRADICTIONS = (
    Contradiction(
        "000", "Activation recomputation",
        "Selective recomputation costs GPT-3 2.7% of its compute.", "It costs 0.9%.",
        "q·kᵀ and weights·v are computed once more: 4·b·s²·h FLOPs a layer. A forward has "
        "24·b·s·h²·(1 + s/6h), of which that is 2.7%. But a step has three times a forward.", 0.027,
        lambda: 3 * ours.recomputed("selective"), lambda: ours.recomputed("selective"), "%", 0.0005,
        "01_single_gpu.step_flops"),
    Contradiction(
        "004", "8.4, 12.2", "Selective recomputation saves the same memory as full.",
        "It leaves 34·s·b·h bytes of a layer; full leaves 2·s·b·h.",
        "Selective drops what grows with s², 5·a·s²·b bytes: GPT-3 keeps 34 of 114 bytes a number. "
        "Full keeps the input of the layer alone, in 2 bytes.", 2,
        lambda: ours.kept_of_gpt_3("full"), lambda: ours.kept_of_gpt_3("selective"),
        "bytes for each s·b·h", 0, "10_planner.kept_by_layer"),
    Contradiction(
        "004", "8.4, 12.2", "Selective recomputation takes 30 to 40% less compute than full.",
        "What full adds is a third of a step; selective adds 97% less than that.",
        "Full computes forward again, 1 of 3 parts. Selective computes 0.9% of a step again. 30 to "
        "40% is what full itself costs.", 0.35, lambda: ours.recomputed("full"),
        lambda: 1 - ours.recomputed("selective") / ours.recomputed("full"), "%", 0.05,
        "01_single_gpu.step_flops"),
    Contradiction(
        "000", "A3: ZeRO-3, TP, PP",
        "A gather hides behind the compute of a layer from 1/2 · (N-1)/N · FLOP/s / bandwidth "
        "tokens on.", "It takes twice as many tokens in bf16: a number has 2 bytes.",
        "16·h² numbers go at p bytes each: p·16·h²·(N-1)/N / bandwidth <= 2·16·h²·tokens / FLOP/s. "
        "With p = 1 that is the text's; its conditions of tp and pp count so, too.", 962,
        lambda: chapter("03").tokens_to_hide(1, 1, 8, *NVLINK),
        lambda: chapter("03").tokens_to_hide(2, 1, 8, *NVLINK), "tokens", 0.5,
        "03_zero.tokens_to_hide, 05_sequence_parallel.hop_over_matmul, "
        "07_pipeline_parallel.blocks_to_hide"),
    Contradiction(
        "000", "A3: data parallelism",
        "The all_reduce over backward is num_params / (2·num_tokens) · (N-1)/N · FLOP/s / "
        "bandwidth: it grows with the model.",
        "The size of the model cancels: for num_params read g, the bytes of a gradient.",
        "2·g·Ψ·(N-1)/N / bandwidth, over 4·Ψ·tokens / FLOP/s: Ψ is in both. What the text writes "
        "is right for Ψ² bytes of gradients.", 2.35e8,
        lambda: chapter("02").communication_over_backward(1e9 * 1e9, 1e9, 4096, 8, *NVLINK),
        lambda: chapter("02").communication_over_backward(4 * 1e9, 1e9, 4096, 8, *NVLINK), "", 5e5,
        "02_data_parallel.communication_over_backward"),
    Contradiction(
        "000", "A3: ZeRO-3, TP", "A rank sends 3·16·h²/N bytes for a block in ZeRO-3.",
        "It sends N-1 shards, not one, of 2 bytes a number: 14 times as much on 8 ranks.",
        "In a ring each rank passes on N-1 shards of S/N: (N-1)/N·S in each of two gathers and a "
        "scatter, as the text's own time of a gather has it. The same holds of its tp.", 4.03e8,
        lambda: 3 * 16 * GLU.dim**2 / 8, lambda: ours.sent_of_a_block("03", 2), "B", 5e5,
        "03_zero.traffic"),
    Contradiction(
        "000", "ZeRO-2 (and 004: 4.1, 4.3)",
        "ZeRO-2 has no real overhead over ZeRO-1: it sends 2Ψ.",
        "With M micro-batches it sends (M + 1)·Ψ: with 8, 4.5 times as much.",
        "A full gradient is not kept, so it is scattered after every backward, M times. Parameters "
        "are gathered once. 2Ψ is true of M = 1.", 2, lambda: ours.sent_by_zero_2(1),
        lambda: ours.sent_by_zero_2(8), "Ψ", 0.01, "03_zero.traffic"),
    Contradiction(
        "004", "8.2",
        "A block under TP with SP needs 1 all_gather and 1 reduce_scatter in forward.",
        "It needs 2 of each, and backward as many: 4 and 4. Megatron gathers 2 more in backward.",
        "Attention begins with a gather and ends with a scatter, and so does the MLP. Pure TP ends "
        "each of the two with an all_reduce, which a scatter and the next gather replace.", 1,
        lambda: ours.sent_of_a_block("04", 0, "all_reduce") / 4,
        lambda: ours.sent_of_a_block("05", 0, "reduce_scatter") / 2, "of each a block", 0,
        "05_sequence_parallel.traffic"),
    Contradiction(
        "004", "6.2, Q19", "hpZ: each GPU of a node holds the full weights.",
        "Each holds 1/8 of them once more: the node has one whole copy, not 8.",
        "The secondary shards divide the weights among the GPUs of a node, where backward gathers "
        "them over NVLink. Of 7 billion in bf16 that is 1.75 GB of a GPU, and not 14.", 14e9,
        lambda: chapter("03").held(7e9, 3, 1, "bf16")[0],
        lambda: chapter("03").held(7e9, 3, 8, "bf16")[0], "B", 5e8,
        "03_zero.held, 03_zero.zeropp_traffic"),
    Contradiction(
        "004", "2.2, 7.5", "NVLink 4 has 900 GB/s in one direction.",
        "It has 450 in each direction, 900 together.",
        "18 links of 25 GB/s in each direction. A ring sends in one of them, so a time that is "
        "divided by 900 is half of what the link allows.", 900e9, lambda: 18 * 2 * 25e9,
        lambda: NVLINK[1], "B/s", 0, "lab/run/machines.py"),
    Contradiction(
        "004", "9.2 to 9.4, Q8, Q21",
        "The bubble is (P-1)/(V·M + P-1), by equation 4 of Narayanan et al.",
        "That paper's, and the playbook's, is (P-1)/(V·M): over the work, not over all the time.",
        "A rank waits (P-1)/V times a micro-batch's work, and works M times. Idle over work is "
        "(P-1)/(V·M); idle over both is (P-1)/(V·M + P-1). Both are right, and 16% is not 19%.",
        3 / 19, lambda: ours.idle_in_time("interleaved", 4, 8, 2),
        lambda: chapter("07").bubble("interleaved", 4, 8, 2), "%", 1e-9,
        "07_pipeline_parallel.bubble"),
    Contradiction(
        "000", "Interleaving stages, plot",
        "With 8 stages, 2 slices and 2 micro-batches the bubble is (p-1)/(v·m) = 1.75.",
        "It is 3.25 of the work: the formula needs m to be a multiple of p.",
        "With fewer than p micro-batches a rank waits between its slices as well: what it has sent "
        "on comes round after p steps, and it has work for m of them.", 1.75,
        lambda: (8 - 1) / (2 * 2), lambda: ours.bubble_in_time("interleaved", 8, 2, 2), "", 0,
        "lab/schedules.py"),
    Contradiction(
        "004", "14.2, Q24",
        "DualPipe's bubble is 0: the two directions fill each other's warm-up and cool-down.",
        "On 8 ranks with 16 micro-batches it is 12.5% of the work.",
        "A rank waits (p/2 - 1)·(F&B + B - 2·W), with F&B = F + B + W: 6 of 48 where all take 1. "
        "Two ranks do fill each other's gaps. 1F1B's bubble is 44% here.", 0,
        lambda: chapter("07").bubble("dualpipe", 2, 16, 1),
        lambda: chapter("07").bubble("dualpipe", 8, 16, 1), "%", 0, "07_pipeline_parallel.bubble"),
    Contradiction(
        "004", "14.2, 14.3, Q24",
        "DualPipe keeps the activations of 2·P micro-batches, twice as many as 1F1B.",
        "It keeps P + 1.",
        "A rank is early in one direction and late in the other: what it keeps of the two adds up "
        "to P + 1 everywhere. 1F1B keeps P - r on rank r.", 16,
        lambda: 2 * ours.alive("1f1b", 8, 16), lambda: ours.alive("dualpipe", 8, 16),
        "micro-batches, P = 8", 0, "07_pipeline_parallel.most_alive"),
    Contradiction(
        "004", "14.3", "DualPipe's costs are code, activations and balance.",
        "It doubles the parameters of a rank, too.",
        "Each rank has a stage of both directions, so every stage lies on two ranks: 2/p of the "
        "model, of its gradients, and of its optimizer states where ZeRO does not share them.",
        1 / 8, lambda: ours.share_of_parameters("1f1b", 8),
        lambda: ours.share_of_parameters("dualpipe", 8), "%", 0,
        "07_pipeline_parallel.make_schedule"),
    Contradiction(
        "002", "abstract, 2.2.2 (and 004: 14.2)", "Interleaving has a comparable memory footprint.",
        "With p = 8 and v = 2 the first rank keeps 44% more activations than with 1F1B.",
        "It has 2·(p-1) + (v-1)·p + 1 slices of 1/v alive, 1F1B has p: 1 + (p-1)/(p·v) times as "
        "much. v·p slices, as 004 has it, would be no more than 1F1B.", 0,
        lambda: 8 * 2 / 2 / ours.alive("1f1b", 8, 16) - 1,
        lambda: ours.alive("interleaved", 8, 16, 2) / 2 / ours.alive("1f1b", 8, 16) - 1, "%", 0,
        "07_pipeline_parallel.most_alive"),
    Contradiction(
        "004", "13, Q25", "The number of GPUs is D·T·P·C·E.",
        "D is dp/ep there: experts lie on ranks that dp has already. DeepSeek-V3 runs on 2,048.",
        "Its pp is 16 and its ep 64, and 2,048/16 = 128 ranks share the batch, dp. Each group of "
        "64 of these shares the experts, so there are 128·16 GPUs, and not 64 times as many.",
        131072, lambda: 16 * ten().Layout(dp=128 * 64, ep=64).stage,
        lambda: 16 * ten().Layout(dp=128, ep=64).stage, "GPUs", 0, "10_planner.Layout.stage"),
    Contradiction(
        "000", "A2", "A block with a GLU has 16·h² parameters.",
        "That needs ffn = 4·h. Llama 2 7B has 12.1·h².",
        "Three matrices of h x ffn, and 4·h² of attention. Models choose ffn near 8/3·h, so that a "
        "GLU is as large as the MLP that it replaces: 4·h² + 3·h·ffn = 12·h².", 16,
        lambda: ours.weights_of_layer(ffn=4 * 4096), ours.weights_of_layer, "h²", 0,
        "10_planner.Model.weights"),
    Contradiction(
        "000", "A2", "Attention's FLOPs can be left out where seq² is much smaller than h.",
        "They can where seq is much smaller than 6·h.",
        "12·L·h·s FLOPs a token, beside 6·12·L·h²: the share is s/(6·h). With h = 4,096 they are "
        "equal at 24,576 tokens; by seq² = h it would be 64.", 64, lambda: math.sqrt(4096),
        ours.attention_as_weights, "tokens", 0, "10_planner.step_flops"),
    Contradiction(
        "000", "Our journey up to now", "70B parameters in bf16 are 140 GB, or 133 GiB.",
        "They are 130 GiB.",
        "A GiB has 1.024³ GB. 133 is what is left if it is divided by 1.024 twice.", 133,
        lambda: 140 / 1.024**2, lambda: 2 * 70e9 / 2**30, "GiB", 0.6, "2·Ψ / 2³⁰"),
    Contradiction(
        "000", "Plots of ZeRO, TP, PP and CP",
        "Optimizer states of an 8B take 60 GB beside weights in bf16.",
        "By its own table, k = 12, they take 90.",
        "Masters and two moments in fp32 are 12 bytes a parameter. The plots have the moments "
        "alone, 8 bytes, and the weights in 2: no masters.", 60,
        lambda: 8 * ten().MODELS["8b"].parameters() / 2**30,
        lambda: 12 * ten().MODELS["8b"].parameters() / 2**30, "GiB", 0.5, "10_planner.memory"),
    Contradiction(
        "001", "FSDP + TP", "For N = 64, B = 48,000 and F = 32,768 the best X is 13.9.",
        "It is 13.7; 13.9 is of F = 32,000.",
        "X = √(B/F · M_X/M_Y · N) = √(48,000/32,768 · 2 · 64) = √187.5. The split that it chooses, "
        "X = 16 and Y = 4, is the best of those that divide 64 with either F.", 13.9,
        lambda: rooflines.best_data_parallel(48_000, 64, 32_000, AXES),
        lambda: rooflines.best_data_parallel(48_000, 64, 32_768, AXES), "ranks", 0.05,
        "lab.planner.rooflines.best_data_parallel"),
    Contradiction(
        "001", "pods",
        "With 1 M tokens on X = 1,024 and Y = 8 training is compute-bound: from 108 tokens of a "
        "chip on.", "That split needs 159 tokens of a chip, and has 122.",
        "FSDP over 2 axes sends longer than it computes below α/(2·Y) = 2,550/16 tokens. 108 holds "
        "at X_opt, 739 for 8,192 chips, which does not divide them: no split that does is enough.",
        108, lambda: ours.least(F), lambda: ours.per_chip(AXES[0]) / 8, "tokens", 0.5,
        "lab.planner.rooflines.tokens_of_data_parallel"),
    Contradiction(
        "001", "pods, takeaways", "Between pods C / W is 4.46e14 / 6.25e9 = 71,360 tokens.",
        "It is 73,440.",
        "The other sections have 4.59e14 FLOP/s for the same TPU v5p, as its data sheet: two "
        "digits are turned. The rounded 71k and 71,000 have it from there.", 71_360,
        lambda: rooflines.tokens_of_data_parallel(4.46e14, tpu().nic),
        lambda: rooflines.tokens_of_data_parallel(tpu().peak, tpu().nic), "tokens", 0.5,
        "lab.planner.rooflines.tokens_of_data_parallel"),
    Contradiction(
        "001", "takeaways", "Backward of FSDP with TP sends 8·BD/X bytes of activations.",
        "It sends 4·BD/X, as backward of TP alone; or 6, if In is gathered again.",
        "Its own list gathers dOut and In over Y and scatters dIn, 2·BD/X bytes each, and In can "
        "be kept. FSDP's messages do double, 4 to 8·DF/Y: weights are gathered, gradients "
        "scattered.", 8, lambda: 2 * ours.activations_of_both(0),
        lambda: ours.activations_of_both(1), "x BD/X", 0, "lab.planner.rooflines.bytes_sent"),
    Contradiction(
        "002", "5.2", "PTD-P is faster than ZeRO-3 by as much as 70% on more GPUs.",
        "By its table 2 it is 220 and 231% faster, on the most GPUs.",
        "149/88 and 167/98 TFLOP/s of a GPU are 1.7: with twice the GPUs. With four times as many "
        "they are 141/44 and 159/48. Ours is the planner's for the last.", 0.7,
        lambda: ours.over_zero_3(4, 1), lambda: ours.over_zero_3(5, 2), "%", 0.05,
        "10_planner.py --published"),
    Contradiction(
        "003", "22", "Accumulation over A micro-batches takes A times as long as one large batch.",
        "It computes as much; A times as long as a micro-batch.",
        "A micro-batch has 1/A of the sequences, so A of them have the FLOPs of the whole batch. "
        "Only what small matrices lose in speed is added.", 4, lambda: ours.flops_of_batch(1, 4),
        lambda: ours.flops_of_batch(4, 1) / ours.flops_of_batch(1, 4), "times, A = 4", 0,
        "01_single_gpu.step_flops"),
    Contradiction(
        "003", "29",
        "Row parallelism: a worker computes f(X_k·A_k), and the sum of these is f(X·A).",
        "That needs an f that is linear: with GELU the sum is another.",
        "Products add up, Σ X_k·A_k = X·A, and the GELUs of parts do not add up to the GELU of the "
        "sum: they differ by as much. So f follows the all_reduce; or it comes before, on columns, "
        "as on its next slide.", 0, lambda: ours.off_by_function(lambda x: x),
        lambda: ours.off_by_function(common.activate), "", 1e-12, "common.activate"),
    Contradiction(
        "004", "6.4, Q19",
        "ZeRO++ with int8 sends 4 times less: half as much in each of 2 collectives.",
        "It sends 3 times less between nodes; 4 times with gradients in 4 bits.",
        "ZeRO-3 sends 2 + 2 + 2 bytes of a parameter. With int8 that is 1, 0 (backward gathers "
        "inside of a node) and 1, and scales. Two halves do not multiply. 4 is the paper's, 1 + 0 "
        "+ 0.5.", 4, lambda: 2 * 2, lambda: ours.less_between_nodes(1), "times", 0.1,
        "03_zero.zeropp_traffic"),
    Contradiction(
        "004", "7.5", "An activation of a 7B model, 2,048 tokens of dim 4,096, has 32 MB.",
        "It has 16, as in its section 8.1, and 128 of them 2 GB, not 4.",
        "2,048 · 4,096 numbers of 2 bytes are 2²⁴. A ring of 8 sends 1.75 times that, so over "
        "InfiniBand 80 ms are nearly right, by two errors.", 32,
        lambda: 2 * ours.sent_of_a_block("04", 1, cfg=SEVEN_B) / 4 / 2**20,
        lambda: ours.sent_of_a_block("04", 1, cfg=SEVEN_B) / 4 / 2**20, "MiB", 0,
        "04_tensor_parallel.traffic"),
    Contradiction(
        "004", "12.4", "Where L is near D, 34·B·L·D is the larger part of a layer's activations.",
        "For GPT-3 it is the larger one below 870 tokens; at L = D the other is 14 times as large.",
        "5·B·L²·H over 34·B·L·D is 5·H·L/(34·D). With 96 heads and D = 12,288 that is 1 at 870 "
        "tokens: heads count, and the text compares L with D alone.", 12_288, lambda: GPT_3.dim,
        lambda: 2048 / ours.scores_over_rest(2048), "tokens", 0, "10_planner.kept_by_layer"),
)
