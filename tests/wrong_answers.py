"""Wrong answers to the exercises, as students give them, and what they are told.

Of each exercise one answer at least: `right`, a piece of the solution that its functions have once,
and `wrong`, what stands there instead. The grader must find it wrong and say the words `says`.
"""

from typing import NamedTuple


class Wrong(NamedTuple):
    right: str
    wrong: str
    says: str


WRONG = {
    # 01
    # 02
    # 03
    # 04
    "04.1": [
        Wrong("summed(gradient, ctx.group)", "gradient",
              "of head.norm, differ between ranks that hold the same, and add up to"),
        Wrong("summed(gradient, ctx.group)", "summed(gradient, ctx.group) / ctx.group.size()",
              "4 is the number of ranks"),
    ],
    "04.2": [
        Wrong("return gradient, None", "return summed(gradient, dist.group.WORLD), None",
              "4 is the number of ranks"),
    ],
    "04.3": [
        Wrong("(gradient * is_valid)", "gradient.expand_as(is_valid)",
              "the loss is right, so look at backward"),
        Wrong("-scale * is_mine[..., None]", "-scale",
              "the loss is right, so look at backward"),
        Wrong("logits = logits.masked_fill(is_padding, -torch.inf)", "", "so is the loss"),
        Wrong("dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)", "", "so is the loss"),
        Wrong("logits -= largest[..., None]", "", "infinite or not a number"),
        Wrong("local_target < columns", "local_target <= columns", "so is the loss"),
        Wrong("* is_valid).sum()", "* is_valid).sum() / is_valid.sum()", "the gradients are right"),
    ],
    "04.4": [
        Wrong("dist.all_reduce(dx,", "dist.all_reduce(dx.clone(),",
              "of head.norm, differ between ranks that hold the same, and add up to"),
        Wrong("dx += gradient @ weight", "dx = gradient @ weight", "of block2.norm1, are off"),
    ],
    "04.5": [
        Wrong("sum_partial_grads(model.parameters())", "",
              "gradients of k and v differ between ranks that hold the same, and add up to"),
        Wrong("/ valid", "/ (targets != -100).sum()", "own means"),
        Wrong("grad_norm(model.parameters(), group)", "grad_norm(model.parameters())",
              "the squares were not summed over the ranks"),
        Wrong("total += loss.detach()", "total = loss.detach()",
              "the loss is that of the last micro-batch alone"),
        Wrong("clip_grads(model.parameters(), norm, clip)", "pass", "--clip"),
        Wrong("optimizer.zero_grad()", "", "which were not set to zero"),
        Wrong("for tokens, targets in micro_batches:",
              "for tokens, targets in micro_batches:\n        optimizer.zero_grad()",
              "those of the last micro-batch"),
    ],
    "04.6": [
        Wrong("4 * cfg.layers + 2", "2 * cfg.layers + 2", "is 37, and should be 61"),
        Wrong("wire += 2 * (copies - 1) / copies", "wire += 2 * (t - 1) / t", "all_reduce[2] is"),
    ],
    "04.7": [Wrong("1 + 8 * dim", "4 * dim", "should be 15.9")],
    # 05
    "05.1": [
        Wrong("reduce_scatter(gradient, ctx.group)",
              "gradient.chunk(ctx.group.size(), dim=1)[ctx.group.rank()]", "of block2.norm2, are"),
        Wrong("all_gather(gradient, ctx.group)",
              "all_gather(gradient, ctx.group) / ctx.group.size()",
              "of block2.mlp.down, are 1/4 of those of one GPU: 4 is the number of ranks"),
    ],
    "05.2": [
        Wrong("return scattering.wait()",
              "return dx.chunk(ctx.group.size(), dim=1)[ctx.group.rank()]",
              "of block2.norm2, are"),
        Wrong("dx += gradient @ weight", "dx = gradient @ weight", "of block2.norm1, are"),
    ],
    "05.3": [
        Wrong("""(rank - hop) % t, chunk
        chunk = arriving.wait()
    yield (rank + 1) % t""", """(rank + hop) % t, chunk
        chunk = arriving.wait()
    yield (rank - 1) % t""", "look at forward first"),
        Wrong("yield (rank + 1) % t", "yield (rank - 1) % t", "RingColumns.forward"),
        Wrong("chunk = arriving.wait()", "arriving.wait()", "look at forward first"),
    ],
    "05.4": [
        Wrong("partial((rank - 1) % t)", "partial(rank)", "look at forward first"),
        Wrong("total += arriving.wait()", "arriving.wait()", "look at forward first"),
    ],
    "05.5": [
        Wrong("total += of_weight[owner].flatten", "total = of_weight[owner].flatten",
              "gradients of q, k, v and up are zero, all others equal"),
        Wrong("in ring_gather(x, ctx.group):", "in [(ctx.group.rank(), x)]:",
              "gradients of q, k, v and up are off"),
    ],
    "05.6": [
        Wrong("        in_full += block.norm1, block.norm2\n", "",
              "gradients of the LayerNorms of block1 and block2 differ between ranks"),
        Wrong("for p in module.parameters():", "for p in [module.weight]:",
              "gradients of the LayerNorms' biases differ between ranks"),
    ],
    "05.7": [Wrong('1 if variant == "kept" else 1 / t', "1", "inputs is 1, and should be 0.25")],
    # 06
    "06.1": [Wrong("parts[-1 - rank]", "parts[ranks + rank]", "item 2 is 8, and should be 14")],
    "06.2": [
        Wrong("everything, front, False", "everything, everything, False",
              "has 8 items, and should have 4"),
        Wrong("everything, everything, True", "everything, everything, False",
              "item 1 is False, and should be True"),
    ],
    "06.3": [
        Wrong(" * q.shape[-1] ** -0.5", "",
              "of block2.attn.q and block2.attn.k, are 2.83 times"),
        Wrong("(scores_of(q, k, causal) - lse[..., None]).exp()",
              "scores_of(q, k, causal).softmax(-1)", "of block2.attn.q, block2.attn.k and"),
    ],
    "06.4": [
        Wrong("torch.logaddexp(lse, block_lse)", "lse + torch.log(1 + torch.exp(block_lse - lse))",
              "infinite or not a number"),
        Wrong("torch.logaddexp(lse, block_lse)", "(lse.exp() + block_lse.exp()).log()",
              "lse is infinite"),
        Wrong("    lse.copy_(total)", "    lse = total", "lse differs in all numbers"),
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
              "are 1/16 of those of one GPU"),
        Wrong("ctx.join, ctx.split", "ctx.split, ctx.join", "returned an invalid gradient"),
    ],
    "06.7": [Wrong("(n - 1) / 2 + diagonal", "n - 1 + diagonal", "are 256, and should be 160")],
    # 07
    # 08
    # 09
    # elu
    # layernorm
    # flash_attention
}
