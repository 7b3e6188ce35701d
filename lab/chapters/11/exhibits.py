"""The exhibits of chapter 11: matrices that are cut where Muon needs them whole, or joined where it
does not."""

from lab.museum.exhibit import Exhibit

FILE = "11_muon.py"
BASE = "--optimizer muon --lr 2e-3 --ignore 0.4"
# Three ranks, whose shards end inside of matrices; three micro-batches on each.
DEAL = 3, f"{BASE} --batch 18 --micro-batch 2"
GATHER = 3, f"{BASE} --batch 18 --micro-batch 2 --variant gather"
ZERO_3 = 3, f"{BASE} --batch 18 --micro-batch 2 --zero 3"
TP = 2, f"{BASE} --batch 6 --micro-batch 2"
SHARED = 2, f"{BASE} --batch 6 --micro-batch 2 --kv-heads 1"
TIED = 2, f"{BASE} --batch 6 --micro-batch 2 --pp 2 --preset gpt2 --vocab 256 --verify"

MOMENTUM = (
    "                momentum.lerp_(p.grad, 1 - mu)\n"
    "                yield narrow(p, p.grad.lerp(momentum, mu))      # Nesterov's\n"
    "\n"
    "        for p, update in zip(matrices, self.orthogonal(matrices, updates())):\n")
AFTER_EACH = (
    "                own = []\n"
    '                for grad in getattr(p, "parts", [p.grad]):\n'
    "                    momentum.lerp_(grad, 1 - mu)\n"
    "                    own.append(narrow(p, grad.lerp(momentum, mu)))\n"
    "                yield own\n"
    "\n"
    "        done = [self.orthogonal(matrices, own) for own in zip(*updates())]\n"
    "        for p, update in zip(matrices, map(sum, zip(*done))):\n")
ONE_BY_ONE = (
    "    for i, x in enumerate(hands[me]):\n"
    "        own = runs[i::len(hands[me])]                   # from rank 0, 1, ...\n"
    "        full = orthogonal_part(x.p, torch.cat(own).view(x.shape)).flatten()\n"
    "        for run, done in zip(own, full.split([len(run) for run in own])):\n"
    "            run.copy_(done)\n")
STACKED = (
    "    owns = [runs[i::len(hands[me])] for i in range(len(hands[me]))]\n"
    "    for shape in {x.shape for x in hands[me]}:\n"
    "        alike = [own for own, x in zip(owns, hands[me]) if x.shape == shape]\n"
    "        stack = torch.stack([torch.cat(own).view(shape) for own in alike])\n"
    "        stack = orthogonal(stack.flatten(1) if len(stack) > 1 else stack)\n"
    "        for own, full in zip(alike, stack.flatten(1)):\n"
    "            for run, done in zip(own, full.split([len(run) for run in own])):\n"
    "                run.copy_(done)\n")
CUTS = '    cuts = [cut for cut in getattr(p, "cuts", ()) if cut.dim >= p.ndim - 2]\n'
WAY = '            WAYS["gather" if shared else self.way](shards, flats)\n'
STARTS = (
    "            shape = p.shape[-2:]\n"
    "            starts = range(at, at + p.numel(), math.prod(shape)) if is_matrix(p) else ()\n")

