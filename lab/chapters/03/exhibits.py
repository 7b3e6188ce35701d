"""The exhibits of chapter 03: shards that are summed, updated and gathered, or not."""

from lab.museum.exhibit import AT_FULL_SIZE, Exhibit

FILE = "03_zero.py"
# Three micro-batches on each rank; units that do not divide by three ranks; clipping is active.
ZERO_1 = 3, "--batch 18 --micro-batch 2 --ignore 0.4 --clip 0.5 --variant zero1"
ZERO_2 = 3, "--batch 18 --micro-batch 2 --ignore 0.4 --clip 0.5 --variant zero2"
ZERO_3 = 3, "--batch 18 --micro-batch 2 --ignore 0.4 --clip 0.5 --variant zero3"
HSDP = 4, "--batch 16 --micro-batch 2 --ignore 0.4 --clip 0.5 --variant hsdp --shard-size 2"
ADD = "        self.shard.grad = self.sum if before is None else before.add_(self.sum)\n"

EXHIBITS = [
    Exhibit(
        "allenai/open-instruct#1498", "ZeRO-2 keeps the last micro-batch alone",
        "Accumulation was done by hand, and the library had been told that there is none. So it "
        "took each backward for the end of a step, and stage 2 began its sum anew every time. Only "
        "the last micro-batch reached the update. Stage 3 counts otherwise, and was right.",
        FILE, ADD, "        self.shard.grad = self.sum\n",
        *ZERO_2, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "InfiniTensor/InfiniTrain#213",
        "the first micro-batch is reduced, and no other one",
        "A flag that says that a reduction has begun was set by the first backward, and cleared in "
        "the optimizer's step alone. So later micro-batches were not reduced. It happened only "
        "where messages hide behind backward; else the reduction came in the step.",
        FILE, ADD, "        self.shard.grad = self.sum if before is None else before\n",
        *ZERO_3, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#6773", "the shard's sum is scaled in every micro-batch",
        "A reduction over one rank cannot multiply while it sums, so the factor was applied to the "
        "buffer itself, in every micro-batch. With accumulation, earlier gradients were multiplied "
        "again and again. A review found it.",
        FILE, ADD, ADD + "        self.shard.grad *= 0.9\n",
        *ZERO_2, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "huggingface/accelerate#3256", "an optimizer of tensors that nobody uses",
        "The optimizer was made before the model was wrapped. Flattening then put other tensors "
        "in the place of its parameters, and each step updated the old ones. A tool that traces "
        "training noticed that no parameter changes. The loss was that of the first step, for "
        "ever.",
        FILE, "    shards = [unit.shard for unit in units]\n    optimizer",
        "    shards = [nn.Parameter(unit.shard.detach().clone()) for unit in units]\n"
        "    for p, unit in zip(shards, units):\n"
        "        p.flat = unit.shard.flat\n"
        "    optimizer",
        *ZERO_2, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#176076", "the last rank's rows never change",
        "A matrix that does not divide by the ranks was padded on the last one, which made a copy "
        "of its shard. Updates went into the copy, and were lost. All other ranks updated theirs, "
        "so the model trained, but for these rows.",
        FILE, "    optimizer.step()\n    return norm\n",
        "    for unit in units:\n"
        "        if unit.padding and unit.group.rank() == unit.group.size() - 1:\n"
        "            unit.shard.grad = torch.zeros_like(unit.shard)\n"
        "    optimizer.step()\n    return norm\n",
        *ZERO_2, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "radixark/miles_diffusion#35", "the norm of a shard clips",
        "In every run with FSDP the norm that was logged was that of the rank's own shard. The "
        "sum over the ranks is taken only where somebody asks for it, and logging did not. It was "
        "too small by about the square root of the number of shards, and was found because the "
        "same run placed in two ways told two norms.",
        FILE, "    norm = grad_norm(shards, units[0].group) ", "    norm = grad_norm(shards) ",
        *ZERO_3, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#88955", "what all ranks hold counts in the norm on each of them",
        "Squares of norms were summed over the ranks for all parameters, also for those that each "
        "rank holds as a whole. These counted as often as there are ranks, so that clipping made "
        "updates too small. The fix came with a test that mixes both kinds.",
        FILE, "    norm = grad_norm(shards, units[0].group) ",
        "    norm = grad_norm(shards, units[0].group)\n"
        "    norm = norm * (dist.get_world_size() / units[0].group.size()) ** 0.5 ",
        *HSDP, ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#106395", "the shard's sum is in 16 bits",
        "On 96 GPUs a model trained well, and on 384 it was unstable. The reason was that its "
        "gradients were summed in bfloat16: each rank more costs low bits. With a reduction in "
        "float32 it trained again.",
        FILE, "        self.shard.cuts = (cut,) ",
        "        self.shard.grad_dtype = torch.bfloat16\n        self.shard.cuts = (cut,) ",
        *ZERO_2, ("gradients", "gradient norm", "parameters", "sent", "states"),
        ("first loss", "loss", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#7985", "the last micro-batch comes after the reduction",
        "The sum of the gradients was reduced over the ranks before the last micro-batch had been "
        "added to it. So that one stayed on its rank. Before a step two ranks had gradients of "
        "0.2206 and 0.2123, and curves of runs that should have been equal drifted apart.",
        FILE, "count == len(micro_batches)\n", "count == len(micro_batches) - 1\n",
        *ZERO_1, ("loss", "gradients", "gradient norm", "parameters", "states"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#144535", "shards that differ between groups are not summed",
        "A schedule called the hooks of FSDP by hand, and missed the last one of a step. So the "
        "optimizer read gradients of which the sum was not complete. Sometimes it was complete by "
        "chance, as it is with all races.",
        FILE, "    if replicas:\n", "    if replicas and False:\n",
        *HSDP, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#190626", "of two sums, one is in fp32",
        "Gradients were to be summed in float32, and on two axes one after the other. The setting "
        "reached the first sum alone. The second, over ranks that hold the same, took gradients "
        "as they came, in bfloat16, and nothing said so. (There that axis is tensor parallelism; "
        "here it goes across groups of shards.)",
        FILE, "            dist.all_reduce(unit.shard.grad, group=replicas)\n",
        "            half = unit.shard.grad.bfloat16()\n"
        "            dist.all_reduce(half, group=replicas)\n"
        "            unit.shard.grad.copy_(half)\n",
        *HSDP, ("gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "stanford-futuredata/Megatron-LM#5", "masters of another model",
        "A pretrained model was loaded to be trained further in bfloat16. Its masters were made "
        "anew from what was loaded if training was in fp16, and in bfloat16 that was forgotten. So "
        "the first forward used the loaded weights, and the first step put the masters' own in "
        "their place, which were still the random ones. Training began from scratch.",
        FILE, "    return optimizer\n",
        "    for p in shards:\n"
        "        p.master.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))\n"
        "    return optimizer\n",
        3, f"{ZERO_3[1]} --precision bf16", ("loss", "parameters"),
        ("first loss", "gradients", "gradient norm", "sent", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#7640", "a flat unit has more numbers than an int32 counts",
        "A fused Adam held the size of each tensor in an int. A model of 2.4 G parameters on one "
        "GPU was one flat tensor, its size became negative, and nothing was ever updated. The "
        "steps seemed normal. On two GPUs the shards were small enough, and all was right. Here it "
        "is where each parameter ends in a unit: one block of 405B is 3.2 G numbers.",
        FILE, "        pieces = flat.split([*(p.numel() for p in self.parameters), self.padding])\n"
        "        return [x.view(p.shape) for x, p in zip(pieces, self.parameters)]       "
        "# and not padding\n",
        "        sizes = torch.tensor([p.numel() for p in self.parameters])\n"
        "        ends = sizes.cumsum(0, dtype=torch.int32).tolist()\n"
        "        return [flat[end - p.numel():end].view(p.shape) for p, end in "
        "zip(self.parameters, ends)]\n",
        2, "--batch 8 --micro-batch 2 --ignore 0.4 --variant zero2",
        *AT_FULL_SIZE,
        rehearsal="--variant zero2 --ranks 64 --batch 64 --preset llama-405b --layers 2",
    ),
]
