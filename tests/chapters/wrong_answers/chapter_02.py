"""Wrong answers to the exercises of chapter 02."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "02.1": [
        Wrong("dist.all_reduce(p.grad, group=self.group)",
              "dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=self.group)",
              "all gradients are 1/4 of those of one GPU: 4 is the number of ranks"),
        Wrong("dist.all_reduce(p.grad, group=self.group)",
              "dist.all_reduce(p.grad.clone(), group=self.group)", "they were not summed"),
        Wrong("dist.all_reduce(p.grad, group=self.group)",
              "dist.broadcast(p.grad, 0, group=self.group)",
              "those of the sequences of data-parallel rank 0 alone"),
        Wrong("for p in self.trained:",
              "for p in [p for p in self.trained if p.grad is not None]:",
              "grad of 1.weight is None"),
    ],
    "02.2": [
        Wrong("                return\n", "                continue\n",
              "bucket 2 is 1, and should be 0"),
        Wrong("            handle.wait()\n", "            pass\n",
              "waiting for bucket 0 is 0, and should be 1"),
        Wrong("        self.ready.update(self.trained) ", "        pass ", "grad[1] is None"),
        Wrong("self.ready, self.handles = set(), []", "self.ready = set()", "len(handles) is 2"),
        Wrong("            handle.wait()\n",
              "            handle.wait()\n        for p in self.trained:\n"
              "            p.grad /= self.group.size()\n", "4 is the number of ranks"),
    ],
    "02.3": [
        Wrong(" >= capacity", " + p.nbytes > capacity",
              "'12 20 | 36 | 4 4 | 80 | 8', and should be '12 20 | 36 | 4 4 80 | 8'"),
        Wrong("q.numel() * q.grad_dtype.itemsize", "q.numel()", "'12 20 36 4 4 80 | 8'"),
        Wrong(" or last and last[0].grad_dtype != p.grad_dtype", "", "'8 4 4 8'"),
    ],
    "02.4": [
        Wrong("view.copy_(p.grad)\n        p.grad = view", "view.copy_(p.grad)",
              "they were not summed"),
        Wrong("view.copy_(p.grad)", "pass",
              "those of all micro-batches of each rank but the first"),
        Wrong("view.copy_(p.grad)", "view.add_(p.grad)",
              "4.00 times those of the step before, which were not set to zero"),
        Wrong("view.view_as(p)", "view.view_as(p).clone()", "they were not summed"),
        Wrong("return self.flat[i]", "return self.flat[i].div_(self.group.size())",
              "4 is the number of ranks"),
        Wrong("        super().gradient_is_ready(p)", "        pass",
              "all_reduces under way in backward is 0, and should be 1"),
        Wrong("            self.move_in(p)    ", "            pass    ",
              "grad of 0.weight is None"),
    ],
    "02.5": [
        Wrong("/ valid", "/ (targets != -100).sum() / len(micro_batches)",
              "4.00 times those of the mean of the micro-batches' own means"),
        Wrong("/ valid", "/ valid / dist.get_world_size()", "4 is the number of ranks"),
        Wrong("i == len(micro_batches)", "i == 1",
              "finish() must come after a backward that sends"),
        Wrong("i == len(micro_batches)", "False", "all_reduces under way before `finish` is 0"),
        Wrong("    replica.zero_grad()\n", "", "which were not set to zero"),
        Wrong("total += loss.detach()", "total = loss.detach()",
              "the loss is that of the last micro-batch of each rank alone"),
        Wrong("clip_grads_with_norm_(replica.parameters(), clip, norm)", "pass",
              "the norm over --clip"),
    ],
    "02.6": [
        Wrong("2 * (ranks - 1)", "(ranks - 1)", "1/2 of that"),
        Wrong("2 * (ranks - 1) / ranks", "2 * (ranks - 1)", "8 times that"),
    ],
    "02.7": [
        Wrong("4 * tokens", "2 * tokens", "2 times that"),
        Wrong(" * (1 - 1 / ranks)", "", "is 2197.7778, and should be 0"),
    ],
    "02.8": [
        Wrong("square_of_small - square_of_big", "square_of_big - square_of_small",
              "tr(Σ) is -100"),
        Wrong("(1 / small - 1 / big)", "(big - small)", "tr(Σ) is 0.001, and should be 100"),
        Wrong("square_of_big - noise / big", "square_of_big", "|G|² is 25.1, and should be 25"),
        Wrong("square_of_big - noise / big", "square_of_small - noise / big", "|G|² is 25.9"),
    ],
    "02.9": [
        Wrong(" // steps * start", " * start // steps", "and should be"),
        Wrong("batch // start - 1", "batch // start", "and should be"),
        Wrong("[start + (batch", "[(batch", "and should be"),
    ],
}
