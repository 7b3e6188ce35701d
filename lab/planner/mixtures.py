"""Published speeds of mixtures of experts, beside what chapter 10 predicts.

    python 10_planner.py --published

Nothing is fitted. Two numbers about what hides are others': 93% of ep's messages do (arXiv
2603.07685), and take 20 of an H800's 132 multiprocessors (DeepSeek-V3, 3.5.1). The second one was
looked up after a first comparison had shown that without it all rows with hidden messages are too
fast, by 5 to 27%.

Rows: model, cluster, GPUs, batch, micro-batch, tp, pp, v, ep, precision, the share of ep's messages
that hides; then TFLOP/s of a GPU. All have sequences of 4,096 tokens, experts that are chosen alike
(the benchmarks forced that, or dropped what was too much), and ZeRO-1. Counted are the causal half
of attention's scores and no router: so TFLOP/s over tokens/s, where both are given, are the
planner's FLOPs of a token to 0.3%.

What is not published, or not planned:
  - which small parts were computed again (norms, activations, latent attention's projections): the
    reports say by names and not by time, under 5%; here nothing is.
  - DeepSeek-V3 with its module for one token more ("MTP", in all rows but four of Megatron-Bridge):
    4% more FLOPs, which NVIDIA's TFLOP/s count, and neither the planner nor the last row here.
  - Megatron's shared expert is cut by tp; here each rank has it whole, as in chapter 09.
  - rows that go to their experts in FP8 (DeepSeek-V3's): here a number has 2 bytes both ways.
  - v, the micro-batch and the convention of the paper of 2025: here a layer a slice, one sequence
    and all scores. Its software sends rows in one hop, and hides nothing.
Read, but not planned, since a layout or a number is missing: pytorch/torchtitan#2107 (DeepSeek-V3,
512 H100s, dp 64, pp 8, ep 32: its TFLOP/s), the PyTorch and Nebius blog of 2026 (256 B200s, 651 to
918 tokens/s of a GPU: its layout), NousResearch/torchtitan#19 (Qwen3-30B, 341 TFLOP/s: its batch),
and of arXiv 2603.07685 (its numbers are as notes on it give them) what has no layout: 1,233 TFLOP/s
on GB300s, 857 in BF16 on GB200s.
"""

from dataclasses import replace

FOLDING_2025 = """
    mixtral-8x22b h100 128 256 1 2 8 7 8 bf16 0 487.8
    llama3-8x70b h100 256 256 1 8 16 5 8 bf16 0 411.6
    qwen2-57b h100 64 256 1 2 4 7 4 bf16 0 385.9
    mixtral-8x22b-g8t8 h100 128 256 1 4 8 7 8 bf16 0 285.0"""
ZOO = """
    qwen3-235b h100 256 2048 1 2 8 4 32 bf16 0 245
    qwen3-235b h100 256 2048 1 2 8 4 32 bf16 0.93 276
    qwen3-235b h100 256 2048 1 4 8 4 8 bf16 0 167
    qwen3-235b h100 256 2048 1 2 32 3 8 bf16 0 200"""
REPORT_2026 = """
    deepseek-v3 h100 1024 8192 1 2 8 4 64 fp8 0.93 368
    deepseek-v3 gb200 256 8192 1 1 4 4 64 fp8 0 1048
    qwen3-235b h100 256 2048 1 2 8 4 32 bf16 0.93 320
    qwen3-235b gb200 256 8192 1 1 8 1 8 bf16 0 750
    qwen3-235b gb200 256 3072 3 1 4 6 64 fp8 0.93 919
    qwen3-235b gb300 256 8192 2 1 4 1 32 fp8 0 974"""
BRIDGE = """
    deepseek-v3 h100 1024 8192 1 2 8 4 64 fp8 0 338
    deepseek-v3 b200 256 2048 1 1 16 1 8 fp8 0 557
    deepseek-v3 gb200 256 4096 1 1 4 4 64 bf16 0 782
    deepseek-v3 gb200 256 4096 1 1 8 4 32 fp8 0 1003
    deepseek-v3 gb300 256 4096 1 1 2 4 32 bf16 0 961
    deepseek-v3 gb300 256 4096 1 1 2 4 32 fp8 0 1088
    qwen3-235b h100 256 2048 1 2 8 4 32 fp8 0 233
    qwen3-235b b200 64 1024 1 1 8 2 8 fp8 0 484
    qwen3-235b gb200 256 8192 1 1 8 3 32 bf16 0 728
    qwen3-235b gb300 256 8192 2 1 4 12 16 bf16 0 907"""
