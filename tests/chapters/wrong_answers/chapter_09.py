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
              "mlp.ep = ep", "block1.mlp.sequence and block2.mlp.sequence are None"),
        Wrong("if cp or args.documents:", "if args.documents:",
              "the core of block1 and the core of block2 are 'its own', and should be 'given'"),
        Wrong("if cp or args.documents:", "if cp:", "the same with documents alone: "),
        Wrong("parts=min(tp.size(), cfg.kv_heads)", "parts=tp.size()", "block1.attn.k.weight"),
        Wrong("mlp.seen = deque(maxlen=args.micro_batches) ", "pass ",
              "what block1.mlp.seen keeps of five and what block2.mlp.seen keeps of five have 5"),
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
              "stage 1: module 1 and module 2 have 1 items, and should have 3"),
        Wrong("if p not in seen and (stage or p.copies > 1):", "if stage or p.copies > 1:",
              "stage 3, tied, and kept: module 3 has 2 items, and should have 1"),
        Wrong("for module in modules for unit in module.units]", "for unit in module.units]",
              "stage 1: in all has 2 items, and should have 9"),
    ],
    "09.6": [
        Wrong("targets[:, self.positions]", "targets", "to match target batch_size"),
        Wrong("x = x[:, self.positions]", "x = x[:, :len(self.positions)]",
              "a stage with the embedding: output 0 differs"),
        Wrong(" / valid", " / (targets != -100).sum()",
              "output 0 is 3.3356875, and should be 4.7652678"),
        Wrong("return x.detach()", "return x", "output has a graph is True, and should be False"),
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
              "stage 1, on two ranks: on rank 0, shard.grad after 1 differs"),
        Wrong("view if self.stage < 2 else None", "view",
              "p0.grad after 0 and p0.grad after 1 are a tensor of shape (2, 3), and should be"),
        Wrong("before = self.shard.grad\n",
              "before = self.shard.grad\n                self.sum /= self.group.size()\n",
              "shard.grad after 0 and shard.grad after 1 are 0.5 times what they should be"),
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
