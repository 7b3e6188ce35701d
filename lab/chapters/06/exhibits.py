"""The exhibits of chapter 06: keys that travel, sums that are merged, sequences that are cut."""

from lab.museum.exhibit import Exhibit

FILE = "06_context_parallel.py"
ZIGZAG = 2, "--batch 6 --micro-batch 2 --ignore 0.4"
FOUR = 4, "--batch 3 --micro-batch 1 --ignore 0.4 --clip 0.5"
RING = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --variant ring"
GATHER = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --variant gather"
LOSS = "        loss = loss_sum(model(tokens), targets) / valid\n"

EXHIBITS = [
    Exhibit(
        "huggingface/diffusers#14265", "the ring's backward has the keys of hop 0, at every hop",
        "Keys and values travel around the ring. In backward, what was saved is read anew at each "
        "hop, and that is the rank's own keys, whatever has arrived. Forward is exact, nothing is "
        "NaN, no error is raised. Gradients are wrong wherever a ring has more than one rank.",
        FILE, "dout[:, :, rows], q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys],\n",
        "dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys],\n",
        *ZIGZAG, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "zhuzilin/ring-flash-attention#42", "what is merged was rounded to 16 bits",
        "Each block's result came back in 16 bits, before it was added to a sum in float32. With "
        "more ranks there are more such roundings. For a model of 405 G parameters gradients grew "
        "without bound, while the loss of the forward looked reasonable. The issue is open.",
        FILE, "                merge(out[:, :, rows], lse[:, :, rows], *block)\n",
        "                merge(out[:, :, rows], lse[:, :, rows],\n"
        "                      *(x.bfloat16().to(x) for x in block))\n",
        *ZIGZAG, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "verl-project/verl#4250", "targets are shifted after the sequence has been cut",
        "Each rank shifted the tokens of its own part to get its targets. At the end of a part "
        "the next token lies on another rank, and in its place came the part's own first one. It "
        "showed as an outlier just at the cut. The loss had a wrong factor as well, and the norm "
        "agreed only after the second repair.",
        FILE, "        tokens, targets = tokens[:, positions], targets[:, positions]"
        "   # (micro_batch, s/N)\n",
        "        valid_here = targets[:, positions] >= 0\n"
        "        tokens = tokens[:, positions]\n"
        "        targets = tokens.roll(-1, dims=1).masked_fill(~valid_here, -100)\n",
        *RING, ("first loss", "loss", "gradients", "gradient norm", "parameters"), ("sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#906", "multiplied by cp, and averaged over dp alone",
        "The loss was multiplied by the number of context-parallel ranks, to undo a mean over all "
        "ranks. Later that mean became one over the data-parallel ranks alone, and the factor "
        "stayed. So cp 4 and dp 2 gave other gradients than dp 8 for the same batch. It was "
        "confirmed, and mended.",
        FILE, LOSS, LOSS + "        total -= loss.detach() * (dist.get_world_size() - 1)\n"
        "        loss = loss * dist.get_world_size()\n",
        *ZIGZAG, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "ByteDance-Seed/VeOmni#1115", "gradients are summed over dp, where only cp has ranks",
        "The wrapper that sums gradients was given the data-parallel group, in which the "
        "sequence's ranks are not. If all ranks share a sequence, that group has one member, and "
        "the sum does nothing. Each rank kept the gradient of its own part. All other places had "
        "used the right group.",
        FILE, "PartialSums(model.parameters())", "PartialSums([])",
        *ZIGZAG, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "PrimeIntellect-ai/prime-rl#1957", "a masked mean on each rank of the sequence",
        "Each rank took the mean over its own tokens that are not masked, and then the ranks' "
        "means were averaged. But prompts are masked, and lie on the first ranks. So one token "
        "that counts may have five times the influence of another. It was derived, not measured.",
        FILE, LOSS,
        "        loss = loss_sum(model(tokens), targets) / (targets >= 0).sum().clamp(min=1)\n"
        "        loss = loss / len(micro_batches) / dist.get_world_size()\n",
        *RING, ("first loss", "loss", "gradients", "gradient norm", "parameters", "kept"),
        ("sent",),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#5243", "positions begin anew on each rank",
        "A table of rotary angles was indexed by a token's place in its part, without the offset "
        "of that part: rank 0 used 0, 3, 0, 3 where it should have been 0, 3, 4, 7. Attention "
        "still works, with distances that are not those of the text. Tests now hold both "
        "conventions.",
        FILE,
        "    model.block1.attn.rope.positions = positions        # all blocks share this one\n",
        "    model.block1.attn.rope.positions = positions - positions[0]\n",
        *RING, ("gradients", "gradient norm", "parameters"), ("first loss", "loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#1464", "gradients of keys come home one hop short",
        "The gradients of queries, keys and values of ring attention differed from those of one "
        "card. Relative errors were up to 1.2 in activations and 2.3 in gradients of weights, and "
        "grew from the last layer to the first. Forward agreed.",
        FILE, "        at_home += receive()\n", "        receive()\n",
        *FOUR, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "Dao-AILab/flash-attention#581", "the causal mask begins in another corner",
        "Where queries and keys are not as many, a causal mask can be aligned to the first or to "
        "the last of them. A library changed from one to the other, and for as many of both "
        "nothing changed. Elsewhere the outputs differed by 0.24 in the mean, and some rows were "
        "zeros.",
        FILE,
        "    mask = q.new_full((rows, keys), -torch.inf).triu(1 + keys - rows)\n",
        "    mask = q.new_full((rows, keys), -torch.inf).triu(1)\n",
        *GATHER, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#775", "every bucket is sent twice",
        "Where gradients are not sent in backward, the call that finishes a bucket starts it, and "
        "it was called after it had been started. There each sum was divided by the ranks, so the "
        "second one changed nothing but the time. Where nothing is divided, as here, all gradients "
        "are too large by the number of ranks.",
        FILE, "    sums.finish()\n",
        "    sums.finish()\n    PartialSums(model.parameters()).finish()\n",
        *ZIGZAG, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
]
