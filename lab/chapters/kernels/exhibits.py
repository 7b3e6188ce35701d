"""The exhibits of kernels/: chapter 01 trains with them, in Triton's interpreter; chapter 05 trains
in FP8, in plain PyTorch, with one GPU in FP8 beside it, to 1e-10."""

from functools import partial

from lab.museum.exhibit import Exhibit

RMS = "kernels/rmsnorm.py"
NORM, ATTENTION, FP8 = "kernels/layernorm.py", "kernels/flash_attention.py", "kernels/fp8.py"
# As few programs as show it, since the interpreter takes a while for each. Of a LayerNorm there is
# one a row, and in backward two that share the rows; of attention one for each sequence.
RUN = 1, "--kernels --layers 1 --heads 1 --kv-heads 1 --dim 16 --seq 4 --batch 2"
LLAMA = 1, f"{RUN[1]} --block llama --ffn 16"
SHARED = 1, "--kernels --layers 1 --heads 1 --kv-heads 1 --dim 256 --seq 9 --batch 2"
BACKWARD = ("gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept")
Kernel = partial(Exhibit, chapter="01_single_gpu.py")
# 128 tokens; on each rank a half of the features, which share tiles of 128.
CUT = 2, "--precision fp8 --dtype float64 --dim 128 --heads 4 --kv-heads 2 --batch 8"
Rounded = partial(Exhibit, chapter="05_sequence_parallel.py")

