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
              "rank 0 and rank 1 have 6 items, and should have 8"),
        Wrong('raise ValueError(f"ranks wait for each other; what is left: {left}")', "break",
              "a BW that comes before its F: the result is 'no error is raised'"),
    ],
    "07.5": [
        Wrong("        self.later.clear()\n", "",
              "second weight's gradient, after W of 1 differs"),
        Wrong("self.later.copy()", "self.later",
              "weight's gradient, after W of 1, "),
        Wrong("        self.kept_for_weights[i] = self.later.copy()\n        self.later.clear()\n",
              "        self.kept_for_weights[i], self.later = self.later, []\n",
              "weight's gradient, after W of "),
        Wrong("gradient if weight.grad is None else weight.grad.add_(gradient)", "gradient",
              "first weight's gradient, after W of 0 differs"),
        Wrong("x, dy = x.detach(), dy.contiguous()", "pass", "with a graph is 2, and should be 0"),
    ],
    "07.6": [
        Wrong("grad_norm(model.parameters(), group)", "grad_norm(model.parameters())",
              "on rank 0, norm is 1.5006713, and should be 2.4928666; all else is right"),
        Wrong("PartialSums(model.parameters())", "PartialSums([])",
              "on rank 0, norm is 2.2334643"),
        Wrong("clip_grads_with_norm_(model.parameters(), clip, norm)", "pass",
              "clipped to a norm of 0.1: on rank 0, own, updated differs"),
        Wrong("return loss, norm", "dist.all_reduce(loss, group=group)\n    return loss, norm",
              "on rank 0, loss is 2, and should be 0.5"),
    ],
    "07.7": [Wrong('"B": 0, "W": -1', '"B": -1, "W": 0', "item 2 and item 5 are 1, and")],
    "07.8": [
        Wrong('2 if recompute == "full" else 1', "1", "should be 2"),
        Wrong('recompute == "full"', 'recompute != "none"', "should be 1"),
    ],
    "07.9": [
        Wrong("p.versions[action.micro_batch // m % 2]", "p.versions[0]",
              "actions[0] is 'F3: tokens of batch 1, weights after 1 updates', and should be"),
        Wrong(".copy_(p.versions[1 - step % 2])", "",
              "weights that the optimizer finds is 0, and should be 1"),
        Wrong("p.versions = p.data, p.data.clone()", "p.versions = p.data, p.data",
              "actions[0] is 'F3: tokens of batch 1, weights after 1 updates', and should be"),
        Wrong("text.batch(step + 1)", "text.batch(step)",
              "is 'F2: tokens of batch 0, weights after 0 updates', and should be 'F2: tokens of"),
    ],
}
