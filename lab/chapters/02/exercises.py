"""The exercises of chapter 02: buckets that fill in backward, and when their traffic hides."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lab.classroom.exercise import Exercise, Run, Same, alone, random

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
    started, found = [], {}
    stand_in = lambda replica: started.append(len(replica.ready))
    parts = dict(start_full_buckets=stand_in, finish=send_all)
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
                found[f"ready, step {step}, micro-batch {number}"] = started.copy()
            replica.finish()
            found |= {f"{name}, step {step}": None if grad is None else grad.clone()
                      for name, grad in gradients(ps).items()}
    flat = [replica.payload(i) for i in range(len(replica.buckets))]
    return found | {
        "parameters in each bucket": [len(bucket) for bucket in replica.buckets],
        "numbers in each bucket": [x.numel() for x in flat],
        "whether each gradient lies in its bucket": [
            p.grad is not None and 0 <= p.grad.data_ptr() - x.data_ptr() < x.nbytes
            for x, bucket in zip(flat, replica.buckets) for p in bucket]}


class Replica(nn.Module):
    """In place of a chapter's: it notes what a step asks for. To finish doubles the gradients."""

    def __init__(self):
        super().__init__()
        self.weights, self.said, self.sends = nn.Parameter(random(4, 4)), [], "not set"
        self.weights.register_post_accumulate_grad_hook(
            lambda p: self.said.append(f"backward, and sends is {self.sends}"))

    def forward(self, tokens):
        self.said.append(f"forward, and sends is {self.sends}")
        return self.weights[tokens]

    def finish(self):
        self.said.append("finish()")
        self.weights.grad *= 2


def two_steps(chapter, clip):
    """Of two micro-batches each, with 4 and 1 valid targets, of 8 on all ranks."""
    replica = Replica()
    optimizer = torch.optim.SGD(replica.parameters(), 0.5)
    batches = [(torch.tensor([[0, 1, 2, 3]]), torch.tensor([targets]))
               for targets in ([1, 2, 3, 0], [-100, -100, 3, -100])]
    found = {}
    for step in (1, 2):
        loss, norm = chapter.train_step(replica, optimizer, batches, 8, clip)
        found |= {f"loss of step {step}": loss, f"norm of step {step}": norm,
                  f"parameters after step {step}": replica.weights.detach().clone(),
                  "loss.requires_grad": loss.requires_grad}
    return found | {"what happens": replica.said}


def wire_bytes(chapter):
    return {f"wire_bytes(1000, {n})": chapter.wire_bytes(1000, n) for n in (1, 2, 4, 8)}


def communication_over_backward(chapter, *sizes):
    """On two ranks: there wire_bytes is the payload."""
    with mock.patch.object(chapter, "wire_bytes", lambda payload, ranks: payload):
        return chapter.communication_over_backward(*sizes)


def tokens_to_hide(chapter):
    return {f"tokens_to_hide(2, {n}, ...)": chapter.tokens_to_hide(2, n, *H100) for n in (1, 2, 8)}


def tokens_to_hide_four_bytes(chapter):
    return chapter.tokens_to_hide(4, 8, *H100)


def noise_and_signal(chapter):
    """Of two parameters with G = (3, 4) and variances of 60 and 40: |G|² = 25, and tr(Σ) = 100."""
    noise, signal = chapter.noise_and_signal(100, 1000, 26, 25.1)
    return {"tr(Σ)": noise, "|G|²": signal}


def noise_that_is_not_there(chapter):
    noise, signal = chapter.noise_and_signal(8, 32, 25, 25)
    return {"tr(Σ)": noise, "|G|²": signal}


def ramps(chapter):
    return {"ramp(2, 8, 3)": chapter.ramp(2, 8, 3), "ramp(4, 8, 6)": chapter.ramp(4, 8, 6),
            "ramp(1, 8, 2)": chapter.ramp(1, 8, 2), "ramp(8, 8, 2)": chapter.ramp(8, 8, 2)}


