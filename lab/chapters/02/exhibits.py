"""The exhibits of chapter 02: who sums gradients, when, and divided by what."""

from lab.museum.exhibit import AT_FULL_SIZE, Exhibit

FILE = "02_data_parallel.py"
# Three micro-batches on each rank; ranks with other numbers of valid targets; clipping is active.
NAIVE = 3, "--batch 18 --micro-batch 2 --ignore 0.4 --variant naive"
CLIPPED = 3, "--batch 18 --micro-batch 2 --ignore 0.4 --variant naive --clip 0.5"
LOSS = "        loss = loss_sum(replica(tokens), targets) / valid\n        loss.backward()\n"
SUM = "            dist.all_reduce(p.grad, group=self.group)\n"

EXHIBITS = [
    Exhibit(
        "NVIDIA/Megatron-LM#1685", "an example that never sums its gradients",
        "A training loop that is shown as an example did without the call that sums gradients "
        "over the data-parallel ranks. So each rank trained a model of its own, on its part of "
        "the data. It was found by reading, and maintainers added the line.",
        FILE, "    replica.finish()\n\n    norm", "    norm",
        *NAIVE, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "huggingface/transformers#34242", "tokens are counted over micro-batches, not over ranks",
        "After a repair, the loss was divided by the tokens of all micro-batches of a rank. But "
        "then the ranks' gradients were averaged. So tokens of a rank with few of them still "
        "weighed more than others, and data parallelism was still not the same as one process.",
        FILE, LOSS,
        "        here = sum((t >= 0).sum().item() for _, t in micro_batches)\n"
        "        here *= dist.get_world_size()\n"
        "        loss = loss_sum(replica(tokens), targets) / here\n        loss.backward()\n",
        *NAIVE, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "NVIDIA-NeMo/Automodel#3846", "multiplied by the ranks, although it was a local mean",
        "To multiply the loss by the number of ranks undoes the mean that data parallelism takes, "
        "if the loss was divided by the tokens of all ranks. The line had been copied into a "
        "recipe where the loss is a mean of the rank's own tokens. There gradients became larger "
        "by that number. A simulation of 4 ranks and 2 micro-batches showed a factor of 8, after "
        "half a repair 4, and in the end 1.",
        FILE, LOSS,
        "        loss = loss_sum(replica(tokens), targets) / valid\n"
        "        (loss * dist.get_world_size()).backward()\n",
        *NAIVE, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "Snowflake-AI-Research/Arctic-Platform#119", "a mean over the ranks of what is a part",
        "A message carried the number of tokens of all ranks, and left out the number of ranks, "
        "which was there only to undo the mean of the gradients. So they were too small by it. "
        "Their direction was right, and nothing that is logged tells the difference. Adam divides "
        "such a factor out, and only clipping by the norm brings it back.",
        FILE, SUM, SUM + "            p.grad /= self.group.size()\n",
        *CLIPPED, ("gradient norm",),
        ("first loss", "loss", "gradients", "parameters", "sent", "kept"),
    ),
    Exhibit(
        "pixeli99/SVD_Xtend#75", "all GPUs train on the same items",
        "The data set drew its items by a random number, and all processes had the same seed. So "
        "the batch of all ranks was one rank's batch, repeated. Its author confirmed it. The loss "
        "falls, and the GPUs are busy.",
        FILE, "    for batch in run.batches(share=run.rank):           # 1/N of the sequences\n",
        "    for batch in run.batches(share=0):\n",
        *NAIVE, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#106395", "a sum in bfloat16",
        "A model trained well on 96 GPUs, and was unstable on 384. Gradients were summed in 16 "
        "bits, so that with more ranks more of the low bits were lost. In float32 it was stable "
        "again.",
        FILE, SUM,
        "            half = p.grad.bfloat16()\n"
        "            dist.all_reduce(half, group=self.group)\n"
        "            p.grad = half.to(p.grad)\n",
        *NAIVE, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "radixark/miles_diffusion#35", "a rank's own norm is shown, and clips",
        "The norm that was logged was that of the rank's own part, since the sum over the ranks is "
        "taken only where somebody asks for it. It was too small in every run, by the square root "
        "of the number of parts. It was found because the same run, placed in two ways, told two "
        "norms.",
        FILE, "    replica.finish()\n\n    norm = grad_norm(replica.parameters())"
        "              # every rank has all of it: nothing to send\n",
        "    norm = grad_norm(replica.parameters())\n    replica.finish()\n",
        *CLIPPED, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "modelscope/FunASR#3472", "the first micro-batch is summed, and the last one is not",
        "With accumulation, gradients are to be summed in the last micro-batch of a step. The "
        "condition was off by one, so they were summed in the first. What came after it stayed on "
        "its rank: in a reproduction with two ranks they had 4.0 and 7.0, and should have had 5.5 "
        "both. As many bytes are sent as ever. (Here an assertion would say so at once; it is "
        "taken out.)",
        FILE, "        replica.sends = i == len(micro_batches)\n",
        "        replica.sends = i == 1\n",
        3, "--batch 18 --micro-batch 2 --ignore 0.4 --variant overlap",
        ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
        (('        assert p not in self.ready, "finish() must come after a backward that sends"\n',
          ""),),
    ),
    Exhibit(
        "pytorch/pytorch#104336", "the hooks are on parameters that the model no longer has",
        "A model was moved to the CPU, to make room on its GPU for a while, and back. The hooks "
        "that start the sums were on what its parameters had been before. From then on each rank "
        "trained a model of its own, with no error and no warning. DDP should support this, the "
        "reporter wrote, or say that it does not. (Here zeros are summed in the gradients' place, "
        "so that as many bytes are sent as ever.)",
        FILE, "            p.register_post_accumulate_grad_hook(self.gradient_is_ready)\n",
        "            p.register_post_accumulate_grad_hook(self.gradient_is_ready)\n"
        "        for part in module.modules():\n"
        "            for name, p in part.named_parameters(recurse=False):\n"
        "                moved = nn.Parameter(p.detach().clone())\n"
        "                vars(moved).update(vars(p))\n"
        "                setattr(part, name, moved)\n",
        3, "--batch 18 --micro-batch 2 --ignore 0.4 --variant overlap",
        ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/Megatron-LM#6378", "each rank gathers the tokens of all ranks",
        "To balance sequences over the data-parallel ranks, a change gathered the samples of all "
        "of them into one buffer. A review counted: with 64 ranks it takes 128 MiB for the tokens "
        "alone, as much again for each further key, and it grows with the ranks. Nothing in a run "
        "on two shows that.",
        FILE, "        with run.measure():\n            loss, norm = train_step(",
        "        mine = torch.cat([tokens for tokens, _ in batch.micro_batches])\n"
        "        everyones = mine.new_empty(run.world, *mine.shape)\n"
        "        common.all_gather(everyones.flatten(0, 1), mine, group=group)\n"
        "        with run.measure():\n            loss, norm = train_step(",
        2, "--batch 8 --micro-batch 2 --ignore 0.4",
        *AT_FULL_SIZE,
        rehearsal="--ranks 1024 --batch 1024 --layers 1 --seq 4096 --attention sdpa",
    ),
    Exhibit(
        "horovod/horovod#445", "the numbers of all ranks are gathered in each step",
        "Behind the all_reduces of every batch there was an all_gather, whose time grew with the "
        "number of nodes, so that training did not scale. Here it is of the losses, for the "
        "report: a list of as many tensors as there are ranks, which are added up one by one. On "
        "a few ranks nobody feels it, and the loss is the same.",
        FILE, "        dist.all_reduce(loss, group=group)              # for the report, which "
        "shows the whole loss\n",
        "        losses = [torch.zeros_like(loss) for _ in range(run.world)]\n"
        "        dist.all_gather(losses, loss, group=group)\n        loss = sum(losses)\n",
        2, "--batch 8 --micro-batch 2 --ignore 0.4",
        *AT_FULL_SIZE,
        rehearsal="--ranks 1024 --batch 1024 --layers 1",
    ),
]
