"""The exhibits of chapter 06: keys that travel, sums that are merged, sequences that are cut, and
documents and windows, which a cut must not lose."""

from lab.museum.exhibit import AT_FULL_SIZE, Exhibit

FILE = "06_context_parallel.py"
ZIGZAG = 2, "--batch 6 --micro-batch 2 --ignore 0.4"
FOUR = 4, "--batch 3 --micro-batch 1 --ignore 0.4 --clip 0.5"
RING = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --variant ring"
GATHER = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --variant gather"
WINDOW = 4, "--batch 3 --micro-batch 1 --ignore 0.4 --variant ring --window 3"
PACKED = 4, "--batch 3 --micro-batch 1 --ignore 0.4 --documents 6"
PADDED = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --documents 6 --cut document"
ULYSSES = 4, "--batch 3 --micro-batch 1 --ignore 0.4 --variant ulysses"
INNER = 4, "--batch 3 --micro-batch 1 --ignore 0.4 --inner 2"
FIRST = ("        self.starts, self.first = starts, starts.maximum(places - (window or len(starts))"
         " + 1)\n")
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
        FILE, "        targets = F.pad(targets, (0, 1), value=-100)[:, mine]\n",
        "        valid_here = targets[:, mine] >= 0\n"
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
        FILE, "        rope.positions = (mine - layout.starts[mine]).to(weight.device)\n",
        "        rope.positions = (mine - mine[0]).to(weight.device)\n",
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
        FILE, "slice(own, end), True, None", "slice(begin, end), True, None",
        *GATHER, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
        (("        if begin < own: ", "        if begin < own == end: "),
         ("key > key[:, None]", "key > key[: q.shape[2], None]")),
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
    Exhibit(
        "huggingface/accelerate#4177", "context parallelism drops the layers' windows",
        "A hook put is_causal=True in the place of whatever mask a layer was given, since a ring "
        "knew no other. Its docstring said that it checks for a causal mask and raises an error "
        "else; it did neither. So layers with a window of 128 or 1024 tokens saw all of the "
        "sequence, and the loss looked plausible. Such models are refused now. Here the ring "
        "goes all the way round as well, which shows in what is sent.",
        FILE, FIRST, "        self.starts, self.first = starts, starts\n",
        *WINDOW, ("first loss", "loss", "gradients", "gradient norm", "parameters", "sent"),
        ("kept",),
    ),
    Exhibit(
        "axolotl-ai-cloud/axolotl#3867", "a ring that does not know of documents",
        "Where documents end was handed to a ring that had no use for it, and threw it away. So "
        "each document saw all those before it in the sequence. With five documents and two ranks "
        "the first loss was 5.81 in place of 3.17; with a single one it was the same to the bit, "
        "and that is what one tests. The numbers are the reporter's, who reproduced what another "
        "one had seen.",
        FILE, FIRST, "        self.starts, self.first = starts, starts * 0\n",
        *PACKED, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "radixark/miles#2038", "a window ends at the sequence's begin, not at the document's",
        "The window of a token was cut off at position 0 of the whole packed stream. So the first "
        "tokens of a document saw the last ones of the document before. Positions were not reset "
        "either; with RoPE, which knows distances alone, that does no harm by itself. Both were "
        "found when packing was added to a model with windows.",
        FILE, FIRST, "        self.starts = starts\n"
        "        self.first = (places - (window or len(starts)) + 1).clamp(min=0)\n",
        WINDOW[0], WINDOW[1] + " --documents 6",
        ("first loss", "loss", "gradients", "gradient norm", "parameters"), ("sent", "kept"),
    ),
    Exhibit(
        "NVIDIA-NeMo/Megatron-Bridge#2656", "a window with one token more",
        "In one library a window counts the token itself. In another one it says how far back a "
        "token sees, so that W are W + 1 tokens. Between the two the number was handed over as it "
        "was for three families of models, and for a fourth one 128 was written down, and not 127.",
        FILE, FIRST, FIRST.replace(" + 1)", ")"),
        *WINDOW, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/TransformerEngine#1930", "the last token of an odd document is lost",
        "Documents were padded, so that two ranks can share each. But how many of its tokens count "
        "was computed from what one rank has: of 7 tokens, 7 // 2 on each of two ranks, and so 6 "
        "in all. Attention took the seventh for padding, without a word. A script of ten tokens "
        "showed it. Here that token is gone for all of the model, and its target with it.",
        FILE, "        source.append(F.pad(document, ",
        "        counts = torch.arange(len(document)) < len(document) // 2 * 2\n"
        "        source.append(F.pad(document.where(counts, -1), ",
        *PADDED, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "OpenRLHF/OpenRLHF#1338", "padding is a target",
        "Texts of a batch were padded on the right, and the last token of each was to predict the "
        "padding behind it. That counted in the loss, and in the number of targets that it is "
        "divided by. It was so in pretraining alone; other masks were right. 150 texts, prepared "
        "in 18 ways, had 359 such targets. The mend has 19 tests, of which 11 failed before.",
        FILE, "        targets = F.pad(targets, (0, 1), value=-100)[:, mine]\n",
        "        targets = F.pad(targets, (0, 1), value=0)[:, mine]\n",
        *PADDED, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#4495", "where documents ended before they were padded",
        "Each document was padded to a multiple of twice the ranks, and then cut. A function "
        "looked into that layout with the boundaries from before the padding. So it took tokens of "
        "one document for another's, or failed with an error for very short ones. A test with odd "
        "lengths was added. There it was the prediction of a second token; here it is attention.",
        FILE, "        self.source, window = torch.arange(len(starts)), args.window\n",
        "        self.source, window, before = torch.arange(len(starts)), args.window, starts\n",
        *PADDED, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
        ((FIRST, "        missing = len(starts) - len(before)\n"
          "        before = F.pad(before, (0, missing), value=before.max())\n"
          + FIRST.replace("starts, starts.max", "starts, before.max")),),
    ),
    Exhibit(
        "pytorch/pytorch#134650", "a block that a query does not see has an lse of 0",
        "A query that sees no key of a block has an lse of -inf there. To avoid -inf - (-inf), "
        "which is no number, the maximum was set to 0 too early, and so was the lse. As a part of "
        "a merge that is a key with a score of 0 and no value: all other weights become smaller. "
        "There it was one of the parts that a long row of keys was split into; here it is a block "
        "of the ring, and a window ends in it.",
        FILE, "seeing = int((low < own - begin).sum())", "seeing = len(run)",
        *WINDOW, ("loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
        (("    lse = scores.logsumexp(-1)                          # (batch, heads, rows)\n",
          "    lse = scores.logsumexp(-1)\n"
          "    lse = lse.where(lse > -torch.inf, 0)\n"),),
    ),
    Exhibit(
        "apple/axlearn#842", "repeated kv heads, in another order",
        "Four query heads share two kv heads: heads 0 and 1 the first, and 2 and 3 the second. "
        "When a repeat was rewritten, it gave the kv heads as 0 1 0 1 in place of 0 0 1 1. Shapes "
        "are the same, and a new model would train well with it; one that exists has other heads "
        "then. Five pull requests later it was put right.",
        FILE, "(x.repeat_interleave(copies, dim=1) for x in (k, v))",
        "(x.repeat(1, copies, 1, 1) for x in (k, v))",
        *ULYSSES, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "feifeibear/long-context-attention#53", "a zig-zag's masks, and tokens in their old order",
        "Heads are exchanged between neighbours, and rings in zig-zag go around them. A reader saw "
        "that the tokens were still cut in the order of the sequence, which a zig-zag's masks are "
        "not made for. They have to be put into the other order first: one test did so, and "
        "another one, which he had read, did not. The code itself cannot tell.",
        FILE, "        mine = layout.positions[ring.rank()].chunk(heads.size())[heads.rank()]\n",
        "        mine = torch.arange(len(layout.starts)).chunk(ring.size())[ring.rank()]\n"
        "        mine = mine.chunk(heads.size())[heads.rank()]\n",
        *INNER, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#152261", "attention that the ring has not got hold of",
        "Context parallelism replaced one function of a module by a ring. A model that called "
        "attention by another name went on with the old one: each rank's queries met the keys of "
        "its own part, and nothing else. Outputs differed from those of one rank, though queries, "
        "keys and values were the same. No hop was made, and that is quick to see.",
        FILE, "at(part, hop) for hop in range(hops + 1)", "at(part, hop) for hop in range(1)",
        *ZIGZAG, ("first loss", "loss", "gradients", "gradient norm", "parameters", "sent"),
        ("kept",),
    ),
    Exhibit(
        "huggingface/transformers#46960", "the fused core is not taken, and nobody says so",
        "PyTorch's fused kernels did not take grouped heads of that width, so attention fell back "
        "to the one that has all scores in memory. It gives the same, so no number shows it, and "
        "there was no warning. With long sequences it ran out of memory.",
        FILE, '    return BlockCore(*fused if args.attention == "sdpa" else',
        '    return BlockCore(*fused if args.attention == "sdpa" and args.model.kv_heads == '
        "args.model.heads else",
        2, "--batch 6 --micro-batch 2 --ignore 0.4 --attention sdpa",
        *AT_FULL_SIZE,
        rehearsal="--ranks 16 --batch 1 --preset llama-8b --layers 1 --seq 131072",
    ),
    Exhibit(
        "Dao-AILab/flash-attention#2611", "where a document begins does not fit into an int32",
        "A kernel computed where a document begins from its cumulative length and the stride of a "
        "row, in 32 bits. In a real step token 225,304 with rows of 9,728 numbers lay at 2.19 G, "
        "which became negative. So gradients were silently wrong, or the address was none. Shorter "
        "sequences are right.",
        FILE, "        rope.positions = (mine - layout.starts[mine]).to(weight.device)\n",
        "        begin = layout.starts[mine].to(torch.int32) * weight.shape[1]\n"
        "        rope.positions = (mine - begin // weight.shape[1]).to(weight.device)\n",
        2, "--batch 6 --micro-batch 2 --ignore 0.4 --documents 6",
        *AT_FULL_SIZE,
        rehearsal="--ranks 16 --batch 1 --preset llama-405b --layers 1 --seq 262144 "
                  "--documents 65536",
    ),
]