SMALL = """
    qwen3-30b h100 16 512 2 1 2 24 8 fp8 0 121
    qwen3-30b b200 8 512 1 1 1 1 8 fp8 0 214
    qwen3-30b gb200 8 512 4 1 1 1 8 fp8 0 547
    qwen3-30b gb300 8 512 4 1 1 1 8 fp8 0 666"""
# Its 180,000 GPU hours for 10^12 tokens are 1,543 tokens/s of a GPU; with 249.8 GFLOPs of a token
# (without its MTP) 385.5 TFLOP/s.
DEEPSEEK = """
    deepseek-v3 h800 2048 15360 1 1 16 1 64 fp8 1 385.5"""

# Where they are from, the software, what else is of the layout, and the scores that are counted.
# And how far off the planner may be, in the mean and at most: what it was when it was written.
PUBLISHED = {
    "experts, folded": ("Liu et al. 2025 (arXiv 2504.14960), table 3, MFU of 989.5 TFLOP/s",
                        FOLDING_2025, "megatron-2024", {}, "all"),
    "experts, zoo": ("yanring/Megatron-MoE-ModelZoo, best_practice/qwen3/readme.md", ZOO,
                     "megatron-moe", {}, "causal"),
    "experts, 2026": ("Megatron-Core's MoE report (arXiv 2603.07685), layouts of its run scripts "
                      "(the same)", REPORT_2026, "megatron-moe", {}, "causal"),
    "experts, bridge": ("NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, 25.11 "
                        "(the first row: 25.09)", BRIDGE, "megatron-moe", {}, "causal"),
    "experts, small": ("the same, of a small model", SMALL, "megatron-moe", {}, "causal"),
    "experts, DeepSeek": ("DeepSeek-V3 (arXiv 2412.19437), sections 1, 3.2 and 4.2", DEEPSEEK,
                          "deepseek-v3", {"schedule": "dualpipe-v"}, "causal"),
}
GOALS = {"experts, folded": (0.12, 0.18), "experts, zoo": (0.22, 0.56),
         "experts, 2026": (0.10, 0.17), "experts, bridge": (0.18, 0.62),
         "experts, small": (0.85, 2.05), "experts, DeepSeek": (0.10, 0.10)}
HEAD = "model cluster GPUs batch micro tp pp v ep dtype"


def models(ten):
    """The chapter's, and what only tables have."""
    large = ten.Model(56, 6144, 48, 8, 16384, True, 32000, 4096, False, 8, 2)
    return ten.MODELS | {
        "mixtral-8x22b": large, "mixtral-8x22b-g8t8": replace(large, ffn=2048, experts=64, top_k=8),
        "llama3-8x70b": replace(ten.MODELS["70b"], seq=4096, experts=8, top_k=2),
        "qwen2-57b": ten.llama(28, 3584, 28, 4, 2560, 151936, 4096, experts=64, top_k=8, shared=8),
        "qwen3-30b": ten.llama(48, 2048, 32, 4, 768, 151936, 4096, experts=128, top_k=8,
                               head_dim=128)}


def planned(ten, line, name):
    """(row in words, published TFLOP/s, model, layout, cluster, software, batch, GPUs)."""
    _, _, stack, more, _ = PUBLISHED[name]
    model, cluster, *degrees, dtype, hidden, told = line.split()
    gpus, batch, micro_batch, tp, pp, v, ep = map(int, degrees)
    layout = ten.Layout(gpus // (tp * pp), tp, 1, pp, v, ep, 1, micro_batch=micro_batch, **more)
    software = replace(ten.SOFTWARE[stack], fp8=dtype == "fp8", ep_hidden=float(hidden))
    words = " ".join([model, cluster, *degrees, dtype]) + (" hidden" if float(hidden) else "")
    return (words, float(told), models(ten)[model], layout, ten.CLUSTERS[cluster], software, batch,
            gpus)


def rows(ten, name):
    """Yield (row, published, predicted), in TFLOP/s of a GPU."""
    _, table, _, _, scores = PUBLISHED[name]
    for line in table.strip().splitlines():
        words, told, *asked, batch, gpus = planned(ten, line, name)
        seconds = sum(ten.step_seconds(*asked, batch).values())
        yield words, told, ten.step_flops(asked[0], batch, scores) / seconds / gpus / 1e12


def errors(ten, name):
    """Of the predictions, as shares of what was published."""
    return [ours / told - 1 for _, told, ours in rows(ten, name)]