EXHIBITS = [
    Exhibit(
        "deepspeedai/DeepSpeed#7807", "of a matrix, a rank has its own part summed, and no other",
        "A reduce_scatter leaves each rank with the sum for its own shard. Where a shard ends "
        "inside of a matrix, Muon was given all of that matrix's gradient. But what lies in the "
        "others' shards was still this rank's own, and not the sum. So two ranks that share a "
        "matrix orthogonalized two different ones. A matrix that lies in one shard was right. "
        "Stages 1 and 2 have it so by default; today parts go to all ranks that need them.",
        FILE,
        "        full = update.new_empty(group.size() * len(update))\n"
        "        common.all_gather(full, update, group=group)\n",
        "        full = shard.seen.to(update)\n"
        "        full.chunk(group.size())[group.rank()].copy_(update)\n",
        *GATHER, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
        more=(("        mine = torch.empty_like(self.mine(flat))\n",
               "        mine = torch.empty_like(self.mine(flat))\n"
               "        self.momentum = getattr(self, 'momentum', 0 * flat).lerp(flat, 0.05)\n"
               "        self.shard.seen = flat.lerp(self.momentum, 0.95)\n"),),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8441", "whoever shards orthogonalizes; and nobody shards",
        "Newton-Schulz had moved to where ZeRO has whole matrices, and the optimizer was left to "
        "subtract what it is given. Without ZeRO, which is the default, nobody orthogonalizes, and "
        "it is given the gradient. So whoever asked for Muon, and for nothing else, trained with "
        "SGD. No error, no warning, and the loss fell. It was found by counting how often "
        "Newton-Schulz was called.",
        FILE, "            return map(orthogonal_part, matrices, updates)\n",
        "            return updates\n",
        2, f"{BASE} --batch 8 --micro-batch 2", ("FLOPs",),
        ("first loss", "loss", "gradients", "gradient norm", "parameters", "sent", "kept"),
        chapter="02_data_parallel.py",
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8443", "Muon takes a step for each micro-batch",
        "Under stage 3, Muon was called where gradients are reduced, and that is in each "
        "micro-batch. So momentum advanced four times in a step of four. What was orthogonalized "
        "were gradients of parts of the batch, and not their sum. Stages 1 and 2 were right. "
        "The same samples in one micro-batch and in four gave weights that were 10% apart.",
        FILE, MOMENTUM, AFTER_EACH,
        *ZERO_3, ("loss", "gradients", "gradient norm", "parameters", "sent", "FLOPs"),
        ("first loss", "kept"),
        more=(("        self.shard.grad = mine if before is None else before.add_(mine)\n",
               "        self.shard.grad = mine if before is None else before.add_(mine)\n"
               "        if self.stage == 3:\n"
               "            self.shard.parts.append(sums.clone())\n"),
              ("        before = self.shard.grad                        ",
               "        sums = mine.clone()\n"
               "        before = self.shard.grad                        "),
              ("        unit.shard.grad = None\n        if stage < 3:\n",
               "        unit.shard.grad, unit.shard.parts = None, []\n        if stage < 3:\n"),
              ("            piece.grad = None if shard.grad is None else shard.grad[where]\n",
               "            piece.grad = None if shard.grad is None else shard.grad[where]\n"
               '            if getattr(shard, "parts", ()):\n'
               "                piece.parts = [grad[where] for grad in shard.parts]\n")),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8438", "what is flat looks as if it were no matrix",
        "Whether a parameter is Muon's was asked of its number of dimensions. But a model that is "
        "built for stage 3 has flat placeholders from the start, and keeps the shapes elsewhere. "
        "So nothing in it was a matrix, and AdamW updated all. The loss fell. Muon's update, with "
        "a counter around it, was called 84 times for a model that was built first, and never for "
        "this one.",
        FILE, "            kinds[is_matrix(p)].append(p)\n",
        "            kinds[p.ndim > 1 and is_matrix(p)].append(p)\n",
        *ZERO_3, ("loss", "gradients", "gradient norm", "parameters", "states"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8437", "each rank of tp orthogonalizes its own rows",
        "Under tensor parallelism a rank has some rows of a projection, and Muon took them for a "
        "matrix. But the rows of an orthogonalized matrix are not what orthogonalizing some rows "
        "gives. With one rank and with two, gradients of a first step were equal to 7e-7. The "
        "updates differed by 39%, and were 11% longer with two.",
        FILE, CUTS + "    return part(orthogonal(whole(x, cuts)), cuts)\n",
        "    return orthogonal(x)\n",
        *TP, ("loss", "gradients", "gradient norm", "parameters", "sent", "FLOPs"),
        ("first loss", "kept"), chapter="04_tensor_parallel.py",
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#6380", "an update's size is that of a part's shape",
        "An update is scaled by its matrix's shape. The default was to take each tensor-parallel "
        "rank's part for a matrix of its own. So what is orthogonalized, and by what it is scaled, "
        "and with it the learning rate that works, changed with every change of the layout. The "
        "new default is the whole matrix. (Here the scale alone is the part's.)",
        FILE, '    return getattr(p, "full_shape", p.shape)[-2:]\n', "    return p.shape[-2:]\n",
        *TP, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
        chapter="04_tensor_parallel.py",
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#7395", "copies are joined as if they were parts",
        "Some projections are held as a whole by every tensor-parallel rank, and were marked as if "
        "they were cut by rows. Before Newton-Schulz, their gradients were gathered, and came to a "
        "matrix of twice the rows. Each rank then took its part of what had become of that. The "
        "repair compares two ranks with one, for tall and wide matrices.",
        FILE, CUTS,
        "    cuts = [cut._replace(index=cut.group.rank(), parts=cut.group.size())\n"
        '            for cut in getattr(p, "cuts", ()) if cut.dim >= p.ndim - 2]\n',
        *SHARED, ("loss", "gradients", "gradient norm", "parameters", "FLOPs"),
        ("first loss", "sent", "kept"), chapter="04_tensor_parallel.py",
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#7117", "q, k and v are one matrix, if the shards are such",
        "q, k and v lie in one parameter, and are orthogonalized one by one. Whether they can be "
        "was asked of the rows that a rank has, and a rank's shard has too few of them. So on one "
        "rank there were three matrices, and sharded there was one, in which q's rows are nearly "
        "all: what k and v got was 95% off. A line of the debugging log said so. On 256 GPUs the "
        "loss was 0.17% higher, four times what is between two runs.",
        FILE, STARTS,
        "            shape, name = p.shape[-2:], p.global_name[-8]\n"
        '            if name == "q":\n'
        '                fused = [len(x) for x in shard.flat[0] if x.global_name[-8] in "qkv"]\n'
        "                shape = torch.Size([sum(fused), shape[1]])\n"
        "            starts = range(at, at + p.numel(), math.prod(shape)) if is_matrix(p) else ()\n"
        '            starts = () if name in "kv" else starts\n',
        *DEAL, ("gradients", "gradient norm", "parameters", "FLOPs"),
        ("first loss", "loss", "kept"),
    ),
    Exhibit(
        "microsoft/dion#119", "a stack of matrices is taken for a matrix",
        "Matrices of one shape are stacked, sent together, and orthogonalized in one call. With an "
        "option for convolutions, whatever has three dimensions was flattened from the second one "
        "on. That is right for a convolution's weight. Of a stack of three layers it makes a "
        "matrix with a row for each layer, and these were made orthogonal to each other. A layer "
        "alone in its stack was right. A question about the README brought it up.",
        FILE, ONE_BY_ONE, STACKED,
        *DEAL, ("loss", "gradients", "gradient norm", "parameters", "FLOPs"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#8439", "updates are clipped, and not gradients",
        "Where gradients were clipped, matrices had their orthogonalized updates by then. The norm "
        "of these says how large the model is, and nothing of its gradients. So each step was "
        "divided by a constant that grows with the model, 4 for 128 features and 86 for 8,192. "
        "Clipping to 1 is the default. Users found that Muon's learning rate had no effect.",
        FILE, WAY,
        WAY + "            square = sum(flat.square().sum() for flat in flats)\n"
        "            dist.all_reduce(square, group=shards[0].flat[2])\n"
        "            flats = [flat / square.sqrt().clamp(min=1) for flat in flats]\n",
        *DEAL, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "KempnerInstitute/KempnerForge#182", "half of the gradients are set to zero",
        "Muon had registered its own matrices, and kept an AdamW inside for all else. It handed on "
        "step and state_dict to that one, and forgot zero_grad. So the gradients of embedding and "
        "head were added up for the whole run: once, twice, three times in three steps. In a 7B "
        "model these were a billion parameters. Its tests had a vocabulary so small that Muon took "
        "the embedding as well.",
        FILE, "        unit.shard.grad = None\n        if stage < 3:\n",
        "        if any(map(is_matrix, unit.parameters)):\n"
        "            unit.shard.grad = None\n        if stage < 3:\n",
        *DEAL, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#4641", "of a tied table, AdamW has one copy and Muon the other",
        "The first stage and the last one hold the same table. That it is one, and so AdamW's, was "
        "noted on the first stage alone. On the last one it had two dimensions and no mark, and so "
        "it was Muon's. Both got the same gradient, and made different updates of it. The copies "
        "drifted apart.",
        FILE, '    return p.ndim > 1 and p.global_name.startswith("block")\n',
        '    is_table = getattr(p, "kind", "") != "tied" or p.holders.rank() == 0\n'
        '    is_table = is_table and not p.global_name.startswith("block")\n'
        "    return p.ndim > 1 and not is_table\n",
        *TIED, ("loss", "gradients", "gradient norm", "parameters", "states", "FLOPs"),
        ("first loss", "kept"), chapter="09_5d.py",
    ),
]
