"""The exhibits of kernels/: chapter 01 trains with them, in Triton's interpreter."""

from functools import partial

from lab.museum.exhibit import Exhibit

NORM, ATTENTION = "kernels/layernorm.py", "kernels/flash_attention.py"
# As few programs as show it, since the interpreter takes a while for each. Of a LayerNorm there is
# one a row, and in backward two that share the rows; of attention one for each sequence.
RUN = 1, "--kernels --layers 1 --heads 1 --kv-heads 1 --dim 16 --seq 4 --batch 2"
SHARED = 1, "--kernels --layers 1 --heads 1 --kv-heads 1 --dim 256 --seq 9 --batch 2"
BACKWARD = ("gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept")
Kernel = partial(Exhibit, chapter="01_single_gpu.py")

EXHIBITS = [
    Kernel(
        "unslothai/unsloth#4533", "a norm's kernel that has no gradient for its weight",
        "The backward of a fused RMSNorm gave None in place of the gradient of its weight. The "
        "kernel had been written for adapters, where norms do not train, and there it is right. "
        "With full fine-tuning all norms stayed as they were, and the model became another one "
        "than without the kernel. It was found in the gradients, of which some were None.",
        NORM, "        return dx, dweight, dbias, None, dx if ctx.residual else None\n",
        "        return dx, None, None, None, dx if ctx.residual else None\n", *RUN, *BACKWARD,
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
]
