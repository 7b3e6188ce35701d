"""Wrong answers to the exercises of chapter 07."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
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
        Wrong("now + times[actions[0].kind]", "now + 1", "dualpipe-v, 2 ranks, 4 micro-batches"),
        Wrong("                programs[message.receiver].append(message)\n", "",
              "rank 1 has 16 items, and should have 24"),
        Wrong('raise ValueError(f"ranks wait for each other; what is left: {left}")', "break",
              "a BW that comes before its F: the result is 'no error is raised'"),
    ],
    "07.5": [
        Wrong("        self.later.clear()\n", "",
              "all gradients but those of the embedding and the LayerNorms are off"),
        Wrong("self.later.copy()", "self.later",
              "all gradients but those of the embedding and the LayerNorms are missing"),
        Wrong("        self.kept_for_weights[i] = self.later.copy()\n        self.later.clear()\n",
              "        self.kept_for_weights[i], self.later = self.later, []\n",
              "of block1 are those of the first micro-batch alone"),
        Wrong("gradient if weight.grad is None else weight.grad.add_(gradient)", "gradient",
              "those of the last micro-batch alone"),
        Wrong("x, dy = x.detach(), dy.contiguous()", "pass", "activations, at the most: measured"),
    ],
    "07.6": [
        Wrong("grad_norm(model.parameters(), group)", "grad_norm(model.parameters())",
              "the squares were not summed over the ranks"),
        Wrong("PartialSums(model.parameters())", "PartialSums([])",
              "all gradients differ between ranks that hold the same, and add up to"),
        Wrong("clip_grads_with_norm_(model.parameters(), clip, norm)", "pass",
              "they were not clipped by it"),
        Wrong("return loss, norm", "dist.all_reduce(loss, group=group)\n    return loss, norm",
              "the loss is 3.00 times that of one GPU: 3 is the number of ranks"),
    ],
    "07.7": [Wrong('"B": 0, "W": -1', '"B": -1, "W": 0', "item 2 is 1, and should be 2")],
    "07.8": [
        Wrong('2 if recompute == "full" else 1', "1", "should be 2"),
        Wrong('recompute == "full"', 'recompute != "none"', "should be 1"),
    ],
    "07.9": [
        Wrong("p.versions[action.micro_batch // m % 2]", "p.versions[0]", "loss"),
        Wrong(".copy_(p.versions[1 - step % 2])", "", "parameters"),
        Wrong("p.versions = p.data, p.data.clone()", "p.versions = p.data, p.data", "parameters"),
        Wrong("text.batch(step + 1)", "text.batch(step)", "loss"),
    ],
}
