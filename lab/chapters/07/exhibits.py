"""The exhibits of chapter 07: micro-batches that meet in a stage, and stages that share."""

from lab.museum.exhibit import Exhibit

FILE = "07_pipeline_parallel.py"
PIPELINE = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --clip 0.5"
UNCLIPPED = 2, "--batch 6 --micro-batch 2 --ignore 0.4"
HALVES = 2, "--batch 6 --micro-batch 1 --ignore 0.4 --variant zb-h1"
TIED = 2, "--batch 6 --micro-batch 2 --ignore 0.4 --preset gpt2 --vocab 256 --verify"
SUM = "    PartialSums(model.parameters()).finish()\n\n"
BEGIN = "        if x.is_floating_point():\n            x = x.detach().requires_grad_()"
NORM = "    norm = grad_norm(model.parameters(), group)         # of all stages, not of this one\n"

EXHIBITS = [
    Exhibit(
        "pytorch/torchtitan#1733", "gradients are divided once more at each pipeline step",
        "A schedule divides gradients by its micro-batches when it ends. It divides all that .grad "
        "holds, also what earlier passes of the same step have left there. Curves diverged from "
        "those without a pipeline, and norms were far too small.",
        FILE, SUM, SUM + "    for p in model.parameters():\n        p.grad /= len(micro_batches)\n",
        *UNCLIPPED, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "pytorch/torchtitan#2972", "the loss is divided once backward is over",
        "In a pipeline, the last stage begins backward by itself, with the sum of the losses. The "
        "division by the valid tokens came after the schedule, for the number that is logged. So "
        "the loss on the screen was right, and gradients were too large by all tokens of the "
        "batch.",
        FILE,
        "            out = loss_sum(out, targets) / valid\n"
        "        self.kept_for_backward[i] = x, get_gradient_edge(out)"
        "   # an edge does not keep out itself\n"
        "        return out.detach()\n",
        "            out = loss_sum(out, targets)\n"
        "        self.kept_for_backward[i] = x, get_gradient_edge(out)\n"
        "        return out.detach() / valid if self.is_last else out.detach()\n",
        *UNCLIPPED, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#5729", "the outputs of a micro-batch, the labels of the next",
        "Two iterators, one on the first stage and one on the last, were to give the tokens and "
        "the labels of the same batch. One of them was a batch ahead. It was found only since two "
        "batches had different shapes, so that the loss failed. With equal shapes it trains.",
        FILE, "                    out = stage.forward(i, x, targets, valid)\n",
        "                    targets = micro_batches[(i + 1) % len(micro_batches)][1]\n"
        "                    out = stage.forward(i, x, targets, valid)\n",
        *PIPELINE, ("first loss", "loss", "gradients", "gradient norm", "parameters"),
        ("sent", "kept"),
    ),
    Exhibit(
        "NVIDIA-NeMo/Automodel#3530", "gradients are wiped between two micro-batches",
        "Stages are prepared anew when the length of sequences changes, and that set all "
        "gradients to None. It happened within a step, between two micro-batches. The loss looked "
        "fine, since it is added up elsewhere. The gradient norm alone gave it away.",
        FILE, BEGIN, "        if i == 2:\n            self.module.zero_grad()\n" + BEGIN,
        *UNCLIPPED, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "pytorch/pytorch#139404", "a stage remembers the most recent backward alone",
        "What forward leaves was kept for each micro-batch, and what backward leaves in one "
        "place. As long as they come in order, that is enough. A schedule that puts something "
        "between them gets another micro-batch's. Its developers noticed it before such a "
        "schedule came.",
        FILE, "        for weight, x, dy in self.kept_for_weights.pop(i):\n",
        "        latest = self.kept_for_weights[max(self.kept_for_weights)]\n"
        "        self.kept_for_weights.pop(i)\n        for weight, x, dy in latest:\n",
        *HALVES, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "NVIDIA/TransformerEngine#3437", "a late weight gradient replaces what was there",
        "Weight gradients that are computed later were assigned to .grad, not added to it. For a "
        "weight that two modules share, the second one replaced the first one's part. In the "
        "thread's example 0.60 of the gradient was left, and hardly anything of a bias.",
        FILE, " if weight.grad is None else weight.grad.add_(gradient)\n", "\n",
        *HALVES, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
    Exhibit(
        "pytorch/torchtitan#596", "each stage clips by its own norm",
        "The norm of the gradients was that of the stage's parameters. Its square must be summed "
        "over the stages, or each is clipped by another factor. The first repair took the norm of "
        "each slice of the model by itself, and a review caught that.",
        FILE, NORM, "    norm = grad_norm(model.parameters())\n",
        *PIPELINE, ("loss", "gradients", "gradient norm", "parameters", "sent"),
        ("first loss", "kept"),
    ),
    Exhibit(
        "uw-syfi/piper#13", "two stages hold one table, and nobody adds",
        "Embedding and head are one matrix, which lies on the first and on the last stage. Each "
        "stage has a copy, and updated it with its own part of the gradient. So from the first "
        "step on they are two matrices. Its developers say so themselves.",
        FILE, SUM + NORM, "    norm = grad_norm(model.parameters(), group)\n",
        *TIED, ("loss", "gradients", "gradient norm", "parameters", "sent"), ("first loss", "kept"),
    ),
    Exhibit(
        "openai/guided-diffusion#167", "what is computed again is something else",
        "A checkpoint written by hand ran a block once more in backward, and did not restore the "
        "random numbers of the first time. So with dropout the gradients belonged to another mask "
        "than the loss, which diverged. Without dropout all was well. (Here there is none: planted "
        "is a bit of noise, in the second run alone.)",
        "common.py",
        "            setattr(module, name, functools.partial(again, getattr(module, name)))\n",
        "            def other(x, forward=getattr(module, name)):\n"
        "                in_backward = torch._C._current_graph_task_id() != -1\n"
        "                return forward(x + 0.1 * in_backward * torch.randn_like(x))\n\n"
        "            setattr(module, name, functools.partial(again, other))\n",
        2, "--batch 6 --micro-batch 2 --ignore 0.4 --recompute full",
        ("loss", "gradients", "gradient norm", "parameters"), ("first loss", "sent", "kept"),
        chapter="07_pipeline_parallel.py",
    ),
    Exhibit(
        "pytorch/pytorch#84803", "zeros arrive",
        "A tensor that was copied from one GPU to another was zeros there. There was no error and "
        "no warning. It was so for all sizes, it stayed after a restart, and it did not go away "
        "with the NVLinks. By way of the CPU the copy was right. (Here the gradient of one "
        "micro-batch's activations arrives as zeros. It has its size, so no byte is missed.)",
        FILE, "            outputs[message.output] = operation.tensor\n",
        "            outputs[message.output] = operation.tensor\n"
        "            if message.output[0] != 'F' and message.output[2] == 1:\n"
        "                outputs[message.output] = torch.zeros_like(operation.tensor)\n",
        *UNCLIPPED, ("loss", "gradients", "gradient norm", "parameters"),
        ("first loss", "sent", "kept"),
    ),
]
