"""Wrong answers to the exercises of chapter 03."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "03.1": [
        Wrong("x.view(p.shape)", "x.clone().view(p.shape)",
              "all gradients are zero"),
        Wrong("flat.split([*(p.numel() for p in self.parameters), self.padding])",
              "flat.split([p.numel() for p in self.parameters])",
              "split_with_sizes expects split_sizes to sum exactly to"),
        Wrong("            if p.grad is not None:                      # of a tied table, from the "
              "head\n                view.copy_(p.grad)\n", "",
              "gradients of the tied table are off by no constant factor"),
    ],
    "03.2": [
        Wrong("self.sum if before is None else before.add_(self.sum)", "self.sum",
              "those of the last micro-batch of each rank alone"),
        Wrong("        self.reducing.wait()\n",
              "        self.reducing.wait()\n        self.sum /= self.group.size()\n",
              "all gradients are 1/4 of those of one GPU"),
        Wrong("p.grad if in_place else None", "p.grad", "look at backward"),
        Wrong("self.sum if before is None", "self.sum.bfloat16() if before is None",
              "attempting to assign a gradient with dtype"),
    ],
    "03.3": [
        Wrong("units[:1 + ahead]", "units[:1]", "'start 0, wait 0'"),
        Wrong("if not unit.full.untyped_storage().nbytes(): ", "if True: ",
              "'start 0, start 1, start 2, wait 0'"),
        Wrong("units[0].finish_gather()", "units[-1].finish_gather()",
              "'start 0, start 2, wait 3'"),
    ],
    "03.4": [
        Wrong('"cpu" if run.args.offload else None', "None", "optimizer states"),
        Wrong("run.mixed(shards, device=", "run.mixed(shards) or dict(device=", "optimizer states"),
        Wrong("unit.hold(unit.full.to(unit.shard.dtype))", "pass", "dtype"),
    ],
    "03.5": [
        Wrong("/ valid", "/ (targets != -100).sum() / len(micro_batches)",
              "3.00 times those of the mean of the micro-batches' own means"),
        Wrong("        unit.shard.grad = None\n", "        pass\n", "which were not set to zero"),
        Wrong("dist.all_reduce(unit.shard.grad, group=replicas)", "pass",
              "they were summed over some ranks alone"),
        Wrong("                units[i].free(until_backward=True)\n", "                pass\n",
              "gathered parameters, at the peak"),
        Wrong("gather(units[i:], ahead)", "gather(units[i:], 9)",
              "gathered parameters, at the peak"),
        Wrong("            units[i].make_room_for_gradients()\n", "",
              "'NoneType' object has no attribute 'shape'"),
        Wrong("    return total, update(units, optimizer, clip)",
              "    return total, grad_norm([unit.shard for unit in units], units[0].group)",
              "the update left all parameters as they were"),
    ],
    "03.6": [
        Wrong(".round()", "", "numbers differs in 864 of 1,800 numbers"),
        Wrong("blocks.abs().amax(-1)", "blocks.amax(-1)", "scales differs"),
        Wrong(".clamp(min=1e-30)", "", "scales are above zero is False, and should be True"),
        Wrong("[..., :x.shape[-1]].contiguous()", ".contiguous()", "has shape (3, 768)"),
    ],
    "03.7": [
        Wrong("reduces = 1 if stage == 1 else micro_batches", "reduces = 1",
              "stage 2, 4 ranks, 3 micro-batches: reduce_scatter[0] is 4, and should be 12"),
        Wrong("units[:-1]  ", "units  ", "all_gather[0] is 24, and should be 21"),
        Wrong("reduces * sum_width", "reduces * width", "reduce_scatter[1] is 576,000"),
        Wrong("norm = max(sum_width, 4) if n > 1 else 0", "norm = max(sum_width, 4)",
              "4 groups of 1 rank"),
    ],
    "03.8": [
        Wrong("(2, 4, 12)", "(2, 2, 12)", "should be"),
        Wrong("if stage == 3 else 1", "if stage > 1 else 1", "should be"),
    ],
    "03.9": [
        Wrong("count == len(micro_batches)", "count == 1", "first micro-batch"),
        Wrong("        unit.start_gather() ", "        pass ", "still those that the run began"),
        Wrong("in_place=stage == 1", "", "gradients: the formula is 3.00 times"),
    ],
    "03.10": [
        Wrong("(2 * matmuls / flops)", "(matmuls / flops)", "should be"),
        Wrong("(n - 1) / n", "1", "should be"),
    ],
    "03.11": [
        Wrong("range(0, len(blocks), k)]\n", "range(0, len(blocks) - k + 1, k)]\n", "4 items"),
        Wrong(" if k > 1 else model", "", "should be"),
        Wrong("block * min(k, cfg.layers - first)", "block * k", "should be"),
    ],
}
