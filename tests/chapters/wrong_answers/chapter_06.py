"""Wrong answers to the exercises of chapter 06."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "06.1": [
        Wrong("(part, -1 - part)", "(part, parts + part)", "item 1[0] is 12, and should be 10"),
        Wrong("text in by_document(chunk, starts)", "text in [chunk]",
              "has 2 items, and should have 4"),
        Wrong("text.split(window or len(text))", "[text]", "has 1 items, and should have 3"),
        Wrong("    if zigzag:\n", "    if True:\n", "has 2 items, and should have 1"),
    ],
    "06.2": [
        Wrong("[first[run[0]], run[0],", "[run[0] * 0, run[0],", "items, and should have 1"),
        Wrong("int((low < own - begin).sum())", "len(run)", "item 0.rows and item 0.low have 3"),
        Wrong("        row += len(run)\n", "            row += len(run)\n", "item 1.rows[0] is 0"),
        Wrong("slice(own, end), True, None", "slice(begin, end), True, None", ".keys"),
        Wrong("own < end", "own <= end", "has 4 items, and should have 2"),
    ],
    "06.3": [
        Wrong(" * q.shape[-1] ** -0.5", "",
              "2.83 is the square root of 8, which is head_dim"),
        Wrong("(scores_of(q, k, causal, low) - lse[..., None]).exp()",
              "scores_of(q, k, causal, low).softmax(-1)", "of block2.attn.q, block2.attn.k and"),
    ],
    "06.4": [
        Wrong("torch.logaddexp(lse, block_lse)", "lse + torch.log(1 + torch.exp(block_lse - lse))",
              "infinite or not a number"),
        Wrong("torch.logaddexp(lse, block_lse)", "(lse.exp() + block_lse.exp()).log()",
              "lse is infinite"),
        Wrong("    lse.copy_(total)", "    lse = total", "lse differs"),
    ],
    "06.5": [
        Wrong("k_here[:, :, keys], v_here[:, :, keys]", "k[:, :, keys], v[:, :, keys]",
              "of block2.attn.q, block2.attn.k and block2.attn.v, are off"),
        Wrong("dkv = dq.new_zeros(2, *k.shape)", "dkv = k.new_zeros(2, *k.shape)", "send"),
        Wrong("        at_home += receive()\n", "        receive()\n",
              "of block2.attn.k and block2.attn.v, are off"),
        Wrong("1 if hop < hops else -hop", "1", "of block2.attn.k and block2.attn.v, are off"),
    ],
    "06.6": [
        Wrong("ctx.group), None", "ctx.group) / ctx.group.size(), None",
              "16 is the square of 4, which is the number of ranks"),
        Wrong("ctx.join, ctx.split", "ctx.split, ctx.join", "returned an invalid gradient"),
    ],
    "06.7": [
        Wrong("span - 1 + 2 * diagonal", "2 * (span - 2 + 2 * diagonal)",
              "are 256, and should be 144: 16/9 of that"),
        Wrong("part % span", "part", "item 4 is 288, and should be 32"),
        Wrong("diagonal * span", "diagonal", "item 0 is 32, and should be 16: 2 times that"),
        Wrong("part % span + diagonal", "span - 1 - part % span + diagonal", "item 0 is 256"),
    ],
    "06.8": [
        Wrong("((window or seq) - 1) /", "(window or seq) /", "one too many"),
        Wrong("min(n - 1, reaches) if variant == \"ring\" else (n - 1) * (window != 1)",
              "min(n - 1, reaches)",
              "item 1 is 2, and should be 3: one too few"),
    ],
    "06.9": [
        Wrong("-len(document) % multiple", "multiple - len(document) % multiple",
              "source and starts have 24 items, and should have 16"),
        Wrong("value=-1", "value=0", "source[11] are 0, and should be -1"),
        Wrong("[len(now)]", "[int(document[0])]", "starts[11] are 3, and should be 4: one too few"),
    ],
    "06.10": [
        Wrong("key > key[:, None]", "key >= key[:, None]", "item 0[0]"),
        Wrong("key < low[:, None]", "key <= low[:, None]",
              "item 0[0], item 1[1] and item 2[3] are 0, and should be 1"),
    ],
    "06.11": [
        Wrong("key=lambda i: runs[i][0]", "key=lambda i: len(runs[i])",
              "item 2 is 14, and should be 2"),
        Wrong("x.split([len(run) for run in runs], dim)", "x.chunk(len(runs), dim)", "IndexError"),
    ],
    "06.12": [
        Wrong("x.repeat_interleave(copies, dim=1)", "x.repeat(1, copies, 1, 1)",
              "so is the loss, so look at forward first"),
        Wrong("max(group.size() // k.shape[1], 1)", "q.shape[1] // k.shape[1]",
              "all_to_all (on the wire)"),
    ],
    "06.13": [
        Wrong("F.pad(targets, (0, 1), value=-100)[:, mine]", "targets[:, mine]",
              "so is the loss, so look at forward first"),
        Wrong(" / valid", " / (targets >= 0).sum().clamp(min=1)", "gradients are"),
        Wrong("    sums.finish()\n", "", "as where nobody waits for a collective"),
    ],
    "06.14": [
        Wrong("max(cfg.kv_heads, inner)", "cfg.kv_heads",
              "all_to_all[1] is 1,769,472, and should be 2,359,296: 3/4 of that"),
        Wrong("max(e, 4)", "e", "send[1] and send[2] are 786,432, and should be 983,040"),
        Wrong("2 if recompute == \"selective\" else 1 + forwards", "1 + forwards",
              "all_to_all[0] is 96, and should be 88"),
        Wrong("parts * keys", "n * keys", "reduce_scatter[1]"),
        Wrong("hops and variant in", "variant in", "send"),
        Wrong("(1 + forwards) * e + max(e, 4)", "2 * (1 + forwards) * e", "send[1]"),
    ],
}
