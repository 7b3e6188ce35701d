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
              "dq and dk are 2.83 times what they should be"),
        Wrong("(scores_of(q, k, causal, low) - lse[..., None]).exp()",
              "scores_of(q, k, causal, low).softmax(-1)", "dq has every row multiplied by"),
    ],
    "06.4": [
        Wrong("torch.logaddexp(lse, block_lse)", "lse + torch.log(1 + torch.exp(block_lse - lse))",
              "about 1000, and lse 0: out is zero; lse is infinite"),
        Wrong("torch.logaddexp(lse, block_lse)", "(lse.exp() + block_lse.exp()).log()",
              "lse is infinite"),
        Wrong("    lse.copy_(total)", "    lse = total", "lse differs"),
    ],
    "06.5": [
        Wrong("k_here[:, :, keys], v_here[:, :, keys]", "k[:, :, keys], v[:, :, keys]",
              "all of whose blocks meet: on rank 0, dq differs"),
        Wrong("dkv = dq.new_zeros(2, *k.shape)", "dkv = k.new_zeros(2, *k.shape)",
              "in bfloat16, over 2 hops of 3 ranks: the result is 1,536, and should be 2,304"),
        Wrong("        at_home += receive()\n", "        receive()\n",
              "all of whose blocks meet: on rank 0, dk differs"),
        Wrong("    yield hops, kv", "    return\n    yield hops, kv",
              "around_the_ring of 4 ranks, over 3 hops: the result has 3 items, and should have 4"),
        Wrong("1 if hop < hops else -hop", "1",
              "over 2 hops, of the last of which some is seen: on rank 0, dk is wrong"),
    ],
    "06.6": [
        Wrong("ctx.group), None", "ctx.group) / ctx.group.size(), None",
              "from heads to tokens: the result is 0.25 times what it should be"),
        Wrong("ctx.join, ctx.split", "ctx.split, ctx.join", "of Exchange.forward: RuntimeError"),
    ],
    "06.7": [
        Wrong("span - 1 + 2 * diagonal", "2 * (span - 2 + 2 * diagonal)",
              "are 256, and should be 144: they are 16/9 of what"),
        Wrong("part % span", "part", "item 4 is 288, and should be 32"),
        Wrong("diagonal * span", "diagonal", "item 0 is 32, and should be 16: it is 2 times what"),
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
        Wrong("x.split([len(run) for run in runs], dim)", "x.chunk(len(runs), dim)",
              "item 3 is 14, and should be 3"),
    ],
    "06.12": [
        Wrong("x.repeat_interleave(copies, dim=1)", "x.repeat(1, copies, 1, 1)",
              "2 of k: on ranks 0, 2, 3, the result is wrong in [:, 2:6] and right elsewhere"),
        Wrong("max(group.size() // k.shape[1], 1)", "q.shape[1] // k.shape[1]",
              "all_to_all (on the wire)"),
    ],
    "06.13": [
        Wrong("F.pad(targets, (0, 1), value=-100)[:, mine]", "targets[:, mine]",
              "one of which has padding: on rank 0, norm is 1.1130154, and should be 0.9659513"),
        Wrong(" / valid", " / (targets >= 0).sum().clamp(min=1)",
              "on rank 0, loss is 5.5178406, and should be 1.8392802: it is 3 times what"),
        Wrong("    sums.finish()\n", "", "on rank 0, norm is 0.62933188"),
    ],
    "06.14": [
        Wrong("max(cfg.kv_heads, inner)", "cfg.kv_heads",
              "all_to_all[1] is 1,769,472, and should be 2,359,296: it is 3/4 of what"),
        Wrong("max(e, 4)", "e", "send[1] and send[2] are 786,432, and should be 983,040"),
        Wrong("2 if recompute == \"selective\" else 1 + forwards", "1 + forwards",
              "all_to_all[0] is 96, and should be 88"),
        Wrong("parts * keys", "n * keys", "reduce_scatter[1]"),
        Wrong("hops and variant in", "variant in", "send"),
        Wrong("(1 + forwards) * e + max(e, 4)", "2 * (1 + forwards) * e", "send[1]"),
    ],
}
