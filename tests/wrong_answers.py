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
        Wrong("/ valid", "/ (targets != -100).sum()",
              "the mean of the micro-batches' own means"),
        Wrong("grad_norm(model.parameters(), group)", "grad_norm(model.parameters())",
              "the squares were not summed over the ranks"),
        Wrong("total += loss.detach()", "total = loss.detach()",
              "the loss is that of the last micro-batch alone"),
        Wrong("clip_grads(model.parameters(), norm, clip)", "pass",
              "they were not clipped by it"),
        Wrong("/ valid", "/ valid / len(micro_batches)", "3 is the number of micro-batches"),
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
    # 07
    "07.1": [
        Wrong("stage % self.depth == 0, (stage + 1) % self.depth == 0",
              "stage == 0, stage == len(self.ranks) - 1",
              "two pipelines with 2 stages each: F in stage 2 has 1 items, and should have 0"),
        Wrong('return [("F", stage, i)] if is_last else [("F", stage, i), ("B", stage + 1, i)]',
              'return [] if is_last else [("B", stage + 1, i)]', "have 1 items, and should have 2"),
    ],
    "07.2": [
        Wrong('order("BW", range(v)[::-1])', 'order("BW", range(v))',
              "item 6 is 'BW 0 in stage 1', and should be 'BW 0 in stage 4'"),
        Wrong("slice * p + rank", "rank * v + slice",
              "item 0 is 'F 0 in stage 2', and should be 'F 0 in stage 1'"),
        Wrong("backwards):\n        actions += [*forwards[ahead + i:ahead + i + 1], backward]",
              "backwards):\n        actions += [backward, *forwards[ahead + i:ahead + i + 1]]",
              "rank 0 is 'F0 F1 F2 BW0 F3 BW1 F4 BW2 F5 BW3 BW4 BW5', and should be"),
    ],
    "07.3": [
        Wrong("k * rank", "rank", "zb-h2, 3 ranks, 5 micro-batches: rank 1 is"),
        Wrong("range(m + behind)", "range(m)", "B5 W4', and should be"),
    ],
    "07.4": [
        Wrong("now + len(actions[0].kind)", "now + 1", "dualpipe-v, 2 ranks, 4 micro-batches"),
        Wrong("                programs[message.receiver].append(message)\n", "",
              "rank 1 has 16 items, and should have 24"),
        Wrong('raise ValueError(f"ranks wait for each other; what is left: {left}")', "break",
              "a BW that comes before its F: AssertionError: ValueError not raised"),
    ],
    "07.5": [
        Wrong("        self.later.clear()\n", "",
              "all gradients but those of the embedding and the LayerNorms are off"),
        Wrong("self.later.copy()", "self.later",
              "all gradients but those of the embedding and the LayerNorms are missing"),
        Wrong("gradient if weight.grad is None else weight.grad.add_(gradient)", "gradient",
              "those of the last micro-batch alone"),
        Wrong("x, dy = x.detach(), dy.contiguous()", "pass", "activations, at the most: measured"),
    ],
    "07.6": [
        Wrong("grad_norm(model.parameters(), group)", "grad_norm(model.parameters())",
              "the squares were not summed over the ranks"),
        Wrong("    sum_partial_grads(model.parameters())\n", "",
              "all gradients differ between ranks that hold the same, and add up to"),
        Wrong("clip_grads(model.parameters(), norm, clip)", "pass", "they were not clipped by it"),
        Wrong("return loss, norm", "dist.all_reduce(loss, group=group)\n    return loss, norm",
              "the loss is 3.00 times that of one GPU: 3 is the number of ranks"),
    ],
    "07.7": [Wrong('"B": 0, "W": -1', '"B": -1, "W": 0', "item 2 is 1, and should be 2")],
    # 08
    # 09
    # elu
    "elu.1": [
        Wrong("1 + 3 * width", "3 * width", "21,000, and should be 22,000"),
        Wrong("numbers * 2 * width", "numbers * width", "2,000, and should be 4,000: 1/2 of that"),
    ],
    "elu.2": [Wrong("(2 * width)", "width", "1/2 of that")],
    "elu.3": [
        Wrong("tl.where(x > -0.4, series, tl.exp(x) - 1)", "tl.exp(x) - 1", "differs by up to 0.4"),
        Wrong("tl.where(x > -0.4, series, tl.exp(x) - 1)", "series",
              "wrong in [43:] and right elsewhere"),
        Wrong("tl.where(x > -0.4, series, tl.exp(x) - 1)", "libdevice.expm1(x)", "libdevice"),
    ],
    "elu.4": [
        Wrong("dy * alpha * tl.exp(x)", "alpha * tl.exp(x)", "wrong in [16 of 64]"),
        Wrong("dy * alpha * tl.exp(x)", "dy * tl.exp(x)", "is 1.43 times what it should be"),
        Wrong("tl.program_id(0).to(tl.int64) * BLOCK + ", "",
              "wrong in [16:40] and right elsewhere"),
        Wrong("dx, mask=inside)", "dx)", "wrong in [40:48] and right elsewhere: there it is zero"),
        Wrong("tl.where(x > 0, dy,", "tl.where(dy > 0, dy,", "wrong in [23 of 64]"),
    ],
    # layernorm
    "layernorm.1": [
        Wrong("rows * 2 * 4 + ", "", "3,075,072, and should be 3,083,072"),
        Wrong("4 if residual else 2", "3 if residual else 2", "4,619,072, and should be 6,155,072"),
    ],
    "layernorm.2": [
        Wrong("tl.where(inside, x - mean, 0)", "x - mean", "rstd differs"),
        Wrong("1 / tl.sqrt(tl.sum(centered * centered) / width + eps)",
              "1 / (tl.sqrt(tl.sum(centered * centered) / width) + eps)", "rstd differs"),
        Wrong("tl.sum(centered * centered) / width", "tl.sum(centered * centered) / (width - 1)",
              "rstd differs"),
        Wrong("tl.sum(centered * centered) / width", "(tl.sum(x * x) / width - mean * mean)",
              "rstd differs by up to 0.00061"),
        Wrong("tl.sum(x) / width", "tl.sum(x) / BLOCK", "mean is 0.625 times what it should be"),
        Wrong("x = x.to(sum_ptr.dtype.element_ty) ", "pass ", "mean differs"),
        Wrong(" * weight + bias, mask=inside)", " * weight + bias)",
              "y is wrong in [2, :3] and right elsewhere: there it is zero"),
        Wrong("rstd * weight + bias", "rstd", "y is wrong in [:2]"),
        Wrong("row * x_stride", "row * width", "y is wrong in [1] and right elsewhere"),
    ],
    "layernorm.3": [
        Wrong(" - n * (sum_gn / width)", "", "dx is wrong in [9 of 14]"),
        Wrong("g - sum_g / width", "g",
              "dx is wrong in [:10] and right elsewhere: there it has a number of its own added "
              "to every row; all else is right"),
        Wrong("dx = rstd * ", "dx = ", "dx is wrong in [:10]"),
        Wrong("tl.sum(dy * n, 0,", "tl.sum(g * n, 0,", "dweight differs"),
        Wrong("for step in tl.static_range(1, PARTS)", "for step in tl.static_range(1, 1)",
              "dx is wrong in [:10]"),
        Wrong("rows, tl.num_programs(1) * ROWS, num", "program * ROWS + ROWS, ROWS, num",
              "dx is wrong in [8:10]"),
        Wrong("inside = (row < rows) & (columns < width)", "inside = columns < width",
              "dx is wrong in [10:12]"),
        Wrong("dx += tl.load", "tl.load", "dx is wrong in [:10]"),
        Wrong("mine = program * width + columns", "mine = columns", "dbias differs"),
    ],
    # flash_attention
    "flash_attention.1": [
        Wrong(" - (dout * out).sum(-1, keepdim=True)", "",
              "dk differs by up to 0.39 times the largest number; all else is right"),
        Wrong("keepdim=True)) * q.shape[-1] ** -0.5", "keepdim=True))",
              "dq and dk are 4 times what they should be: 4 is the square root of 16"),
        Wrong("nan_to_num(neginf=math.inf)", "nan_to_num(neginf=-math.inf)",
              "dq is wrong in [:, :, :2] and right elsewhere: there it is nan"),
        Wrong("(weights.transpose(-1, -2) @ dout).sum(2)",
              "(weights.transpose(-1, -2) @ dout).mean(2)",
              "dv is 0.5 times what it should be; all else is right"),
        Wrong("(reference_scores(q, k, causal) - lse[..., None]).exp()",
              "reference_scores(q, k, causal).softmax(-1).nan_to_num()",
              "dq has every row multiplied by a number of its own"),
    ],
    "flash_attention.2": [
        Wrong("4 * queries * keys", "2 * queries * keys", "13,024,000, and should be 25,024,000"),
        Wrong(") * width + 4 * queries", ") * width", "1,024,000, and should be 1,028,000"),
    ],
    "flash_attention.3": [
        Wrong("tl.maximum(0, first + 1 + seq_k - seq_q)", "tl.maximum(0, first + 1)",
              "wrong in [:, :, 16:35] and right elsewhere"),
        Wrong("first + 1 + seq_k", "first + BLOCK_Q + seq_k",
              "wrong in [:, :, ::16] and right elsewhere"),
        Wrong("end = tl.minimum(seq_k, first + BLOCK_Q + seq_k - seq_q)", "pass",
              "wrong in [:, :, :32] and right elsewhere: there it is nan"),
        Wrong("tl.minimum(seq_k, first + BLOCK_Q", "tl.minimum(seq_k, first",
              "wrong in [:, :, 34 of 40]"),
        Wrong("whole // BLOCK_K * BLOCK_K", "whole", "out differs"),
        Wrong("whole // BLOCK_K * BLOCK_K", "tl.cdiv(whole, BLOCK_K) * BLOCK_K",
              "wrong in [:, :, ::16] and right elsewhere"),
    ],
    "flash_attention.4": [
        Wrong("keys <= rows + seq_k - seq_q", "keys <= rows", "lse differs"),
        Wrong("keys <= rows", "keys < rows", "lse differs"),
        Wrong("(keys < seq_k) & ", "", "out has every row multiplied by a number of its own"),
    ],
    "flash_attention.5": [
        Wrong("            out *= correction[:, None]\n", "",
              "2,880 of 3,840 numbers; all else is right"),
        Wrong("total * correction", "total", "lse differs"),
        Wrong("tl.maximum(largest, tl.max(scores, 1) * scale)", "tl.max(scores, 1) * scale",
              "wrong in [:, :, [0, 1, 16, 17]] and right elsewhere: there it is infinite"),
        Wrong("tl.exp2(scores * scale - base[:, None])", "tl.exp2(scores - base[:, None])",
              "lse differs by up to 3.4"),
        Wrong("tl.where(larger == -float(\"inf\"), 0, larger)", "larger",
              "out and lse are wrong in [:, :, 16:20] and right elsewhere: there they are nan"),
        Wrong("tl.where(total == 0, 1, total)", "total",
              "out is wrong in [:, :, :20] and right elsewhere: there it is nan"),
        Wrong(" / LOG2_E", "", "lse is 1.44 times what it should be: 1.44 is log2(e); all else"),
        Wrong("out / total[:, None]", "out", "out has every row multiplied by a number of its own"),
        Wrong("tl.where(seen, scores, -float(\"inf\"))", "tl.where(seen, scores, 0)",
              "2,960 of 3,840 numbers"),
        Wrong("                scores = tl.where(seen, scores, -float(\"inf\"))\n", "",
              "lse differs"),
        Wrong("load(v_all, batch, head // group,", "load(v_all, batch, head % (heads // group),",
              "out is wrong in [:, 1:3] and right elsewhere"),
        Wrong("                scores = tl.where", "                scores = t1.where",
              "name 't1' is not defined"),
        Wrong("tl.dot(q, k.T,", "tl.dot(q, k,", "must have equal reduction dimensions"),
        Wrong("which.to(tl.int64) * seq_q + rows, lse, mask=rows < seq_q)",
              "which.to(tl.int64) * seq_q * 10**9 + rows, lse, mask=rows < seq_q)",
              "ended by SIGSEGV"),
        Wrong("tl.zeros((BLOCK_Q, DIM), tl.float32)", "tl.zeros((BLOCK_Q, 100), tl.float32)",
              "must be a power of 2"),
    ],
    "flash_attention.6": [
        Wrong("(dweights - delta[None, :])", "dweights",
              "dk differs by up to 1.4 times the largest number; all else is right"),
        Wrong("dk * (scale / LOG2_E)", "dk",
              "dk is 6.32 times what it should be: 6.32 is the square root of 40"),
        Wrong("dk * (scale / LOG2_E)", "dk * scale",
              "dk is 1.44 times what it should be: 1.44 is log2(e)"),
        Wrong("group * tl.cdiv(high - low, BLOCK_Q)", "tl.cdiv(high - low, BLOCK_Q)", "dv differs"),
        Wrong("weights = tl.where(first_rows[:, None] <= rows[None, :], weights, 0)", "pass",
              "dv is wrong in [:, :, 47:]"),
        Wrong("begin = tl.maximum(0, first + seq_q - seq_k)", "begin = tl.maximum(0, first)",
              "dv is wrong in [:, :, 32:]"),
        Wrong("first + BLOCK_K - 1 + seq_q - seq_k", "first + seq_q - seq_k",
              "wrong in [:, :, 47::16]"),
        Wrong("tl.exp2(scores * scale - lse[None, :])", "tl.exp2(scores - lse[None, :])",
              "dv differs"),
        Wrong("* seq_padded", "* seq_q", "dv differs"),
        Wrong("head, start = kv_head * group, low", "head, start = kv_head, low",
              "wrong in [:, 1] and right elsewhere"),
    ],
}
