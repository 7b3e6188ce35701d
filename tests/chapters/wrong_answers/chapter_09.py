"""Wrong answers to the exercises of chapter 09."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "09.1": [
        Wrong("Place(**dict(zip(order, indices)))", "Place(*indices)",
              "--order tp,cp,dp,pp: item 1 is 'Place(pp=0, dp=0, cp=0, tp=1)', and should be"),
        Wrong("for axis in order))", "for axis in Place._fields))",
              "--order tp,cp,dp,pp: item 2 is 'Place(pp=2, dp=0, cp=0, tp=0)', and should be"),
    ],
    "09.2": [
        Wrong("stage[i:i + ep] for stage in stages for i in range(0, len(stage), ep)",
              "stage[i::2] for stage in stages for i in range(2)",
              "axes.ep[0] is 1, and should be 4"),
        Wrong("[stage[i::ep] for stage in stages for i in range(ep)]", "stages",
              "holders.mlp has 8 items, and should have 2"),
        Wrong("(at.pp, at.tp * parts // t)", "(at.pp, at.tp)",
              "holders.keys has 2 items, and should have 4"),
        Wrong("min(at.pp, args.pp - 1 - at.pp)", "at.pp",
              "holders.tied has 8 items, and should have 16"),
        Wrong("        if str(ranks) not in made:", "        if True:", "groups_of_holders is 6"),
    ],
    "09.3": [
        Wrong('mlp.ep, mlp.sequence = ep, axes.get("cp and tp")',
              "mlp.ep = ep", "the gradients that come next, of block2.mlp.router, are"),
        Wrong("core, positions_of(cp.rank(), cp.size(), cfg.seq)", "core, attn.rope.positions",
              "are those of positions that count each rank's two chunks from 0"),
        Wrong("attn.core, attn.rope.positions = core,", "attn.rope.positions =",
              "are those of attention of each rank's two chunks to their own keys alone"),
        Wrong("mlp.seen = deque(maxlen=args.micro_batches) ", "pass ",
              "activations, at the most: measured"),
    ],
    "09.4": [
        Wrong("p.copies = p.holders.size()", "p.copies = 1", "they were not summed"),
        Wrong("p.copies = p.holders.size()", "p.copies = dist.get_world_size()",
              "the gradient norm is 0.63 times that of one GPU"),
        Wrong('            p.kind = "tied"\n', "            pass\n",
              "embedding.weight.kind is 'tables', and should be 'tied'"),
    ],
    "09.5": [
        Wrong("module, p.holders].append(p)", 'module, ""].append(p)',
              "all gradients are off by no constant factor"),
        Wrong("if p not in seen and (stage or p.copies > 1):", "if stage or p.copies > 1:",
              "gradients of the tied table are"),
        Wrong("for module in modules for unit in module.units]", "for unit in module.units]",
              "gradients of all before head are on no rank"),
    ],
    "09.6": [
        Wrong("targets[:, self.positions]", "targets", "to match target batch_size"),
        Wrong("x = x[:, self.positions]", "x = x[:, :len(self.positions)]",
              "so is the loss, so look at forward first"),
        Wrong(" / valid", " / (targets != -100).sum()",
              "3.00 times those of the mean of the micro-batches' own means"),
        Wrong("return x.detach()", "return x", "activations, at the most: measured"),
    ],
    "09.7": [
        Wrong("(stage < layers % depth)", "(stage >= depth - layers % depth)",
              "balanced(7, 3): item 0[1] and item 1[0] are 3, and should be 4"),
        Wrong("layers + 2]", "layers + 1]", "balanced(8, 4): item 3[1] is 9, and should be 10"),
    ],
    "09.8": [
        Wrong("modules[:2]", "modules[:1]", "'start 0, wait 0'"),
        Wrong("unit.stage == 3 and not unit.full.untyped_storage().nbytes()", "unit.stage == 3",
              "'start 0, start 1, start 2, wait 0'"),
        Wrong("for unit in modules[0].units:", "for unit in modules[1].units:", "wait 1"),
    ],
    "09.9": [
        Wrong("self.sum if before is None else before.add_(self.sum)", "self.sum",
              "those of the last micro-batch"),
        Wrong("view if self.stage < 2 else None", "view", "gradients"),
        Wrong("before = self.shard.grad\n",
              "before = self.shard.grad\n                self.sum /= self.group.size()\n",
              "all gradients are 1/2 of those of one GPU"),
    ],
    "09.10": [
        Wrong("4 * (ep - tp) / ep * top_k * tp", "4 * (ep - 1) / ep * top_k * tp",
              "the same, cut: item 1 is"),
        Wrong("return 4 * (tp - 1), 4", "return 8 * (tp - 1), 4", "item 0 is 56, and should be 28"),
    ],
    "09.11": [
        Wrong("(2 + again,) * 2 if cfg.experts", "(4, 4) if cfg.experts",
              "8 experts, tp 2, cp 2, ep 4: tp.all_gather[0] and"),
        Wrong("8 * cfg.experts * often", "8 * cfg.experts * mixtures", "recomputed: ep.all_to_all"),
        Wrong("sends * tokens // t * h * e", "sends * tokens * h * e", "pp.send[1] is"),
    ],
}
