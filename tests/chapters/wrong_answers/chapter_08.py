"""Wrong answers to the exercises of chapter 08."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "08.1": [
        Wrong("ctx.received, ctx.sent", "ctx.sent, ctx.received", "Split sizes doesn't match"),
        Wrong("ctx.group), None", "ctx.group) / ctx.group.size(), None",
              "the gradient, on 2 ranks: the result is 0.5 times what it should be"),
    ],
    "08.2": [
        Wrong("picks = F.one_hot(chosen.flatten(1), experts).to(scores.dtype).mean(1)",
              "picks = F.one_hot(chosen.flatten(), experts).to(scores.dtype).mean(0)",
              "the result is 2.8851757, and should be 2.7937653"),
        Wrong(".sum()", ".mean()", "should be 3: it is 1/6 of what"),
        Wrong("dist.all_reduce(picks, group=group)", "pass",
              "of 2 ranks: on rank 0, of both ranks is 0.93694"),
        Wrong("return experts * ", "return ", "should be 3: it is 1/2 of what"),
    ],
    "08.3": [
        Wrong("balance / cfg.sequences", "balance / len(x)",
              "count the balance loss 6.00 times, all others equal"),
        Wrong("gates = gates.softmax(-1)", "gates = gates.exp()",
              "so is the loss, so look at forward first"),
        Wrong("gates = gates.softmax(-1)",
              "gates = (scores + self.bias).gather(-1, chosen)\n"
              "            gates = gates / gates.sum(-1, keepdim=True)",
              "k = 2, a bias of 1 and -1: gates differs"),
        Wrong("gates = gates.exp()", "gates = gates.softmax(-1)",
              "k = 1, with the balance loss: gates differs"),
        Wrong("logits.logsumexp(-1).square()", "logits.logsumexp(-1)", "with the z-loss"),
        Wrong("shares = scores / scores.sum(-1, keepdim=True)", "shares = scores",
              "k = 2, by sigmoids, with the balance loss: gradient"),
    ],
    "08.4": [
        Wrong("out * gates[:, None]", "out", "gates is None"),
        Wrong("token, gates = token[order], gates.index_select(0, order).to",
              "token, gates = token[order], gates.to",
              "2 of 4 experts each, and nobody picks the last one: out differs"),
        Wrong("self.travel(out.index_select(0, order.argsort()), rec", "self.travel(out, rec",
              "on 2 ranks, 10 tokens on each, 2 of 4 experts: on rank 0, out"),
        Wrong("self.run(rows.index_select(0, order), own", "self.run(rows, own",
              "on 2 ranks, 10 tokens on each, 2 of 4 experts: on rank 0, out"),
        Wrong("rows = self.travel(rows, sent", "rows = self.travel(rows.detach(), sent",
              "the gradients that come next, of block2.norm2, are off"),
        Wrong("if not runs_again():", "if True:", "all_to_all, payload"),
    ],
    "08.5": [
        Wrong("expert * batch + token // self.cfg.seq", "expert * batch + token % batch",
              "2 places, 2 picks: out"),
        Wrong("slot = (line * places + place).where(is_in, slots)",
              "slot = line * places + place.clamp(max=places - 1)",
              "2 places, 2 picks: out differs"),
        Wrong("1 - is_in.double().mean()", "is_in.double().mean()", "dropped is"),
        Wrong(" == 0).double()", " < 2).double()", "lost is"),
    ],
    "08.6": [
        Wrong('groups["holders"]', 'groups["world"]',
              "block1.mlp.up.ranks and block1.mlp.down.ranks have 4 items, and should have 2"),
        Wrong('groups["holders"]', 'groups["ep"]',
              "block1.mlp.up.ranks[1] and block1.mlp.down.ranks[1] are 1, and should be 2"),
        Wrong('p.partial = groups["world"]', 'p.partial = groups["ep"]',
              "embedding.weight.ranks, "),
    ],
    "08.7": [
        Wrong("load.mean() - load", "load - load.mean()", "have the opposite sign"),
        Wrong("        dist.all_reduce(loads, group=group)\n", "        pass\n",
              "the same on two ranks with other loads: on rank 0, loads is wrong in [:, 1:]"),
    ],
    "08.8": [
        Wrong("2 * layers + 2 * forwards + told", "4 * layers + told",
              "of the rows, recomputed: all_to_all[0] is"),
        Wrong("told * 8 * cfg.experts", "layers * 8 * cfg.experts", "all_to_all[1] is"),
        Wrong("forwards * cfg.experts * wide", "layers * cfg.experts * wide",
              "with shares of the whole batch, recomputed: all_reduce[1] and"),
        Wrong("forwards * 16 * nodes", "forwards * 8 * nodes", "all_to_all, payload"),
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
    "08.10": [
        Wrong("values.sum(-1)", "values.amax(-1)", "2 of 4 machines, 4 picks: "),
        Wrong("math.ceil(cfg.top_k / cfg.node_limit)", "cfg.top_k // cfg.nodes",
              "2 of 4 machines, 4 picks: "),
        Wrong("-math.inf).flatten(-2)", "0).flatten(-2)", "differs in 3 of 60 numbers"),
    ],
    "08.11": [
        Wrong("math.comb(n - m, k) / math.comb(n, k)", "(1 - m / n) ** k",     # put back
              "6 experts, 2 picks, 3 machines: item 1 is 1.1111111"),
        Wrong("k * (1 - 1 / cfg.nodes), nodes", "k, nodes", "3 machines: item 0 is"),
        Wrong("n = cfg.node_limit * m", "n = cfg.experts", "4 of 8 machines: item 1 is"),
    ],
    "08.12": [
        Wrong("chosen[row, pick] % experts", "chosen[row, pick]",
              "2 picks: on rank 0, out has every row multiplied by"),
        Wrong("mine = chosen // experts == self.across.rank()", "mine = chosen // experts == 0",
              "of TwoHops.through_experts: RuntimeError: index"),
        Wrong("return add_up(out, token, len(x_rows)).view_as(x)",
              "return add_up(out / n, token, len(x_rows)).view_as(x)",
              "out is 0.5 times what it should be"),
    ],
}
