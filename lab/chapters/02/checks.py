"""Checks of chapter 02: buckets that fill in backward, and when their traffic hides."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lab.chapters.checking import alone, random

H100 = 989e12, 450e9                                    # FLOP/s, bytes/s


def gradients(module):
    return {f"grad of {name}": p.grad for name, p in module.named_parameters()}


def finished_with_one_layer(chapter):
    module = nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 1))
    replica = chapter.Naive(module, alone())
    module[0](torch.ones(2)).sum().backward()
    replica.finish()
    return gradients(module)


def summed_over_two(chapter, variant):
    """Of parameters that only one of two ranks uses, or both, or none. A third rank is alone."""
    ps, rank = nn.ParameterList([random(2) for _ in range(4)]), dist.get_rank()
    ps[3].grad_dtype = torch.float32
    two, one = dist.new_group([0, 1]), dist.new_group([2])
    replica = getattr(chapter, variant)(ps, two if rank < 2 else one)
    for p in (ps[0], ps[1]) if rank == 0 else (ps[1], ps[3]):
        (p * random(2) * (rank + 1)).sum().backward()
    replica.finish()
    return gradients(ps)


def handles_as_gradients_come(chapter):
    replica, handles = chapter.Overlap(nn.ParameterList([torch.ones(3)] * 5), alone()), {}
    for i in (2, 0, 1, 4):
        replica.gradient_is_ready(replica.trained[i])
        handles[f"bucket {i}"] = len(replica.handles)
    return handles


def finished_without_a_gradient(chapter):
    waited = []

    class Handle:
        def wait(self):
            waited.append(0)

    replica = chapter.Overlap(nn.ParameterList([torch.ones(3)] * 2), alone())
    replica.gradient_is_ready(replica.trained[0])
    replica.handles[0] = Handle()
    replica.finish()
    return {"waiting for bucket 0": len(waited), "len(handles)": len(replica.handles),
            "len(ready)": len(replica.ready), "grad": [p.grad for p in replica.trained]}


def bytes_in_buckets(chapter, tensors, capacity):
    """tensors: (numbers, dtype) of each."""
    parameters = [torch.zeros(numbers, dtype=dtype) for numbers, dtype in tensors]
    buckets = chapter.fill_buckets(parameters, capacity)
    return " | ".join(" ".join(str(p.nbytes) for p in bucket) for bucket in buckets)


def of_one_size(parameters, capacity):
    """In place of fill_buckets, for parameters of one size."""
    count = capacity // parameters[0].nbytes
    return [parameters[i:i + count] for i in range(0, len(parameters), count)]


def send_all(replica):
    """In place of Overlap's finish, where nothing has been sent before."""
    for number in range(len(replica.buckets)):
        dist.all_reduce(replica.payload(number), group=replica.group)
    replica.ready.clear()


def steps_in_buckets(chapter):
    """Two steps, of two micro-batches and of one, which uses two of five parameters. Each rank
    begins backward as it likes."""
    started, facts = [], {}

    def start_full_buckets(replica):
        started.append(len(replica.ready))

    parts = dict(start_full_buckets=start_full_buckets, finish=send_all)
    ps, rank = nn.ParameterList([random(2, 2), *(random(4) for _ in range(4))]), dist.get_rank()
    with (mock.patch.object(chapter, "fill_buckets", of_one_size),
          mock.patch.multiple(chapter.Overlap, **parts)):
        replica = chapter.Bucket(ps, dist.group.WORLD, 2 * ps[0].nbytes)
        for step, batches in enumerate(([(0, 1, 2, 3), (4, 3)], [(3, 1)]), start=1):
            replica.zero_grad()
            for number, used in enumerate(batches, start=1):
                replica.sends = number == len(batches)
                for i in used[::1 - 2 * rank]:
                    (ps[i] * random(*ps[i].shape) * (rank + 1)).sum().backward()
                facts[f"ready, step {step}, micro-batch {number}"] = started.copy()
            replica.finish()
            facts |= {f"{name}, step {step}": None if grad is None else grad.clone()
                      for name, grad in gradients(ps).items()}
    flat, lie_in_buckets = [replica.payload(i) for i in range(len(replica.buckets))], []
    for x, bucket in zip(flat, replica.buckets):
        for p in bucket:
            lie_in_buckets.append(
                p.grad is not None and 0 <= p.grad.data_ptr() - x.data_ptr() < x.nbytes)
    return facts | {
        "parameters in each bucket": [len(bucket) for bucket in replica.buckets],
        "numbers in each bucket": [x.numel() for x in flat],
        "whether each gradient lies in its bucket": lie_in_buckets}


class Replica(nn.Module):
    """In place of a chapter's: it notes what a step asks for. To finish doubles the gradients."""

    def __init__(self):
        super().__init__()
        self.weights, self.log, self.sends = nn.Parameter(random(4, 4)), [], "not set"
        self.weights.register_post_accumulate_grad_hook(
            lambda p: self.log.append(f"backward, and sends is {self.sends}"))

    def forward(self, tokens):
        self.log.append(f"forward, and sends is {self.sends}")
        return self.weights[tokens]

    def finish(self):
        self.log.append("finish()")
        self.weights.grad *= 2


def two_steps(chapter, clip):
    """Of two micro-batches each, with 4 and 1 valid targets, of 8 on all ranks."""
    replica = Replica()
    optimizer = torch.optim.SGD(replica.parameters(), 0.5)
    batches = [(torch.tensor([[0, 1, 2, 3]]), torch.tensor([targets]))
               for targets in ([1, 2, 3, 0], [-100, -100, 3, -100])]
    facts = {}
    for step in (1, 2):
        loss, norm = chapter.train_step(replica, optimizer, batches, 8, clip)
        facts |= {f"loss of step {step}": loss, f"norm of step {step}": norm,
                  f"parameters after step {step}": replica.weights.detach().clone(),
                  "loss.requires_grad": loss.requires_grad}
    return facts | {"what happens": replica.log}


def wire_bytes(chapter):
    return {f"wire_bytes(1000, {n})": chapter.wire_bytes(1000, n) for n in (1, 2, 4, 8)}


def communication_over_backward(chapter, *sizes):
    """On two ranks: there wire_bytes is the payload."""
    with mock.patch.object(chapter, "wire_bytes", lambda payload, ranks: payload):
        return chapter.communication_over_backward(*sizes)


def noise_and_signal(chapter):
    """Of two parameters with G = (3, 4) and variances of 60 and 40: |G|² = 25, and tr(Σ) = 100."""
    noise, signal = chapter.noise_and_signal(100, 1000, 26, 25.1)
    return {"tr(Σ)": noise, "|G|²": signal}


def noise_that_is_not_there(chapter):
    noise, signal = chapter.noise_and_signal(8, 32, 25, 25)
    return {"tr(Σ)": noise, "|G|²": signal}
