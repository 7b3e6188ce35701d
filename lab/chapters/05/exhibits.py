"""The exhibits of chapter 05: gradients of parameters that have seen a part of the tokens."""

from lab.museum.exhibit import Exhibit

FILE = "05_sequence_parallel.py"
TWO = 2, "--batch 6 --micro-batch 2 --ignore 0.4"
CLIPPED = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5"
SHARED = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5 --kv-heads 1"
GATED = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --block llama"
MLP = "        sequence_parallel(mlp, mlp.columns, mlp.down, group, *SUB_LAYERS[variant])\n"
NORMS = "        in_full += block.norm1, block.norm2\n"
SUM = "    sums.finish()\n"
SEND = "            self.handles.append(dist.all_reduce(flat, group=group, async_op=True))\n"

EXHIBITS = [
    Exhibit(
        "EleutherAI/gpt-neox#1257", "LayerNorms' gradients are not summed over the sequence",
        "A LayerNorm that sees a part of the sequence has a part of its weight's gradient, on "
        "every rank another one. Hooks were to sum them, and never ran. So the copies drifted "
        "apart; the loss fell slowly, and stayed at about 8. Several repairs were needed.",
        FILE, NORMS, "        pass\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "EleutherAI/gpt-neox#1259", "and then they are averaged",
        "Once the hooks ran, they took the mean of the parts, and not their sum. All copies were "
        "alike now, and still the loss did not get below 7.5. The LayerNorms' weights moved too "
        "slowly, by the number of ranks. That replicas are equal does not mean that they are "
        "right.",
        FILE, SUM,
        "    sums.finish()\n"
        "    for name, p in model.named_parameters():\n"
        "        if 'norm' in name:\n            p.grad /= group.size()\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA-NeMo/RL#3716", "a second way to train leaves out the last sum",
        "A function that takes a step in parts scaled the gradients, summed them over the data-"
        "parallel ranks, and updated. The sum of norms' gradients over the tensor-parallel ranks "
        "was in another function, which only the usual way calls. Copies diverge a step at a time: "
        "nothing crashes, and nothing is NaN. (Here those of RMSNorms.)",
        FILE, "PartialSums(model.parameters())", "PartialSums([])",
        *GATED, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "PaddlePaddle/PaddleFleetX#671", "the bias has a hook, the weight has none",
        "The hook that sums a norm's gradient over the ranks was registered for its bias alone. A "
        "reviewer asked where the weight's had gone. One parameter of two is easily missed, and "
        "the loss does not tell.",
        FILE, "        for p in module.parameters():\n            p.partial = dist",
        "        for p in list(module.parameters())[-1:]:\n            p.partial = dist",
        *TWO, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "InternLM/InternLM#534", "summed where messages hide, and not else",
        "The sum of norms' gradients under sequence parallelism was there only if communication "
        "overlapped with compute. Without overlap it was missing. Two repairs before it had mended "
        "the same sum in other places.",
        FILE, "    for module in in_full:\n",
        "    for module in in_full if variant == 'ring' else []:\n",
        *CLIPPED, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#7452", "a shared head is summed with sequence parallelism alone",
        "A weight that all ranks hold, and that each applies to its own heads, has a part of its "
        "gradient on each, with sequence parallelism or without. It was summed only with it. So "
        "without it, copies differ after one update, and the next prediction is off. With it, the "
        "same check passes, and most tests have it.",
        FILE, "        if holders:\n            linear.weight.partial = holders\n",
        "        if holders and holders.size() < group.size():\n"
        "            linear.weight.partial = holders\n",
        *SHARED, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "fla-org/flash-linear-attention#1115", "all ranks but one read the first part",
        "In backward, a pointer into a tensor that all ranks share was not moved to the rank's "
        "own part. So every rank read the first one. Forward was exact, and on one rank so was "
        "backward: a test that looks at that rank alone passes. On the others gradients were off "
        "by about a tenth.",
        FILE, "            dw.addmm_(arrived.flatten(0, 1).T, chunks[owner].flatten(0, 1))\n",
        "            dw.addmm_(arrived.flatten(0, 1).T, chunks[0].flatten(0, 1))\n",
        2, "--batch 6 --micro-batch 2 --ignore 0.4 --variant ring",
        ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "bigscience-workshop/Megatron-DeepSpeed#338", "the gate is cut otherwise than up",
        "A gated MLP multiplies each hidden unit by its gate, so a rank needs both of the same "
        "units. Parts of gate and up, rank after rank, were put together for one rank as if all "
        "gates came first. With GELU the conversion was right, with SwiGLU the accuracy was that "
        "of chance. The first answer was that floating point rounds. The issue is open.",
        FILE, MLP,
        MLP + "        cut, = mlp.columns[-1].weight.cuts\n"
        "        theirs = cut._replace(index=cut.parts - 1 - cut.index)\n"
        "        mlp.columns[-1].weight.cuts = (theirs,)\n",
        *GATED, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#190626", "sums in fp32 are asked for, and half of them are in bf16",
        "FSDP was told to reduce gradients in fp32, and so it did, over the ranks that share them. "
        "Those of norms, which every tensor-parallel rank has, were summed over these first, and "
        "still in bf16. Every run with both on defaults was such. Somebody compared bits.",
        "common.py", SEND,
        SEND.replace("all_reduce(flat", "all_reduce(narrow := flat.to(torch.bfloat16)")
        + "            self.handles[-1].wait(), flat.copy_(narrow)\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
        chapter="05_sequence_parallel.py",
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#1446", "the last norm is not summed, all others are",
        "With tensor and sequence parallelism, the gradient of the final LayerNorm was another one "
        "on each rank before the update: 0.0030 on three of them and 0.0019 on the fourth, for one "
        "number. Each had that of its own tokens, and nobody added them up. A norm that lies "
        "outside of all blocks is easily left out of a list.",
        FILE, "    in_full = [model.embedding, model.head.norm, model.head.out]\n",
        "    in_full = [model.embedding, model.head.out]\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
]
