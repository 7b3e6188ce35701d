"""Faults of chapter 04, and who sees each."""

from tests.faults import Fault, Graded, Typed, Verified

SHARED = "--layers=1 --kv-heads=1 --vocab=257 --block=llama"

FAULTS = [
    Fault("summed(gradient, ctx.group)", "gradient",
          Graded("04.1", "of head.norm, differ between ranks that hold the same, and add up to"),
          Typed("", "tp", "PI",
                "CopyIn.backward gives a gradient of x that is partial over tp; x is invariant, "
                "so its gradient must be invariant: its sum is missing")),
    Fault("summed(gradient, ctx.group)", "summed(gradient, ctx.group) / ctx.group.size()",
          Graded("04.1", "4 is the number of ranks")),
    Fault("        return summed(x, group)\n\n    @staticmethod\n"
          "    def backward(ctx, gradient):\n        return gradient, None",
          "        return x.clone()\n\n    @staticmethod\n    def backward(ctx, gradient):\n"
          "        return gradient, None",
          Verified(2, SHARED, "loss")),
    Fault("        return summed(x, group)\n\n    @staticmethod\n"
          "    def backward(ctx, gradient):\n        return gradient, None",
          "        return summed(x, group)\n\n    @staticmethod\n"
          "    def backward(ctx, gradient):\n        return gradient * 2, None",
          Verified(2, SHARED, "gradients")),
    Fault("return gradient, None", "return summed(gradient, dist.group.WORLD), None",
          Graded("04.2", "4 is the number of ranks")),
    Fault("        x = CopyIn.apply(x, self.group)\n", "",
          Typed("", "tp", "IV",
                "x (the output of block1.norm1) is invariant over tp, so that each rank must "
                "have its whole gradient; block1.attn.q.weight is varying, so that each has a "
                "part. Their sum is missing")),
    Fault("        return SumOut.apply(x, self.group)\n\n\ndef share_kv_heads",
          "        return x\n\n\ndef share_kv_heads",
          Typed("", "tp", "IP",
                "the output of block1.attn is partial over tp, and x (the output of embedding) "
                "is invariant: its sum is missing")),
    Fault("linear.weight.partial = holders", "pass", Verified(2, SHARED, "gradients")),
    Fault("tokens - self.group.rank() * rows", "tokens", Verified(2, SHARED, "loss")),
    Fault("x.masked_fill(not_mine[..., None], 0)", "x", Verified(2, SHARED, "loss")),
    Fault("logits = logits.masked_fill(is_padding, -torch.inf)", "",
          Graded("04.3",
                 "the loss is that of a vocabulary whose columns of padding count as tokens")),
    Fault("dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)", "",
          Graded("04.3",
                 "and the loss are those of logits from which each rank takes its own largest "
                 "one")),
    Fault("logits -= largest[..., None]", "", Graded("04.3", "infinite or not a number")),
    Fault("local_target < columns", "local_target <= columns",
          Graded("04.3", "of a loss in which a rank has the first column of the next as well")),
    Fault(".masked_fill(~is_mine, 0)", "", Verified(2, SHARED, "loss")),
    Fault("dist.all_reduce(sums, group=group)", "pass", Verified(2, SHARED, "loss"),
          Typed("", "tp", "VI",
                "VocabParallelLoss.forward gives what is varying over tp, and should be "
                "invariant")),
    Fault("target_logit) * is_valid)", "target_logit))", Verified(2, SHARED, "loss")),
    Fault("* is_valid).sum()", "* is_valid).sum() / is_valid.sum()",
          Graded("04.3", "the gradients are right")),
    Fault("(gradient * is_valid)", "gradient.expand_as(is_valid)",
          Graded("04.3", "those of a loss in which targets that are not valid count, too")),
    Fault("dlogits.scatter_add_(-1, local_target, -scale * is_mine[..., None])", "pass",
          Verified(2, SHARED, "gradients")),
    Fault("-scale * is_mine[..., None]", "-scale",
          Graded("04.3",
                 "those of a loss in which every rank has each target in one of its columns")),
    Fault("dx += gradient @ weight", "dx = gradient @ weight",
          Graded("04.4", "of block2.norm1, are off")),
    Fault("dist.all_reduce(dx,", "dist.all_reduce(dx.clone(),",
          Graded("04.4", "of head.norm, differ between ranks that hold the same, and add up to")),
    Fault("dist.new_subgroups(group.size() // cfg.kv_heads)", "dist.new_subgroups(group.size())",
          Graded("04.8", "k and v")),
    Fault("block.mlp = sub_layer(mlp, mlp.columns, mlp.down, group)",
          "block.mlp = sub_layer(mlp, mlp.columns, mlp.down, group)\n"
          "        [cut] = mlp.columns[-1].weight.cuts\n"
          "        mlp.columns[-1].weight.cuts = [cut._replace(index=group.size() - 1 - "
          "cut.index)]",
          Verified(2, SHARED, "loss")),
    Fault("sub_layer(mlp, mlp.columns, mlp.down, group)",
          "sub_layer(mlp, [mlp.up], mlp.down, group)",
          Graded("04.8", "size of tensor")),
    Fault("optimizer.zero_grad()", "", Graded("04.5", "which were not set to zero")),
    Fault("for i, (tokens, targets) in enumerate(micro_batches, start=1):",
          "for i, (tokens, targets) in enumerate(micro_batches, start=1):\n"
          "        optimizer.zero_grad()",
          Graded("04.5", "those of the last micro-batch")),
    Fault("/ valid", "/ (targets != -100).sum()",
          Graded("04.5", "the mean of the micro-batches' own means")),
    Fault("/ valid", "/ valid / len(micro_batches)",
          Graded("04.5", "all gradients and the loss are 1/3 of those of one GPU")),
    Fault("PartialSums(model.parameters())", "PartialSums([])",
          Graded("04.5",
                 "gradients of k and v differ between ranks that hold the same, and add up to")),
    Fault("total += loss.detach()", "total = loss.detach()",
          Graded("04.5", "the loss is that of the last micro-batch alone")),
    Fault("grad_norm(model.parameters(), group)", "grad_norm(model.parameters())",
          Graded("04.5", "the squares were not summed over the ranks"),
          Typed("--clip=1", "tp", "VI",
                "the optimizer takes the gradient of block1.norm1.weight, which is varying over "
                "tp")),
    Fault("clip_grads_with_norm_(model.parameters(), clip, norm)", "pass",
          Graded("04.5", "they were not clipped by it")),
    Fault('cfg.layers if recompute == "full" else 0', "0 * len(recompute)",
          Graded("04.6", "should be 73")),
    Fault("4 * cfg.layers + 2", "2 * cfg.layers + 2", Graded("04.6", "is 37, and should be 61")),
    Fault("payload += shared * (sums or e)", "payload += shared * e",
          Graded("04.6", "all_reduce[1] is")),
    Fault("1 - cfg.kv_heads / t", "1 - 1 / t", Graded("04.6", "all_reduce[2] is")),
    Fault("1 + 8 * dim", "4 * dim", Graded("04.7", "should be 15.9")),
    Fault("        run.log(batch, loss, norm, model)\n\n\ndef train_torch",
          "        dist.all_reduce(loss)\n        run.log(batch, loss, norm, model)\n\n\n"
          "def train_torch",
          Verified(4, "", "",
                   "the loss is 4.00 times that of one GPU; the gradients are right, so only "
                   "what is logged is wrong")),
]
