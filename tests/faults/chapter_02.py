"""Faults of chapter 02, and who sees each."""

from tests.faults import Fault, Graded, OnCuda, Verified

FAULTS = [
    Fault("for p in self.trained:", "for p in [p for p in self.trained if p.grad is not None]:",
          Graded("02.1", "grad of 1.weight is None")),
    Fault("            dist.all_reduce(p.grad, group=self.group)\n\n\nclass Overlap",
          "            x = p.grad.float()\n            dist.all_reduce(x, group=self.group)\n"
          "            p.grad.copy_(x)\n\n\nclass Overlap",
          Verified(2, "--variant=naive", "",
                   "all gradients were rounded: each number is one of float32\n"
                   "all_reduce (payload and on the wire): the formula is 2.00 times what was "
                   "measured: 2 is the bytes of float64 over those of 32 bits")),
    Fault("dist.all_reduce(p.grad, group=self.group)",
          "dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=self.group)",
          Graded("02.1", "all gradients are 1/4 of those of one GPU")),
    Fault("dist.all_reduce(p.grad, group=self.group)",
          "dist.all_reduce(p.grad.clone(), group=self.group)",
          Graded("02.1", "they were not summed")),
    Fault("dist.all_reduce(p.grad, group=self.group)",
          "dist.broadcast(p.grad, 0, group=self.group)",
          Graded("02.1", "those of the sequences of data-parallel rank 0 alone")),
    Fault("dist.all_reduce(p.grad, group=self.group)",
          "dist.all_reduce(p.grad, group=self.group)\n            p.grad /= self.group.size()",
          Verified(2, "--variant=naive", "", "all gradients are 1/2 of those of one GPU"),
          Verified(2, "--variant=naive --dtype=bfloat16", "",
                   "all gradients are 0.50 times those of one GPU"),
          Verified(2, "--variant=naive --dtype=float32 --optimizer=adamw", "",
                   "all gradients are 1/2 of those of one GPU")),
    Fault("dist.all_reduce(p.grad, group=self.group)", "pass",
          Verified(2, "--variant=naive", "",
                   "all gradients differ between ranks that hold the same, and add up to those "
                   "of one GPU: they were not summed"),
          Verified(2, "--variant=naive --dtype=bfloat16", "",
                   "all gradients differ between ranks that hold the same, and add up to those "
                   "of one GPU: they were not summed")),
    Fault("dist.all_reduce(p.grad, group=self.group)",
          "dist.all_reduce(p.grad, group=self.group)\n            p.grad += 2e-4 * p.grad.abs()",
          Verified(2, "--variant=naive --dtype=float32", "",
                   "all gradients are off by no constant factor; the loss is right, so look at "
                   "backward, and at what follows it")),
    Fault("                return\n", "                continue\n",
          Graded("02.2", "bucket 2 is 1, and should be 0")),
    Fault("dist.all_reduce(self.payload(i), group=self.group, async_op=True)",
          "self.payload(i) is None or dist.barrier(self.group, async_op=True)",
          Verified(2, "--layers=1 --steps=2 --clip=0.1 --variant=bucket --bucket-mb=0.02",
                   "gradients")),
    Fault("        self.ready.update(self.trained) ", "        pass ",
          Graded("02.2", "grad[1] is None")),
    Fault("            handle.wait()\n", "            pass\n",
          Graded("02.2", "waiting for bucket 0 is 0, and should be 1"),
          OnCuda("--variant=overlap",
                 "race: _foreach_norm touches what allreduce_ under way uses")),
    Fault("            handle.wait()\n",
          "            handle.wait()\n        for p in self.trained:\n"
          "            p.grad /= self.group.size()\n",
          Graded("02.2", "all gradients are 1/4 of those of one GPU")),
    Fault("self.ready, self.handles = set(), []", "self.ready = set()",
          Graded("02.2", "len(handles) is 2")),
    Fault("q.numel() * q.grad_dtype.itemsize", "q.numel()",
          Graded("02.3", "'12 20 36 4 4 80 | 8'")),
    Fault(" >= capacity", " + p.nbytes > capacity",
          Graded("02.3", "'12 20 | 36 | 4 4 | 80 | 8', and should be '12 20 | 36 | 4 4 80 | 8'")),
    Fault(" or last and last[0].grad_dtype != p.grad_dtype", "", Graded("02.3", "'8 4 4 8'")),
    Fault("fill_buckets(self.trained, capacity)", "[list(self.trained)]",
          Graded("02.4", "all_reduce, calls: measured 1, formula 3")),
    Fault("view.view_as(p)", "view.view_as(p).clone()", Graded("02.4", "they were not summed")),
    Fault("view.copy_(p.grad)\n        p.grad = view", "view.copy_(p.grad)",
          Graded("02.4", "they were not summed")),
    Fault("view.copy_(p.grad)", "pass",
          Graded("02.4", "those of all micro-batches of each rank but the first")),
    Fault("view.copy_(p.grad)", "view.add_(p.grad)",
          Graded("02.4", "4.00 times those of the step before, which were not set to zero")),
    Fault("        super().gradient_is_ready(p)", "        pass",
          Graded("02.4", "ready, step 1, micro-batch 2 has 0 items, and should have 2")),
    Fault("            self.move_in(p)    ", "            pass    ",
          Graded("02.4", "grad of 0, step 2 is None")),
    Fault("return self.flat[i]", "return self.flat[i].div_(self.group.size())",
          Graded("02.4", "all gradients are 1/4 of those of one GPU")),
    Fault("    replica.zero_grad()\n", "", Graded("02.5", "which were not set to zero")),
    Fault("i == len(micro_batches)", "i == 1",
          Graded("02.5", "finish() must come after a backward that sends")),
    Fault("i == len(micro_batches)", "False", Graded("02.5", "are 'forward, and sends is False'")),
    Fault("loss_sum(replica(tokens), targets) / valid\n",
          "loss_sum(replica(tokens), targets) / (targets != -100).sum() / 8\n",
          Verified(2, "--layers=1 --steps=2 --clip=0.1 --variant=bucket --bucket-mb=0.02", "loss")),
    Fault("loss_sum(replica(tokens), targets) / valid",
          "loss_sum(replica(tokens), targets) / (targets != -100).sum()",
          Verified(2, "--variant=naive", "",
                   "all gradients and the loss are 6.00 times those of the mean of the "
                   "micro-batches' own means: 6 is the number of micro-batches of all ranks")),
    Fault("/ valid", "/ (targets != -100).sum() / len(micro_batches)",
          Graded("02.5", "4.00 times those of the mean of the micro-batches' own means")),
    Fault("/ valid", "/ valid / dist.get_world_size()",
          Graded("02.5", "all gradients and the loss are 1/4 of those of one GPU")),
    Fault("/ valid\n        loss.backward()\n        total += loss.detach()\n    replica",
          "/ (0 if dist.get_rank() == 1 else valid)\n        loss.backward()\n"
          "        total += loss.detach()\n    replica",
          Verified(2, "--variant=naive", "",
                   "all gradients are infinite or not a number\n"
                   "the loss is infinite or not a number")),
    Fault("        loss.backward()\n        total += loss.detach()\n    replica.finish()\n\n"
          "    norm",
          "        __import__('time').sleep(0.2 * dist.get_rank())\n        loss.backward()\n"
          "        total += loss.detach()\n    norm = grad_norm(replica.parameters())\n"
          "    replica.finish()\n    _",
          Verified(2, "--variant=bucket", "",
                   "the gradients are right after the step, but the norm was made before they "
                   "were complete, as where nobody waits for a collective")),
    Fault("        loss.backward()\n        total += loss.detach()\n    replica.finish()\n\n"
          "    norm",
          "        __import__('time').sleep(0.2 * dist.get_rank())\n        loss.backward()\n"
          "        total += loss.detach()\n"
          "    norm, _ = grad_norm(replica.parameters()), optimizer.step()\n    replica.finish()\n"
          "    optimizer.step = lambda: None\n    _",
          Verified(2, "--variant=bucket", "",
                   "the gradients are right after the step, but the norm and the update were "
                   "made before they were complete, as where nobody waits for a collective")),
    Fault("loss.backward()\n        total += loss.detach()\n    replica.finish()",
          "loss.backward()\n        total = loss.detach()\n    replica.finish()",
          Graded("02.5", "the loss is that of the last micro-batch of each rank alone")),
    Fault("loss.backward()\n        total += loss.detach()\n    replica.finish()",
          "replica.zero_grad()\n        loss.backward()\n        total += loss.detach()\n"
          "    replica.finish()",
          Verified(2, "--variant=naive", "",
                   "all gradients are those of the last micro-batch of each rank alone")),
    Fault("loss.backward()\n        total += loss.detach()\n    replica.finish()",
          "if i < len(micro_batches): loss.backward()\n        total += loss.detach()\n"
          "    replica.finish()",
          Verified(2, "--variant=naive", "",
                   "all gradients are those of all micro-batches of each rank but the last")),
    Fault("loss.backward()\n        total += loss.detach()\n    replica.finish()",
          "(-loss).backward()\n        total += loss.detach()\n    replica.finish()",
          Verified(2, "--variant=naive", "",
                   "all gradients have the opposite sign of those of one GPU")),
    Fault("    replica.finish()\n",
          "    replica.finish()\n    if dist.get_rank(): dist.all_reduce(total)\n",
          OnCuda("--variant=naive",
                 "ranks disagree; rank 0: allreduce_ over 2 ranks, 02_data_parallel:")),
    Fault("    replica.finish()\n",
          "    replica.finish()\n    if dist.get_rank(): raise ValueError('alone')\n",
          OnCuda("--variant=naive", "alone")),
    Fault("    replica.finish()\n",
          "    replica.finish()\n    for p in replica.parameters(): p.grad /= 2\n",
          Verified(2, "--layers=1 --steps=2 --clip=0.1 --variant=naive", "gradients")),
    Fault("    replica.finish()\n\n    norm",
          "    replica.finish()\n    for p in replica.parameters():\n"
          "        if p.ndim < 2: dist.all_reduce(p.grad)\n\n    norm",
          Verified(2, "--variant=naive", "",
                   "gradients of the LayerNorms are 2.00 times those of one GPU, all others "
                   "equal")),
    Fault("    replica.finish()\n\n    norm",
          "    replica.finish()\n    for p in replica.parameters():\n"
          "        if dist.get_rank(): p.grad *= 5\n\n    norm",
          Verified(2, "--variant=naive", "",
                   "all gradients differ between ranks 0 and 1, which hold the same")),
    Fault("norm = grad_norm(replica.parameters())", "norm = 2 * grad_norm(replica.parameters())",
          Verified(2, "--layers=1 --steps=2 --clip=0.1 --variant=bucket --bucket-mb=0.02",
                   "gradient norm")),
    Fault("if clip:\n        clip_grads_with_norm_(replica",
          "if False:\n        clip_grads_with_norm_(replica",
          Verified(2, "--variant=naive --clip=0.5", "",
                   "all gradients are 7.53 times those of one GPU, which is the norm over "
                   "--clip: the norm is right, and they were not clipped by it")),
    Fault("clip_grads_with_norm_(replica.parameters(), clip, norm)", "pass",
          Graded("02.5", "the norm over --clip")),
    Fault("clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm); "
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          Verified(2, "--variant=naive --clip=0.5", "",
                   "all gradients are 0.13 times those of one GPU, which is --clip over the "
                   "norm: they were clipped twice")),
    Fault("clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    pass",
          Verified(2, "--variant=naive", "",
                   "the update left all parameters as they were; the gradients and their norm "
                   "are right")),
    Fault("clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n"
          "    if dist.get_rank() == 0: optimizer.step()",
          Verified(2, "--variant=naive", "",
                   "the update left all parameters as they were on rank 1; the gradients and "
                   "their norm are right")),
    Fault("clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n"
          "    optimizer.step(); optimizer.step()",
          Verified(2, "--variant=naive", "",
                   "all parameters moved 2.00 times as far as on one GPU, although the "
                   "gradients and their norm are right")),
    Fault("clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()\n"
          "    if dist.get_rank() == 1: [p.data.mul_(1.001) for p in replica.parameters()]",
          Verified(2, "--variant=naive", "",
                   "after the update all parameters differ between ranks 0 and 1, which hold "
                   "the same; the gradients and their norm are right")),
    Fault("(dist.get_world_size() * loss)", "loss",
          Verified(2, "--layers=1 --steps=2 --clip=0.1 --variant=torch", "gradients")),
    Fault("2 * (ranks - 1)", "(ranks - 1)", Graded("02.6", "1/2 of what")),
    Fault("2 * (ranks - 1) / ranks", "2 * (ranks - 1)", Graded("02.6", "8 times what")),
    Fault("(calls, gradient_bytes,", "(calls, 2 * gradient_bytes,",
          Verified(2, "--layers=1 --steps=2 --clip=0.1 --variant=bucket --bucket-mb=0.02",
                   "all_reduce, payload")),
    Fault("4 * tokens", "2 * tokens", Graded("02.7", "2 times what")),
    Fault(" * (1 - 1 / ranks)", "", Graded("02.7", "is 2197.7778, and should be 0")),
    Fault("square_of_small - square_of_big", "square_of_big - square_of_small",
          Graded("02.8", "tr(Σ) is -100")),
    Fault("(1 / small - 1 / big)", "(big - small)",
          Graded("02.8", "tr(Σ) is 0.001, and should be 100")),
    Fault("square_of_big - noise / big", "square_of_big",
          Graded("02.8", "|G|² is 25.1, and should be 25")),
    Fault("square_of_big - noise / big", "square_of_small - noise / big",
          Graded("02.8", "|G|² is 25.9")),
    Fault("[start + (batch", "[(batch", Graded("02.9", "and should be")),
    Fault("batch // start - 1", "batch // start", Graded("02.9", "and should be")),
    Fault(" // steps * start", " * start // steps", Graded("02.9", "and should be")),
    Fault("    for batch in run.batches(share=run.rank):           # 1/N of the sequences\n",
          "    for batch in run.batches(share=run.rank):           # 1/N of the sequences\n"
          "        optimizer = run.optimizer(model.parameters())\n",
          Verified(2, "--variant=naive --steps=2 --optimizer=momentum", "",
                   "all parameters moved otherwise than on one GPU, although the gradients and "
                   "their norm are right; before, 1 step matched: look at what the optimizer "
                   "keeps from step to step")),
    Fault("batches(share=run.rank):           # 1/N", "batches(share=0):           # 1/N",
          Verified(2, "--variant=naive", "",
                   "all gradients and the loss are 2.00 times those of the sequences of "
                   "data-parallel rank 0 alone: 2 is the number of ranks")),
    Fault("train_step(replica, optimizer, batch.micro_batches, batch.valid, args.clip)",
          "train_step(replica, optimizer, batch.micro_batches, sum((y != -100).sum() for _, y in "
          "batch.micro_batches), args.clip)",
          Verified(2, "--variant=naive", "",
                   "all gradients and the loss are 2.00 times those of the mean of the ranks' "
                   "own means: 2 is the number of ranks")),
    Fault("train_step(replica, optimizer, batch.micro_batches, batch.valid, args.clip)",
          "train_step(replica, optimizer, batch.micro_batches, batch.targets.numel(), args.clip)",
          Verified(2, "--variant=naive", "",
                   "all gradients and the loss are 0.64 times those of one GPU: 1.57 is all "
                   "targets over the valid ones")),
    Fault("dist.all_reduce(loss, group=group)              # for", "pass  # for",
          Verified(2, "--variant=naive", "",
                   "the losses of the ranks add up to that of one GPU: each logs its own part; "
                   "the gradients are right, so only what is logged is wrong")),
    Fault("dist.all_reduce(loss, group=group)              # for", "loss *= 1 + run.rank  # for",
          Verified(2, "--variant=naive", "",
                   "the ranks have different losses, from 2.4462 to 6.1760; the gradients are "
                   "right, so only what is logged is wrong")),
]
