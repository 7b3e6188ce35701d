"""Wrong answers to the exercises of chapter 04."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
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
              "those of a loss in which targets that are not valid count, too"),
        Wrong("-scale * is_mine[..., None]", "-scale",
              "those of a loss in which every rank has each target in one of its columns"),
        Wrong("logits = logits.masked_fill(is_padding, -torch.inf)", "",
              "the loss is that of a vocabulary whose columns of padding count as tokens"),
        Wrong("dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)", "",
              "and the loss are those of logits from which each rank takes its own largest one"),
        Wrong("logits -= largest[..., None]", "", "infinite or not a number"),
        Wrong("local_target < columns", "local_target <= columns",
              "of a loss in which a rank has the first column of the next as well"),
        Wrong("* is_valid).sum()", "* is_valid).sum() / is_valid.sum()", "the gradients are right"),
    ],
    "04.4": [
        Wrong("dist.all_reduce(dx,", "dist.all_reduce(dx.clone(),",
              "of head.norm, differ between ranks that hold the same, and add up to"),
        Wrong("dx += gradient @ weight", "dx = gradient @ weight", "of block2.norm1, are off"),
    ],
    "04.5": [
        Wrong("PartialSums(model.parameters())", "PartialSums([])",
              "gradients of k and v differ between ranks that hold the same, and add up to"),
        Wrong("/ valid", "/ (targets != -100).sum()",
              "the mean of the micro-batches' own means"),
        Wrong("grad_norm(model.parameters(), group)", "grad_norm(model.parameters())",
              "the squares were not summed over the ranks"),
        Wrong("total += loss.detach()", "total = loss.detach()",
              "the loss is that of the last micro-batch alone"),
        Wrong("clip_grads_with_norm_(model.parameters(), clip, norm)", "pass",
              "they were not clipped by it"),
        Wrong("/ valid", "/ valid / len(micro_batches)",
              "all gradients and the loss are 1/3 of those of one GPU"),
        Wrong("optimizer.zero_grad()", "", "which were not set to zero"),
        Wrong("for i, (tokens, targets) in enumerate(micro_batches, start=1):",
              "for i, (tokens, targets) in enumerate(micro_batches, start=1):\n"
              "        optimizer.zero_grad()",
              "those of the last micro-batch"),
    ],
    "04.6": [
        Wrong("4 * cfg.layers + 2", "2 * cfg.layers + 2", "is 37, and should be 61"),
        Wrong("1 - cfg.kv_heads / t", "1 - 1 / t", "all_reduce[2] is"),
        Wrong('cfg.layers if recompute == "full" else 0', '0 * len(recompute)', "should be 73"),
        Wrong("payload += shared * (sums or e)", "payload += shared * e", "all_reduce[1] is"),
    ],
    "04.7": [Wrong("1 + 8 * dim", "4 * dim", "should be 15.9")],
    "04.8": [
        Wrong("sub_layer(mlp, mlp.columns, mlp.down, group)",
              "sub_layer(mlp, [mlp.up], mlp.down, group)", "size of tensor"),
        Wrong("dist.new_subgroups(group.size() // cfg.kv_heads)",
              "dist.new_subgroups(group.size())", "k and v"),
    ],
}
