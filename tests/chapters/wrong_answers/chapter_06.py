"""Wrong answers to the exercises of chapter 06."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "06.1": [Wrong("parts[-1 - rank]", "parts[ranks + rank]", "item 2 is 8, and should be 14")],
    "06.2": [
        Wrong("everything, front, False", "everything, everything, False",
              "has 8 items, and should have 4"),
        Wrong("everything, everything, True", "everything, everything, False",
              "item 1 is False, and should be True"),
    ],
    "06.3": [
        Wrong(" * q.shape[-1] ** -0.5", "",
              "2.83 is the square root of 8, which is head_dim"),
        Wrong("(scores_of(q, k, causal) - lse[..., None]).exp()",
              "scores_of(q, k, causal).softmax(-1)", "of block2.attn.q, block2.attn.k and"),
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
    ],
    "06.6": [
        Wrong("ctx.group), None", "ctx.group) / ctx.group.size(), None",
              "16 is the square of 4, which is the number of ranks"),
        Wrong("ctx.join, ctx.split", "ctx.split, ctx.join", "returned an invalid gradient"),
    ],
    "06.7": [Wrong("(n - 1) / 2 + diagonal", "n - 1 + diagonal", "are 256, and should be 160")],
    "06.8": [
        Wrong('if scores_kept and recompute == "selective":', 'if recompute == "selective":',
              "item"),
        Wrong("(2 * n - rank) // (2 * n + 1)", "n // (2 * n)", "item"),
    ],
}
