"""The exhibits of chapter 09: whom a parameter is summed with, and how often it counts."""

from lab.museum.exhibit import AT_FULL_SIZE, Exhibit

FILE = "09_5d.py"
TP = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5 --tp 2"
DP = 2, "--batch 12 --micro-batch 2 --ignore 0.4 --dp 2 --zero 1"
CP = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5 --cp 2"
PP = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5 --pp 2"
TIED = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --pp 2 --preset gpt2 --vocab 256 --verify"
EP = 2, "--batch 12 --micro-batch 2 --ignore 0.4 --dp 2 --ep 2 --experts 4"
MESH = 4, "--batch 8 --micro-batch 2 --ignore 0.4 --dp 2 --tp 2"
NORM = "    norm = grad_norm(held, dist.group.WORLD)            # of all ranks, each number once\n"

EXHIBITS = [
    Exhibit(
        "NVIDIA/Megatron-LM#7452", "a parameter that is cut counts on one rank alone",
        "A parameter with a number for each head was cut over the ranks, and not marked so. The "
        "filter that leaves out copies took the others' parts for such, and the norm had rank 0's "
        "alone. So gradients were clipped less than they should have been. An audit shows it on a "
        "CPU.",
        FILE, NORM,
        "    norm = grad_norm([p for p in held if getattr(p, 'kind', '') != 'keys'], "
        "dist.group.WORLD)\n",
        *TP, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "ROCm/TransformerEngine#715", "copies count as if they were parts",
        "An attribute tells whether a weight is cut over the tensor-parallel ranks. It was set on "
        "those that every rank has as a whole, too. The norm was 1.36 to 1.52 times too large, a "
        "constant for each model. Clipping made all updates too small by it.",
        FILE, "        p.copies = p.holders.size()\n",
        "        p.copies = 1 if p.kind == 'norms' else p.holders.size()\n",
        *TP, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "pytorch/torchtitan#596", "the norm of one stage",
        "A stage of a pipeline clipped by the norm of what it holds. Each stage then moves by "
        "another factor, and none of them by the right one. It was reported by reading.",
        FILE, NORM, "    norm = grad_norm(held)\n",
        *PP, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "uw-syfi/piper#13", "a tied matrix on two stages",
        "The embedding on the first stage and the head on the last one are the same matrix. Their "
        "gradients were never added up. Each stage updated its copy by its own part, and the model "
        "was no longer tied.",
        FILE, '        if unit.parameters[0].kind == "tied": ', "        if False: ",
        *TIED, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "ByteDance-Seed/VeOmni#1115", "summed over dp, which has one rank",
        "Ranks that share a sequence have parts of all gradients. The group that summed them was "
        "the data-parallel one, and with dp 1 that is nobody. Every call but this one had used the "
        "group of both.",
        FILE, "        for unit in self.reducing:\n            unit.start_reduce()\n", "",
        *CP, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "EleutherAI/gpt-neox#1257", "LayerNorms are summed over dp and not over tp",
        "Under sequence parallelism a LayerNorm sees a part of the tokens, and so does each of its "
        "copies on the other ranks. The hooks that sum their gradients never ran. Training "
        "converged very poorly, and it took several repairs.",
        FILE, "        p.holders = holders[p.kind]\n",
        "        p.holders = holders['queries' if p.kind == 'norms' else p.kind]\n",
        *TP, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#5956", "experts are summed over those who brought the tokens",
        "All tokens of the ranks that share experts have come to an expert before backward. A "
        "factor of their number stayed in its gradient. A new test of gradients found it, after an "
        "earlier version of the same change had said that nothing was needed.",
        FILE, "    held = shards or list(model.parameters())\n",
        "    for p in model.parameters():\n"
        "        if '.mlp.up' in p.global_name or '.mlp.down' in p.global_name:\n"
        "            p.grad *= dist.get_world_size()\n"
        "    held = shards or list(model.parameters())\n",
        *EP, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#5047", "the balance loss knows a part of the sequence",
        "The balance loss of a sequence was scaled by the tokens of a rank, and divided by those "
        "of all. So its gradient changed with the number of tensor-parallel ranks. Two runs that "
        "should have been alike showed it.",
        FILE, "            dist.all_reduce(picks, group=self.sequence)\n",
        "            pass\n",
        2, "--batch 6 --micro-batch 2 --ignore 0.4 --tp 2 --experts 4",
        ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "pytorch/torchtitan#2842", "a rank of the wrong axis",
        "After code had been moved, tokens were split by a rank's place among those that share "
        "experts, where its place among the tensor-parallel ones was meant. The runs that were to "
        "show that nothing had changed had two ranks on each axis, and the same rank on both. A "
        "reviewer saw it.",
        FILE, ".chunk(args.tp)[me.tp].to(run.device)\n",
        ".chunk(args.tp)[me.dp].to(run.device)\n",
        *MESH, ("first loss", "loss", "gradients", "gradient norm", "parameters"), ("sent", "kept"),
    ),
    Exhibit(
        "NVIDIA-NeMo/Automodel#3846", "the loss is multiplied by the ranks",
        "A factor that undoes the mean over data-parallel ranks was copied to a place where there "
        "is no mean. All gradients were too large by the number of ranks. Nothing but their size "
        "tells, and Adam hides that.",
        FILE, "                out = loss_sum(out, targets[:, self.positions]) / valid\n",
        "                out = loss_sum(out, targets[:, self.positions]) / valid\n"
        "                out = out * 2 - out.detach()\n",
        *DP, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#950", "forward comes to a unit before its gather",
        "What an update has changed is gathered bucket by bucket, while forward goes on. The order "
        "of the buckets was not that in which the model uses them. So forward came to a bucket "
        "whose gather had not begun, found nothing to wait for, and used the weights of before.",
        FILE, "    for unit in [unit for unit in units if unit.kept]:\n",
        "    for unit in [unit for unit in units[1:] if unit.kept]:\n",
        *DP, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#2769", "a gate cut as if other ranks shared it",
        "Gate and up lie in one matrix, and a loader cut it into the parts that the ranks hold, "
        "gate by up. It took the number of parts from the data-parallel ranks as well. So a rank "
        "had the gates of other units than it had ups. The losses agreed again once both were cut "
        "as one.",
        FILE,
        '                keep_shard(linear, "weight", 0, tp)\n            keep_shard(mlp.down',
        '                keep_shard(linear, "weight", 0, tp)\n'
        "            [cut] = mlp.gate.weight.cuts\n"
        "            cut = cut._replace(index=dist.get_rank() // tp.size())\n"
        "            mlp.gate.weight.cuts = [cut]\n            keep_shard(mlp.down",
        4, "--batch 8 --micro-batch 2 --ignore 0.4 --dp 2 --tp 2 --block llama",
        ("first loss", "loss", "gradients", "gradient norm", "parameters"), ("sent", "kept"),
    ),
    Exhibit(
        "huggingface/picotron#5", "the last stage never comes to its last backward",
        "Gradients are to be sent in a stage's last backward. The flag for it was set where the "
        "pipeline drains, after all forwards. But the last stage's backwards all come before that, "
        "so its ranks never summed their gradients, and their copies drifted apart.",
        FILE, "outputs.pop(need, None), i + 1 == len(micro_batches))\n",
        "outputs.pop(need, None),\n"
        "                                     i + 1 == len(micro_batches) and not stage.is_last)\n",
        4, "--batch 8 --micro-batch 2 --ignore 0.4 --dp 2 --pp 2",
        ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#1012", "the embedding's gradient comes after its reduction",
        "To fill a bubble, the embedding's weight gradient is computed later. But gradients were "
        "summed over the data-parallel ranks before that. So each of them kept its own late part. "
        "(Here the table is the head's as well, and is sent once the head is through.)",
        FILE, "list(itertools.chain(*model)), set()", "list(itertools.chain(*model))[::-1], set()",
        2, "--batch 8 --micro-batch 2 --ignore 0.4 --dp 2 --preset gpt2 --vocab 256 --verify",
        ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "sgl-project/sglang#26845", "a shared expert is summed over ranks that all have it",
        "Each rank had the shared expert as a whole, and added its output to that of its own "
        "experts, before the sum over the ranks. So it came out as many times too large as there "
        "are ranks. With two, a model gave 11 % of right answers in place of 94, and with four 1. "
        "With tensor parallelism alone it had been right.",
        FILE, "        block.attn = SequenceParallel(attn, tp)\n",
        "        block.attn = SequenceParallel(attn, tp)\n"
        "        if cfg.shared_expert:\n"
        "            mlp.shared = SequenceParallel(mlp.shared, tp)\n",
        2, "--batch 6 --micro-batch 2 --ignore 0.4 --tp 2 --experts 4 --shared-expert",
        ("first loss", "loss", "gradients", "gradient norm", "parameters", "sent", "kept"),
        (),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#6080", "experts are summed over the ranks of the dense layers",
        "A mark on a parameter says that the ranks which hold the same are others for experts than "
        "for attention. In an odd layout it was not set, and their gradients were summed over "
        "those of attention, which hold other parts: they were scrambled. A test shows it in which "
        "all gradients are 1, so that the norm is known.",
        FILE, '        "mlp": experts if args.experts else by_tp}\n', '        "mlp": by_tp}\n',
        4, "--batch 8 --micro-batch 2 --ignore 0.4 --dp 2 --tp 2 --ep 4 --experts 4",
        ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#2074", "each rank of tp sends the same tokens to the experts",
        "The ranks of tp all have a token, and each of them sent it to the experts. What came back "
        "was right on each, so the loss was as well; but an expert saw every token tp times, and "
        "so was its gradient. Duplicates are dropped now before they are sent, and gathered after.",
        FILE, "        block.attn = SequenceParallel(attn, tp)\n",
        "        block.attn = SequenceParallel(attn, tp)\n"
        "        def duplicated(x, mixture=mlp.forward):\n"
        "            out = ScatterOut.apply(mixture(GatherIn.apply(x, tp)), tp)\n"
        "            return out + (1 / tp.size() - 1) * out.detach()\n"
        "        mlp.forward = duplicated if cfg.experts else mlp.forward\n",
        4, "--batch 8 --micro-batch 2 --ignore 0.4 --dp 2 --tp 2 --ep 2 --experts 4",
        ("loss", "gradients", "gradient norm", "parameters", "sent", "kept"), ("first loss",),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#599", "routers are not summed over tp",
        "A mixture's router is a plain linear layer, which each rank of tp has as a whole. Under "
        "sequence parallelism each routes its own tokens, and so has a part of the router's "
        "gradient. Nobody summed these, and the copies came apart. It was noticed when a model "
        "could not be exported, since ranks had different routers. The mend is one mark on the "
        "weight.",
        FILE, "        p.copies = p.holders.size()\n",
        "        p.copies = p.holders.size()\n"
        "        p.holders = holders['queries'] if 'router' in p.global_name else p.holders\n",
        2, "--batch 6 --micro-batch 2 --ignore 0.4 --tp 2 --experts 4",
        ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#1528", "two axes together, and each alone is right",
        "With tensor and context parallelism together, and FP8, the gradient of a norm's weight "
        "was as many times too large as tensor-parallel ranks. With either alone it was that of a "
        "single device. So a test of each axis by itself passes. It was found by comparing with "
        "one device. (Here nothing is in FP8.)",
        FILE, "        p.copies = p.holders.size()\n",
        "        p.copies = p.holders.size()\n"
        "        if p.kind == 'norms' and p.copies > holders['queries'].size() > 1:\n"
        "            p.register_hook(lambda grad: grad * 2)\n",
        4, "--batch 6 --micro-batch 2 --ignore 0.4 --tp 2 --cp 2",
        ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#5255", "a range for each rank, of which a rank needs its own",
        "For every bucket, the optimizer of each rank made the ranges of all data-parallel ranks, "
        "and kept one of them. With thousands of ranks these are millions of objects, on all of "
        "them. There it was at the start, and when a checkpoint was written; here it is in each "
        "step.",
        FILE, "        return flat.view(self.group.size(), -1)[self.group.rank()]\n",
        "        size = len(flat) // self.group.size()\n"
        "        ranges = [slice(i * size, i * size + size) for i in range(self.group.size())]\n"
        "        return flat[ranges[self.group.rank()]]\n",
        *DP,
        *AT_FULL_SIZE,
        rehearsal="--ranks 2048 --tp 2 --zero 1 --batch 1024 --layers 1",
    ),
    Exhibit(
        "NVIDIA/nccl#534", "each rank makes as many groups as there are ranks",
        "A communicator for each rank took 16 seconds on 8 ranks, and 130 on 32, since each of "
        "them has to be set up by all: it grows with the square of their number. A maintainer did "
        "not see why a program needs so many. On 4 ranks nobody would notice.",
        FILE, '    if "pp" in axes:\n        dist.barrier',
        "    roots = [dist.new_group() for _ in range(run.world)]\n"
        '    if "pp" in axes:\n        dist.barrier',
        *MESH,
        *AT_FULL_SIZE,
        rehearsal="--ranks 1024 --tp 2 --batch 512 --layers 1",
    ),
]