EXERCISES = [
    Exercise(
        "02.1", "Naive.finish", 1,
        "After the last backward of a step: make the .grad of every trained parameter the sum "
        "over all ranks. What a rank did not use counts as zero.",
        ("Each rank has divided its loss by the valid targets of the whole batch. What is left "
         "to be done with the gradients?",
         "One all_reduce for each of self.trained, over self.group, and no division. Where a "
         "rank has None for a gradient, the other ranks wait for it all the same, so it takes "
         "part with zeros."),
        (Run(4, "--variant naive --batch 12 --micro-batch 1 --ignore 0.3"),
         Same(finished_with_one_layer, "where 1.weight and 1.bias are not used"),
         Same(summed_over_two, "4 parameters, which each of 2 ranks uses or not", ("Naive",), 3)),
    ),
    Exercise(
        "02.2", "Overlap.start_full_buckets Overlap.finish", 2,
        "Start the all_reduce of each bucket as soon as it is full, but in the same order on "
        "all ranks: a bucket waits for those before it. `finish` starts those that are left "
        "over, whatever is missing in them, waits for all, and leaves everything as it was "
        "before the step.",
        ("A bucket that has been started has a handle. So which bucket is the next one, and "
         "when must you stop, even if a later one is full?",
         "Begin at the bucket that has no handle yet, and stop at the first that is not wholly "
         "in self.ready. Each all_reduce takes self.payload(i), with async_op=True. In "
         "`finish` all of self.trained counts as ready. After the waiting both `ready` and "
         "`handles` are empty again."),
        (Same(handles_as_gradients_come,
              "all_reduces under way, once the gradient is ready that fills"),
         Same(finished_without_a_gradient, "after `finish`, without a gradient in bucket 1"),
         Run(4, "--variant overlap --batch 12 --micro-batch 1 --ignore 0.3"),
         Same(summed_over_two, "4 parameters, which each of 2 ranks uses or not", ("Overlap",), 3)),
        "Overlap: the order, and the end",
    ),
    Exercise(
        "02.3", "fill_buckets", 1,
        "Put the parameters into buckets, in their order. A bucket takes parameters of one "
        "dtype, until it has `capacity` bytes or more.",
        ("When is it known that a bucket is full: once a parameter is in it, or once the next "
         "one comes?",
         "Only the last bucket can still take one. When a parameter comes, begin a new bucket "
         "if the last one has `capacity` bytes already, or holds another dtype. An empty "
         "bucket is never full, even if capacity is 0."),
        (Same(bytes_in_buckets, "12, 20, 36, 4, 4, 80 and 8 bytes, capacity 32",
              ([(n, torch.float32) for n in (3, 5, 9, 1, 1, 20, 2)], 32)),
         Same(bytes_in_buckets, "8 bytes, 4, 4 and 8, of two dtypes, capacity 100",
              ([(1, torch.float64), (1, torch.float32), (1, torch.float32),
                (1, torch.float64)], 100)),
         Same(bytes_in_buckets, "4, 8 and 12 bytes, capacity 0",
              ([(n, torch.float32) for n in (1, 2, 3)], 0))),
    ),
    Exercise(
        "02.4", "Bucket.__init__ Bucket.move_in Bucket.gradient_is_ready Bucket.payload", 3,
        "Give each bucket one flat tensor, which an all_reduce sums. When p's gradient is "
        "ready, it moves there, and p.grad becomes a view of its place, so that the next "
        "micro-batch is added there and the sum needs no unpacking. What a rank did not use "
        "counts as zero.",
        ("A step begins with p.grad = None, so the first backward makes a tensor of its own. "
         "What has happened to p.grad by the time of the second backward, and what does that "
         "one have to move?",
         "__init__ fills buckets as fill_buckets says, and makes for each a flat tensor of "
         "zeros, and for each parameter a view of its part, in its shape. When a gradient is "
         "ready, it is copied into the view, unless it is the view, which becomes p.grad; "
         "then Overlap's own gradient_is_ready goes on. payload(i) is the flat tensor, in "
         "which the place of an unused parameter is zero, and not the last step's sum."),
        (Run(4, "--batch 12 --micro-batch 1 --ignore 0.3 --bucket-mb 0.1"),
         Same(steps_in_buckets, "two steps, the second of which uses 1 and 3 alone", ranks=2)),
        "Bucket",
    ),
    Exercise(
        "02.5", "train_step", 2,
        "Take a step on this rank's micro-batches, with the gradient of the mean over the "
        "valid targets of the whole global batch, which is sent once. Give this rank's part of "
        "that mean loss, detached, and the norm before clipping.",
        ("What is divided by what, so that a target counts the same on whichever rank and in "
         "whichever micro-batch it is? And which backward may send?",
         "Every sum of losses is divided by `valid`, and nothing is divided after that. "
         "replica.sends is True for the last micro-batch alone, and is set before it begins. "
         "The norm, clipping and the update come after `finish`."),
        (Run(4, "--batch 12 --micro-batch 1 --ignore 0.3 --bucket-mb 0.1"),
         Run(2, "--batch 12 --micro-batch 2 --ignore 0.3 --clip 0.1 --variant naive"),
         Same(two_steps, "two micro-batches, no clipping", (None,)),
         Same(two_steps, "two micro-batches, clip 0.1", (0.1,)),
         Same(two_steps, "two micro-batches, clip 100", (100,))),
    ),
    Exercise(
        "02.6", "wire_bytes", 1,
        "How many bytes does one of N ranks send, when they all_reduce a tensor of `payload` "
        "bytes in a ring?",
        ("The tensor is cut into N chunks. How many hops does a chunk need to meet all ranks?",
         "N-1 hops for the sum, and N-1 for the sum to get everywhere; in each hop a rank "
         "sends one chunk."),
        (Same(wire_bytes, "in a ring"),),
    ),
    Exercise(
        "02.7", "communication_over_backward tokens_to_hide", 1,
        "How long does the all_reduce take, as a multiple of the time of the backward that it "
        "hides behind? And from how many tokens on is that at most 1?",
        ("Each time is an amount over a rate. How many FLOPs does backward take for each "
         "parameter and token, and how many bytes go on the wire?",
         "Backward takes 4 FLOPs, for two matmuls. Set the two times equal, with "
         "bytes_per_gradient · parameters bytes of gradients, and solve for the tokens: the "
         "parameters cancel."),
        (Same(communication_over_backward,
              "communication_over_backward(4e9, 1e9, 2048, 2, 989e12, 450e9)",
              (4e9, 1e9, 2048, 2, *H100)),
         Same(communication_over_backward, "communication_over_backward(6, 5, 4, 2, 3, 0.1)",
              (6, 5, 4, 2, 3, 0.1)),
         Same(tokens_to_hide, "989 TFLOP/s and 450 GB/s"),
         Same(tokens_to_hide_four_bytes, "tokens_to_hide(4, 8, 989e12, 450e9)")),
        "when the all_reduce hides",
    ),
    Exercise(
        "02.8", "noise_and_signal", 2,
        "The squared norms of two mean gradients are known: of a small batch and of a big one, in "
        "tokens. Estimate tr(Σ), the variance of a single token's gradient, summed over the "
        "parameters, and |G|², the square of what all tokens have in common.",
        ("What is the square of the mean gradient of B tokens on average? It is not |G|² alone.",
         "It is |G|² + tr(Σ)/B. Two sizes of batch are two equations with two unknowns: their "
         "difference has no |G|² in it."),
        (Same(noise_and_signal, "noise_and_signal(100, 1000, 26, 25.1)"),
         Same(noise_that_is_not_there, "noise_and_signal(8, 32, 25, 25)")),
    ),
    Exercise(
        "02.9", "ramp", 1,
        "Let the global batch grow with the steps. How many sequences are in each of the first "
        "`steps` batches, if it begins with `start`, always has a multiple of that, and has "
        "`batch` from then on? Each size stays for as many steps, as nearly as whole steps allow.",
        ("How many multiples of `start` are there from `start` to `batch`, and which of them does "
         "step 0 have?",
         "Step i has start times 1 + (batch // start - 1) · i / steps, rounded down."),
        (Same(ramps, "the sequences of each step"),),
    ),
]
