"""The exhibits of chapter 08: sums of what is already a sum, routers, and norms of experts."""

from lab.museum.exhibit import AT_FULL_SIZE, Exhibit

FILE = "08_expert_parallel.py"
TWO = 2, "--batch 12 --micro-batch 2 --ignore 0.4 --experts 4"
CLIPPED = 2, "--batch 12 --micro-batch 2 --ignore 0.4 --experts 4 --clip 0.5"
BIASES = 2, "--batch 12 --micro-batch 2 --ignore 0.4 --experts 4 --balance bias"
SUM = "    sums.finish()\n"
NORM = "    norm = grad_norm(model.parameters(), world)\n"

EXHIBITS = [
    Exhibit(
        "pytorch/pytorch#160285", "experts' gradients are ep times too large",
        "The all_to_all brings the tokens of all ranks to an expert. So its gradient is a sum over "
        "these ranks already, and whatever sums or scales it as if it were not makes it too large. "
        "With two ranks it was exactly doubled. With Adam the curves of the loss were the same; a "
        "test of two processes shows the factor.",
        FILE, SUM, SUM + "    for block in model[1:-1]:\n"
        "        block.mlp.up.grad *= world.size()\n        block.mlp.down.grad *= world.size()\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#6546", "experts are averaged over fewer ranks than all else",
        "Gradients of experts were divided by the ranks that hold the same experts, and all others "
        "by all data-parallel ranks. But how experts are placed must not change a gradient. A test "
        "now holds the same expert's gradient for several placements to each other.",
        FILE, SUM, SUM + "    for block in model[1:-1]:\n"
        "        block.mlp.up.grad /= world.size()\n        block.mlp.down.grad /= world.size()\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA-NeMo/Automodel#1408", "the balance loss is attached, and thrown away",
        "The function that carries the balance loss into backward returns a tensor, and nobody "
        "took it. So its backward never ran, and the router had no gradient of it. In the same "
        "place the coefficient was only true or false, and a factor was wrong: with the first "
        "mistake alone mended, it would have been 180,000 times too strong.",
        FILE, "            gates = AddLoss.apply(gates, cfg.balance", "            "
        "AddLoss.apply(gates, cfg.balance",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA-NeMo/Automodel#3359", "each micro-batch adds a whole balance loss",
        "The loss was divided by the tokens of all micro-batches, and the balance loss of each "
        "micro-batch was added as it was. With more micro-batches it weighs more. The repair was "
        "held to a reference run of another framework.",
        FILE, "cfg.balance_weight * balance / cfg.sequences",
        "cfg.balance_weight * balance / len(x)",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "pytorch/torchtitan#2416", "routers differ from rank to rank",
        "Where the tokens for routing are split among ranks, each has a part of the router's "
        "gradient. It was taken for the whole one, so nobody summed it. A user noticed that the "
        "weights of the routers were not the same on all ranks.",
        FILE, "PartialSums(p for p in model.parameters() if p.partial.size() > 1)",
        "PartialSums(p for p in model.parameters() if 'router' not in p.global_name)",
        *TWO, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8475", "norms of different experts are averaged",
        "The norms of all ranks were averaged, as if every rank had the same parameters. Experts "
        "are others on each rank: from the square roots of 20 and of 100 came 7.24, and not 10.95. "
        "So the norm, and what is clipped by it, depended on where experts live.",
        FILE, NORM,
        "    norm = grad_norm(model.parameters())\n"
        "    dist.all_reduce(norm, group=world)\n    norm /= world.size()\n",
        *CLIPPED, ("gradients", "gradient norm", "parameters"),
        ("first loss", "loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#5916", "experts are missing from the norm",
        "What several ranks hold must count once, so a filter leaves out all but the first rank's. "
        "It asked for the rank among those of the dense layers, and experts have another group. So "
        "some of them were left out: in one port a norm was 11.51 which is 12.28, and gradients "
        "were clipped less than they should have been.",
        FILE, NORM,
        "    norm = grad_norm([p for p in model.parameters() if p.partial is world], world)\n",
        *CLIPPED, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "pytorch/torchtitan#3686", "return, where continue was meant",
        "A hook moves the biases that balance the experts, layer by layer. At the first layer "
        "without such a bias it returned, and did not go on. All layers behind it kept their "
        "biases, and their counters were never cleared. A test with both kinds of layers shows it.",
        FILE, "        block.mlp.load.zero_()\n    return loads\n",
        "        block.mlp.load.zero_()\n        break\n    return loads\n",
        *BIASES, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "pytorch/torchtitan#1593", "recomputation counts the picks of each expert twice",
        "How often each expert is picked is counted in forward. With all of a block recomputed, "
        "forward runs again in backward, and counts again. A bias that moves by a sign does not "
        "notice it, but whoever looks at the use of experts sees twice the number of tokens, and "
        "an update in proportion to it would be twice as large. It came up in a review of faster "
        "updates.",
        FILE, "        if not runs_again():\n            self.load",
        "        if True:\n            self.load",
        2, "--batch 12 --micro-batch 2 --ignore 0.4 --experts 4 --balance bias --recompute full",
        ("values",),
        ("first loss", "loss", "gradients", "gradient norm", "parameters", "sent", "kept"),
    ),
    Exhibit(
        "jingyaogong/minimind#858", "the router of one expert a token learns nothing",
        "A token's gates are divided by their sum. With one expert that is always 1, so the loss "
        "does not reach the router, and only the balance loss trains it, towards chance. A mixture "
        "with three times the parameters was worse than a dense model, and the router's gradient "
        "had a norm of 7e-10.",
        FILE, "        if cfg.top_k == 1:              # over their sum it would be 1",
        "        if cfg.top_k == 0:              # over their sum it would be 1",
        2, "--batch 12 --micro-batch 2 --ignore 0.4 --experts 4 --top-k 1",
        ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "tjake/Jlama#201", "experts are added up without their gates",
        "The gates decided which experts a token takes, and what these gave was added up as it "
        "was. The router has no part in the output then, so the loss does not reach it. It was "
        "found in an engine that serves models: its text was fluent, and its facts were wrong.",
        FILE, "return add_up(out * gates[:, None], token, len(rows))\n\n    def exchange",
        "return add_up(out + 0 * gates[:, None], token, len(rows))\n\n    def exchange",
        *TWO, ("first loss", "loss", "gradients", "gradient norm", "parameters"), ("sent", "kept"),
    ),
    Exhibit(
        "huggingface/transformers#28505", "padding has a say in the balance loss",
        "The balance loss counted the picks and scores of all tokens, and those were padding, too, "
        "where sequences of a batch are filled up to one length. Padding is alike, so it all goes "
        "to the same experts, and drives real tokens away from these. The loss now takes a mask.",
        FILE, "            balance = balance_loss(shares, chosen, cfg.over_batch, self.world)\n",
        "            padding = x.shape[1] // 4\n"
        "            shares, few = (F.pad(y, (0, 0, 0, padding)) for y in (shares, chosen))\n"
        "            balance = balance_loss(shares, few, cfg.over_batch, self.world)\n",
        *TWO, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "Xilinx/brevitas#757", "each rank moves a bias by what it has seen",
        "A bias that is no parameter was corrected by what each rank had measured on its own data. "
        "So the replicas came apart, with nothing in any gradient to show it: only the outputs of "
        "ranks differ. There it was the bias of quantized layers; here, that of experts.",
        FILE, "    loads = move_biases(model, world)\n",
        "    loads = move_biases(model)\n    dist.all_reduce(loads, group=world)\n",
        2, "--batch 12 --micro-batch 2 --ignore 0.4 --experts 4 --balance bias --bias-speed 0.02",
        ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "InternLM/xtuner#2048", "the router has no gradient where blocks are recomputed",
        "A module that is recomputed was handed detached inputs alone. Its checkpoint then saw "
        "nothing that needs a gradient, and never ran it again: the loss was there, and parameters "
        "had none. There it was a head that predicts further tokens; here it is the router.",
        FILE, "        gates = log_scores.gather(-1, chosen)\n",
        "        gates = log_scores.detach().gather(-1, chosen)\n",
        2, "--batch 12 --micro-batch 2 --ignore 0.4 --experts 4 --recompute full",
        ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#6772", "an attribute that two programs use",
        "Experts had an attribute id, which said whose GPU they go to. ZeRO-3 numbers all modules, "
        "kept its numbers in an attribute of the same name, and did not look whether there was "
        "one. So experts came to GPUs that they were not meant for. (Here rank 1's experts are on "
        "rank 0, and tokens go where they should be.)",
        FILE, '            keep_shard(moe, name, 0, groups["ep"]) ',
        '            keep_shard(moe, name, 0, groups["ep"])\n'
        "            [cut] = p.cuts\n"
        "            p.cuts = [cut._replace(index=cut.parts - 1 - cut.index)] ",
        *TWO, ("first loss", "loss", "gradients", "gradient norm", "parameters"), ("sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/TransformerEngine#2908", "where a row begins does not fit into an int32",
        "The kernels that sort tokens by expert multiplied the number of a row by its width, both "
        "of them ints. With rows of 7,168 numbers and 8 experts a token that is too much once a "
        "rank has a few hundred thousand of them. Then they read and write elsewhere: silently, or "
        "at an illegal address. It had been so since August 2024, and was found in April 2026.",
        FILE, "        token, gates = token[order], gates.index_select(0, order).to(rows.dtype)\n"
        "        counts",
        "        token, gates = token[order], gates.index_select(0, order).to(rows.dtype)\n"
        "        begin = token.to(torch.int32) * rows.shape[1]\n"
        "        token = (begin // rows.shape[1]).long()\n        counts",
        *TWO,
        *AT_FULL_SIZE,
        rehearsal="--ranks 8 --experts 8 --batch 512 --preset llama-8b --layers 1 --dim 7168 "
                  "--heads 56 --expert-dim 2048",
    ),
]