EXHIBITS = [
    Kernel(
        "unslothai/unsloth#4533", "a norm's kernel that has no gradient for its weight",
        "The backward of a fused RMSNorm gave None in place of the gradient of its weight. The "
        "kernel had been written for adapters, where norms do not train, and there it is right. "
        "With full fine-tuning all norms stayed as they were, and the model became another one "
        "than without the kernel. It was found in the gradients, of which some were None.",
        RMS, "        return dx, dweight, None, dx if ctx.residual else None\n",
        "        return dx, None, None, dx if ctx.residual else None\n", *LLAMA, *BACKWARD,
    ),
    Kernel(
        "fla-org/flash-linear-attention#955", "each program's row has everyone's sum",
        "A kernel sums its weight's gradient over programs, each of which has a row of its own. "
        "With packed sequences and a batch of two or more, what was in the rows was not a "
        "program's own part, and their sum was too much. Output and the gradient of the input "
        "were right. What was seen is a gradient norm 16 times too large at the first step.",
        NORM, "    dweight, dbias = sums.sum(1).to(weight.dtype)\n",
        "    dweight, dbias = (sums.sum(1) * programs).to(weight.dtype)\n", *SHARED, *BACKWARD,
    ),
    Kernel(
        "Dao-AILab/flash-attention#2481", "a sum that is read before it is written",
        "Backward subtracts from each row the sum of output times gradient. The kernel that forms "
        "it was started early, and did not wait for the one that writes the gradient, so that it "
        "read what was there before. Gradients of queries and keys were wrong then, and those of "
        "values were right, which do not need the sum. On one GPU it happened within a few steps, "
        "on an older one once in 3000.",
        ATTENTION, "            lse, delta = tl.load(log2_ptr + stats + rows), "
        "tl.load(delta_ptr + stats + rows)\n",
        "            lse, delta = tl.load(log2_ptr + stats + rows), "
        "tl.zeros((BLOCK_Q,), tl.float32)\n", *RUN, *BACKWARD,
    ),
    Kernel(
        "NVIDIA/TransformerEngine#3216", "backward reads the first sequence's statistics",
        "With heads of 256 numbers and two or more sequences in a batch, backward gave gradients "
        "of queries five times too large, in nearly the opposite direction. Forward was right, "
        "and so was the loss. Random inputs did not show it, nor did a batch of one. The gradient "
        "norm of a real run exploded, and a kernel that was not fused gave the right one.",
        ATTENTION, "            stats = (batch * heads + head).to(tl.int64) * seq_padded\n",
        "            stats = head.to(tl.int64) * seq_padded\n", *RUN, *BACKWARD,
    ),
    Kernel(
        "linkedin/Liger-Kernel#1298", "every token has the first one's gradient",
        "A fused loss gives a number for each token, and so its backward gets a gradient for each. "
        "The kernel loaded one number, the first, and multiplied all tokens with it. If the first "
        "token is one that is ignored, all gradients are zero. Forward was right, and so was "
        "backward as long as all tokens weighed the same.",
        ATTENTION, "tl.load(delta_ptr + stats + rows)\n",
        "tl.load(delta_ptr + stats + rows * 0)\n", *RUN, *BACKWARD,
    ),
    Rounded(
        "NVIDIA/TransformerEngine#335", "gathered in 8 bits, and read with one's own scale",
        "Under sequence parallelism the input of a linear was gathered in FP8. With tensor "
        "parallelism the loss curve was not the one without, and whoever read the code asked "
        "whether all ranks have the same scale. They did not, since the ranks had not been told to "
        "agree on one. So values were multiplied with the scale of whoever had received them. The "
        "framework that calls the library has mended it.",
        FP8, "    return Quantized(values.contiguous().view(E4M3), "
        "scales.contiguous().view(torch.float32), ROWS)\n",
        "    scales = mine.unflatten(0, (batch, -1)).repeat(1, group.size(), 1).flatten(0, 1)\n"
        "    return Quantized(values.contiguous().view(E4M3), scales, ROWS)\n",
        *CUT, ("first loss", "loss", "gradients", "gradient norm", "parameters"), ("sent", "kept"),
        more=(("    values, scales = packed.split([",
               "    mine = scales\n    values, scales = packed.split(["),),
    ),
    Rounded(
        "NVIDIA/TransformerEngine#74", "an amax over one rank only",
        "One flag of a recipe decided whether ranks agree on the largest number of a tensor. "
        "Switched off to save messages, it also switched that off where it has to be done, since "
        "the tensor is gathered once it is in FP8. The fix took the two decisions apart, and was "
        "held to a run that converges. Reviewers asked that users be told of what is done against "
        "their flag.",
        FP8, "    dist.all_reduce(everyones, dist.ReduceOp.MAX, group=group)\n", "",
        *CUT, ("sent",), ("first loss", "loss", "kept"),
    ),
    Rounded(
        "pytorch/ao#4229", "turned around without its scales",
        "For a weight's gradient, activations in FP8 are needed the other way around. Their scales "
        "had the right values, and were laid out as before. A product that is told how many scales "
        "there are, and not whose they are, takes them as they come. There were as many either "
        "way.",
        FP8,
        "        whole = turned_around(whole, ROWS, gradients[0])\n",
        "        whole = Quantized(whole.values.T.contiguous(),\n"
        "                          whole.scales.reshape(whole.values.shape[1], -1), ROWS)\n",
        *CUT, ("gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Rounded(
        "marin-community/marin#7659", "the scale of the tensor before",
        "With delayed scaling a tensor is divided by the largest number that was seen before, so "
        "that one need not look at it first. Gradient accumulation put the record of the last "
        "micro-batch over those of all others. So the next step's scale was too small for some, "
        "and their largest numbers were cut off at 448. There was no error and no NaN, and FP8 "
        "looked as if it were worse than it is.",
        FP8, "    scales = scales_of(amax, powers)\n    values = untiled",
        "    before = BEFORE.get((x.shape, tile), amax)\n    BEFORE[x.shape, tile] = amax\n"
        "    scales = scales_of(before, powers)\n    values = untiled",
        *CUT, ("gradients", "gradient norm", "parameters"), ("sent", "kept"),
        more=(("def quantize(x, tile, powers", "BEFORE = {}\n\n\ndef quantize(x, tile, powers"),),
    ),
]
