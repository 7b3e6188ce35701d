"""Wrong answers to the exercises of chapter 08."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "08.1": [
        Wrong("ctx.received, ctx.sent", "ctx.sent, ctx.received", "Split sizes doesn't match"),
        Wrong("ctx.group), None", "ctx.group) / ctx.group.size(), None",
              "of block2.mlp.up and block2.mlp.down, are 1/2 of those of one GPU: 2 is the number "
              "of ranks"),
    ],
    "08.2": [
        Wrong("picks = F.one_hot(chosen.flatten(1), experts).to(scores.dtype).mean(1)",
              "picks = F.one_hot(chosen.flatten(), experts).to(scores.dtype).mean(0)",
              "the result is 3.0719975, and should be 3.1533917"),
        Wrong(".sum()", ".mean()", "should be 3: 1/6 of that"),
        Wrong("return experts * ", "return ", "should be 3: 1/2 of that"),
    ],
    "08.3": [
        Wrong("balance / cfg.sequences", "balance / len(x)",
              "count the balance loss 6.00 times: 6 is the number of micro-batches of all ranks"),
        Wrong("logits.gather(-1, chosen).softmax(-1)", "scores.gather(-1, chosen)",
              "so is the loss, so look at forward first"),
        Wrong("logits.gather(-1, chosen).softmax(-1)",
              "(scores + self.bias).gather(-1, chosen)\n"
              "            gates = gates / gates.sum(-1, keepdim=True)",
              "k = 2, a bias of 1 and -1: gates differs"),
        Wrong("gates = scores.gather(-1, chosen)",
              "gates = logits.gather(-1, chosen).softmax(-1)",
              "k = 1, with the balance loss: gates differs"),
        Wrong("logits.logsumexp(-1).square()", "logits.logsumexp(-1)", "with the z-loss"),
    ],
    "08.4": [
        Wrong(" * gates.to(x.dtype)[..., None]", "", "gates is None"),
        Wrong("repeat_interleave(self.cfg.top_k, dim=0)", "repeat(self.cfg.top_k, 1)",
              "2 of 4 experts each, and nobody picks the last one: out differs"),
        Wrong("Permute.apply(out, order, True), received", "out, received",
              "so is the loss, so look at forward first"),
        Wrong("run_experts(Permute.apply(rows, order, False), self.columns",
              "run_experts(rows, self.columns", "so is the loss, so look at forward first"),
        Wrong("rows = AllToAll.apply(rows, sent", "rows = AllToAll.apply(rows.detach(), sent",
              "the gradients that come next, of block2.norm2, are off"),
        Wrong("if not runs_again():", "if True:", "all_to_all, payload"),
    ],
    "08.5": [
        Wrong("chosen.transpose(1, 2).flatten(1)", "chosen.flatten(1)", "2 places, 2 picks: out"),
        Wrong("torch.where(place < places, expert * places + place, slots)",
              "expert * places + place.clamp(max=places - 1)", "2 places, 2 picks: out differs"),
        Wrong(".to(torch.float32).mean()", ".to(torch.float32).sum()", "dropped is 8"),
    ],
    "08.6": [
        Wrong('groups["holders"]', 'groups["world"]', "gradients of the experts are"),
        Wrong('groups["holders"]', 'groups["ep"]',
              "gradients of the experts differ between ranks 0 and 2, which hold the same"),
        Wrong('p.partial = groups["world"]', 'p.partial = groups["ep"]',
              "they were summed over some ranks alone"),
    ],
    "08.7": [
        Wrong("load.mean() - load", "load - load.mean()", "have the opposite sign"),
        Wrong("        dist.all_reduce(loads, group=group)\n", "        pass\n",
              "look at what forward reads, beside the weights, that a step has changed"),
    ],
    "08.8": [
        Wrong("(5 + 3 * again)", "5", "of the rows, recomputed: all_to_all[0] is"),
        Wrong("(1 + again) * 8 * cfg.experts", "8 * cfg.experts", "recomputed: all_to_all[1] is"),
        Wrong("1 + again * cfg.shared_expert", "1 + again", "reduce_scatter[0] is"),
        Wrong("of_gradient * (numbers - experts)", "e * (numbers - experts)", "all_reduce[1] is"),
    ],
    "08.9": [
        Wrong("start(gradient, received, sent,", "start(gradient, sent, received,",
              "got [3, 4] but expected"),
        Wrong("start(gradient, received, sent, group, under_way)\n",
              "start(gradient, received, sent, group, under_way)\n"
              "        under_way[-1][0].wait()\n",      # it hides nothing
              "order has 11 items, and should"),
        Wrong("return wait(ctx.under_way), None", "wait(ctx.under_way)\n"
              "        return gradient, None", "got [3, 4] but expected"),
    ],
}
