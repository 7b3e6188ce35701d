"""The exhibits of chapter 01: accumulation, normalisation, masters and scales on one GPU."""

from lab.museum.exhibit import Exhibit

FILE = "01_single_gpu.py"
# Three micro-batches, of which each has another number of valid targets.
UNEVEN = 1, "--batch 6 --micro-batch 2 --ignore 0.4"
CLIPPED = 1, "--batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5 --precision fp16"
SUMMED = 1, "--batch 6 --micro-batch 2 --precision bf16-fp32grad"
LOSS = ("        loss = loss_sum(forward(tokens), targets) / valid"
        "       # not by the micro-batch's own\n")

EXHIBITS = [
    Exhibit(
        "huggingface/transformers#34191", "a mean of the means of micro-batches",
        "Each micro-batch divided its loss by its own valid tokens, and the sum of them was "
        "divided by the number of micro-batches. So a token weighed more if its micro-batch was "
        "short. With sequences that had all been cut to one length, 32 micro-batches of 1 agreed "
        "with one of 32; with others the curves were far apart. For years nobody had compared "
        "them.",
        FILE, LOSS,
        "        loss = loss_sum(forward(tokens), targets) / (targets >= 0).sum() / "
        "len(micro_batches)\n",
        *UNEVEN, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "unslothai/unsloth-zoo#1023", "divided by the tokens, and by the micro-batches",
        "One flag decided whether the loss is divided by all tokens of the window, and another "
        "one whether it is divided by the number of micro-batches. With both, loss and gradients "
        "became smaller by that number. Nothing is said, and the loss falls as it should. It was "
        "found by reading.",
        FILE, "        backward(loss)\n", "        backward(loss / len(micro_batches))\n",
        *UNEVEN, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "ServiceNow/Fast-LLM#426", "masked tokens count in the mean, and in the test's mean",
        "The loss of tokens that are not masked was divided by the number of all tokens. The "
        "reference that a test compared it with did the same, and so the test passed. It was "
        "noticed since a test that was to fail with a mask did not fail. Only an oracle that "
        "somebody else has written can see such a thing.",
        FILE, LOSS,
        "        loss = loss_sum(forward(tokens), targets) / (targets.numel() * "
        "len(micro_batches))\n",
        *UNEVEN, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "karpathy/autoresearch#357", "the loss that is shown is the last micro-batch's",
        "In the loop over micro-batches the loss to be logged was overwritten, and not added up. "
        "Gradients were right. But what was logged, and what choices were based on, was the "
        "noisier loss of a part of the batch.",
        FILE, "        total += loss.detach()\n    return total\n",
        "        total = loss.detach() * len(micro_batches)\n    return total\n",
        *UNEVEN, ("first loss", "loss"),
        ("gradients", "gradient norm", "parameters", "sent", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#7839", "gradients of the steps before are still there",
        "For bf16 without ZeRO, zeroing the gradients was skipped, so that they piled up from step "
        "to step. The same optimizer also divided by a loss scale that nobody had multiplied with. "
        "It was seen since the norm grew with stage 0 alone, while stages 1 to 3 gave the same "
        "curve.",
        FILE,
        "    optimizer.zero_grad()\n    total = accumulate(forward, micro_batches, valid)\n\n",
        "    total = accumulate(forward, micro_batches, valid)\n\n",
        *UNEVEN, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "AMD-AGI/Primus#1046", "only the first micro-batch reaches the fp32 sums",
        "A flag that says who owns a gradient was set by the first backward of a step, and "
        "cleared once a step. Adding to the fp32 sums depended on it. So of all micro-batches "
        "only the first one counted, which was 1 of 32 in the run that showed it. Two runs with "
        "fixed seeds, of which one had no accumulation, gave it away.",
        FILE, "p.grad.float() if first else master.grad.add_(p.grad)     # 4\n",
        "p.grad.float() if first else master.grad\n",
        *SUMMED, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "victorchall/EveryDream2trainer#175", "clipped while still multiplied by the loss scale",
        "The gradients were clipped before they were divided by the loss scale. So a threshold of "
        "1 was one of gradients that are 65,536 times too large, and it changed its meaning with "
        "the scale. Users had learned to give thresholds of a hundred thousand or a million. With "
        "the usual one, training stood still.",
        FILE, "        limit = (clip / (norm + 1e-6)).clamp(max=1) if clip else 1\n",
        "        limit = (clip / (norm * loss_scale + 1e-6)).clamp(max=1) if clip else 1\n",
        *CLIPPED, ("loss", "gradients", "parameters"),
        ("first loss", "gradient norm", "sent", "kept"),
    ),
    Exhibit(
        "allenai/OLMo-core#828", "a block is computed again with other random numbers",
        "With activation checkpointing, backward runs a block once more. Its random numbers were "
        "not restored, which somebody had written down when no model used any. A later model had "
        "dropout, and then gradients belonged to another mask than the loss. To turn checkpointing "
        "off should change nothing, and at step 150 the loss was 2.195 instead of 2.495. (Models "
        "here have no dropout: planted is a bit of noise, in the second run of a block alone.)",
        FILE, "            x = recomputed(group, x) if again else group(x)\n",
        "            other = lambda x, block=group: block(x + 0.1 * torch.randn_like(x))\n"
        "            twice = iter([group, other])\n"
        "            x = recomputed(lambda x, twice=twice: next(twice)(x), x)\n",
        1, "--batch 6 --micro-batch 2 --recompute full",
        ("loss", "gradients", "gradient norm", "parameters", "kept", "FLOPs"),
        ("first loss", "sent"),
    ),
    Exhibit(
        "pytorch/pytorch#193671", "what is kept is copied before it is filled",
        "An activation with noise in it keeps the noise for backward. It gave the tensor to "
        "autograd first, and filled it after. Whoever copies at that moment, as a hook does that "
        "moves what is kept to the host, or a checkpoint, has a copy of what was there before. "
        "Forward agreed to the last bit, and gradients did not. (Nothing here has noise: planted "
        "is a copy of zeros.)",
        FILE, "        return host.copy_(x), x.device\n",
        "        return host.zero_(), x.device\n",
        1, "--batch 6 --micro-batch 2 --recompute offload",
        ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#290", "each block of a group has the group's input",
        "Blocks can be recomputed in groups: a group keeps its input alone, and runs again in "
        "backward. In the loop over a group's blocks each was given that input, and not what the "
        "block before had made of it. So only the last block of a group counted, and the others "
        "had no gradient. With groups of one block, which is the usual number, all was right.",
        FILE, "            x = recomputed(group, x) if again else group(x)\n",
        "            def run(x, group=group):\n"
        "                for block in group:\n"
        "                    out = block(x)\n"
        "                return out\n\n"
        "            x = recomputed(run, x) if again else group(x)\n",
        1, "--batch 6 --micro-batch 2 --recompute every --k 2",
        ("first loss", "loss", "gradients", "gradient norm", "parameters", "kept", "FLOPs"),
        ("sent",),
    ),
]
