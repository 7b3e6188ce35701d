"""The exhibits of chapter 04: f and g, heads that ranks share, a vocabulary that is cut."""

from lab.museum.exhibit import Exhibit

FILE = "04_tensor_parallel.py"
TWO = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5"
GATED = 2, "--block llama --batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5"
# More ranks than kv heads: two ranks hold the same one.
SHARED = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5 --kv-heads 1"
SUM = ("    sums.finish()\n\n"
       "    norm = grad_norm(model.parameters(), group)\n")
COPY_IN = "        return summed(gradient, ctx.group), None\n"

EXHIBITS = [
    Exhibit(
        "pytorch/torchtitan#1805", "f's backward hands on a part of the gradient",
        "Inputs were the same on all ranks, and the weights were cut. So each rank has a part of "
        "the input's gradient, and these are to be summed. Where a plain tensor had been made of "
        "a distributed one, without a word about its gradient, nobody summed them. After the "
        "repair a trace shows one more all_reduce in each layer.",
        FILE, COPY_IN, "        return gradient, None\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#172932", "g's backward sums what is whole already",
        "From a partial tensor to a local one and back should change nothing. But in backward the "
        "gradient was made whole by the one, and then taken for partial by the other. Forward was "
        "the same to the last bit. A script with two ranks shows the difference.",
        FILE,
        "    @staticmethod\n    def backward(ctx, gradient):\n        return gradient, None\n",
        "    @staticmethod\n    def backward(ctx, gradient):\n"
        "        return summed(gradient, dist.group.WORLD), None\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "NovaSky-AI/SkyRL#1886", "the sum goes into a copy, and the original is handed on",
        "In backward, a contiguous version of the gradient was summed in place, and the gradient "
        "itself was returned. If it is contiguous, both are one tensor, and all is right. If not, "
        "the sum is made, sent and thrown away. A reviewer noticed it while reading.",
        FILE, COPY_IN,
        "        summed(gradient, ctx.group)\n        return gradient, None\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#7452", "the normaliser is counted on each rank",
        "With an option to gather, logits were complete on every rank, and the loss still summed "
        "exponentials over the ranks. So the loss was too large by log(2) for two ranks, 1.1334 "
        "instead of 0.4402. Its gradient, too, was that of other probabilities. An audit that runs "
        "on a CPU shows it.",
        FILE, "        sum_of_exponentials, target_logit = sums\n",
        "        sum_of_exponentials, target_logit = sums\n"
        "        sum_of_exponentials *= group.size()\n",
        *TWO, ("first loss", "loss", "gradients", "gradient norm", "parameters"), ("sent", "kept"),
    ),
    Exhibit(
        "apple/ml-cross-entropy#42", "each rank has another gradient of the head's input",
        "A fused kernel stands for a head that is cut by vocabulary, and for the loss. Whoever "
        "calls it expects the gradient of its input to be summed over the ranks, and it was that "
        "of the rank's own columns. Curves before and after the repair were shown beside those of "
        "one rank.",
        FILE, "        return self.inner(CopyIn.apply(x, self.group))\n",
        "        return self.inner(x)\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "bigcode-project/Megatron-LM#11", "shared keys' gradient is summed, shared values' is not",
        "With one head of keys and values for all queries, each rank holds it, and has the "
        "gradient of its own query heads. The sum of these forgot the biases, one of two "
        "optimizers forgot it altogether, and of several parts of a model only the first was "
        "visited. Its authors found it when they read their code again.",
        FILE, "        if holders:\n            linear.weight.partial = holders\n",
        "        if holders and linear is attn.k:\n"
        "            linear.weight.partial = holders\n",
        *SHARED, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "NVIDIA-NeMo/Automodel#3822", "what all ranks hold starts to differ",
        "Parameters that each tensor-parallel rank holds as a whole were not kept alike: neither "
        "at the start nor after updates. It showed by a checkpoint. To save one of the copies, "
        "and to load it everywhere, changed the model. The repair sums those gradients of which "
        "each rank has the part of its own heads.",
        FILE, "PartialSums(model.parameters())", "PartialSums([])",
        *SHARED, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "NVIDIA-NeMo/RL#3788", "what is replicated counts in the norm on every rank",
        "The squares of all gradients were summed over the tensor-parallel ranks, wherever they "
        "lie. So LayerNorms, which every rank has as a whole, counted as often as there are ranks. "
        "In a measured run the loss agreed in all digits at step 1, and the norm did not.",
        FILE, SUM,
        "    sums.finish()\n\n"
        "    square = sum(p.grad.square().sum() for p in model.parameters())\n"
        "    dist.all_reduce(square, group=group)\n    norm = square.sqrt()\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "bigscience-workshop/Megatron-DeepSpeed#338", "the gate of one hidden unit meets another's",
        "A rank has its part of the gate above its part of up, in one matrix. To make one model of "
        "four ranks', a script laid these matrices end to end: so half of what it took for the "
        "gate was up, and units met the gates of others. With GELU the script was right, with "
        "SwiGLU answers were as good as chance. The first reply was that sums of floating-point "
        "numbers depend on their order.",
        FILE, "        block.mlp = sub_layer(mlp, mlp.columns, mlp.down, group)\n",
        "        block.mlp = sub_layer(mlp, mlp.columns, mlp.down, group)\n"
        "        [cut] = mlp.gate.weight.cuts\n"
        "        cut = cut._replace(index=group.size() - 1 - cut.index)\n"
        "        mlp.gate.weight.cuts = [cut]\n",
        *GATED, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "areal-project/AReaL#335", "the norm has used up what was to be clipped",
        "The parameters were handed over as a generator. The norm walked through it, and for the "
        "clipping after it nothing was left. So gradients were never clipped, although the norm "
        "that was logged was right. The same repair mends a weight that was reduced over the wrong "
        "group.",
        FILE, "        clip_grads_with_norm_(model.parameters(), clip, norm)\n"
        "    optimizer.step()\n    return total, norm\n\n\ndef torch_step",
        "        pass\n    optimizer.step()\n"
        "    return total, norm\n\n\ndef torch_step",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "AMD-AGI/Primus#1046", "later micro-batches are not added to the fp32 sums",
        "Each backward adds its gradients to fp32 sums. A flag that says that they are there was "
        "set by the first one and taken back once a step, so the later ones were dropped. The more "
        "micro-batches, the less of the batch was trained on, and the loss fell all the same.",
        FILE, "        loss.backward()\n        total += loss.detach()\n    sums.finish()",
        "        first = [p.grad.clone() for p in model.parameters()] if total else []\n"
        "        loss.backward()\n        total += loss.detach()\n"
        "        for p, grad in zip(model.parameters(), first):\n            p.grad.copy_(grad)\n"
        "    sums.finish()",
        2, "--batch 6 --micro-batch 2 --ignore 0.4 --precision bf16 --dtype float64",
        ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#1801", "what all ranks hold is clipped on the first one alone",
        "One function gave the gradients for the norm and those to be clipped. For the norm it "
        "leaves out copies on all ranks but the first, and so the other ranks' LayerNorms were "
        "never clipped. BLOOM, a model of 176 B parameters, was trained with it: loss and norm "
        "were as they should be, and the copies drifted apart. It was noticed by chance, when the "
        "checkpoints of several ranks were to become one.",
        FILE, "        clip_grads_with_norm_(model.parameters(), clip, norm)\n"
        "    optimizer.step()\n    return total, norm\n\n\ndef torch_step",
        "        mine = [p for p in model.parameters() if group.rank() == 0 or p.cuts]\n"
        "        clip_grads_with_norm_(mine, clip, norm)\n"
        "    optimizer.step()\n    return total, norm\n\n\ndef torch_step",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
]
