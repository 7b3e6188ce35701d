"""common.py's record of who holds which part, and its sums and norms."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common


def test_grad_norm_needs_no_group_and_skips_parameters_without_gradient():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([3.0, 0.0, 4.0])
    assert common.grad_norm([p, q]).item() == 5
    p = nn.Parameter(torch.ones(3, dtype=torch.float16))
    p.grad = torch.full((3,), 300, dtype=torch.float16)  # float16 would overflow
    assert common.grad_norm([p]).item() == pytest.approx(300 * math.sqrt(3))


def sums_in_backward(skipped, turned, limit):
    """Sums the gradients of a small GPT over all ranks during the second of two backwards.

    A rank of `skipped` leaves out the first block, and one of `turned` takes the blocks in reverse.
    limit: of numbers in one bucket. Returns the largest difference from the gradients of both
    backwards, summed over ranks afterwards; and (how many numbers, after how many gradients) of
    each message.
    """
    rank, group = dist.get_rank(), dist.group.WORLD
    model = common.gpt(common.Config(3, 8, 2, 2, 4, 16), dtype=torch.float64)
    blocks = model[2:-1] if rank in skipped else model[1:-1]
    blocks = list(blocks)[::-1] if rank in turned else blocks
    losses = [nn.Sequential(model[0], *blocks, model[-1])(
        torch.arange(4).view(1, 4) * (rank + 2 + i) % 16).square().sum() for i in range(2)]
    expected = torch.autograd.grad(sum(losses), list(model.parameters()), retain_graph=True,
                                   allow_unused=True, materialize_grads=True)
    for grad in expected:
        dist.all_reduce(grad)

    ready, sent = [], []
    for p in model.parameters():
        p.partial = group
        p.register_post_accumulate_grad_hook(ready.append)  # before that of the sums
    losses[0].backward()
    ready.clear()
    with mock.patch.object(common, "ONE_BUCKET", limit):
        sums, all_reduce = common.PartialSums(model.parameters()), dist.all_reduce

    def noted(flat, **more):
        sent.append((len(flat), len(ready)))
        return all_reduce(flat, **more)

    with mock.patch.object(dist, "all_reduce", noted):
        losses[1].backward()
        sums.finish()
    off = max((p.grad - grad).abs().max().item() for p, grad in zip(model.parameters(), expected))
    return off, sent


@pytest.mark.parametrize(("skipped", "turned"), [((), ()), ((1,), ()), ((), (1,)), ((0,), (1,))])
def test_partial_sums_start_in_backward_in_one_order(ranks, skipped, turned):
    """Whatever the order in which a rank's gradients come, and whether it has all of them."""
    results = ranks(2, 180)(sums_in_backward, skipped, turned, 100)
    sizes = [[size for size, _ in sent] for _, sent in results]
    assert max(off for off, _ in results) < 1e-12
    assert sizes[0] == sizes[1] and len(sizes[0]) == 5  # the head, three blocks, the embedding
    for rank, (_, sent) in enumerate(results):
        when = [after for _, after in sent]
        if rank not in (*skipped, *turned):
            assert when == [3, 13, 23, 33, 34]          # a module's last gradient, each time
        assert when[0] == 3                             # while the rest is still to come


def test_few_gradients_are_one_message(ranks):
    """A message costs its latency, however small it is."""
    for off, sent in ranks(2, 180)(sums_in_backward, (), (), common.ONE_BUCKET):
        assert off < 1e-12 and [when for _, when in sent] == [34]
