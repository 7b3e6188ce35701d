"""common.py's record of who holds which part, and its sums and norms."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

import common
from common import Config, gpt
from tests.test_common import SHAPE


def shards_of_a_matrix(rows, parts):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    module = nn.Linear(5, rows, bias=False)
    module.weight.data = torch.arange(rows * 5.0).view(rows, 5)
    common.keep_shard(module, "weight", 0, dist.group.WORLD, parts)
    common.keep_shard(module, "weight", 0, dist.group.WORLD, parts)  # it has been cut: left alone
    common.keep_shard(module, "weight", 1, alone)
    weight = module.weight
    return weight.detach().numpy(), [cut[:3] for cut in weight.cuts], tuple(weight.full_shape)


@pytest.mark.parametrize(("world", "rows"), [(3, 7), (4, 3)])
def test_shards_put_together_are_the_whole(ranks, world, rows):
    results = ranks(world, 180)(shards_of_a_matrix, rows, None)
    whole = np.concatenate([shard for shard, _, _ in results])
    assert (whole[:rows] == np.arange(rows * 5.0).reshape(rows, 5)).all() and not whole[rows:].any()
    assert {len(shard) for shard, _, _ in results} == {math.ceil(rows / world)}
    assert [cuts for _, cuts, _ in results] == [[(0, r, world), (1, 0, 1)] for r in range(world)]
    assert results[0][2] == (rows, 5)


def test_fewer_parts_than_ranks_go_to_neighbours(ranks):
    results = ranks(4, 180)(shards_of_a_matrix, 6, 2)
    assert [shard[0, 0] for shard, _, _ in results] == [0, 0, 15, 15]


def cut_mlp(model, group):
    for block in model[1:-1]:
        common.keep_shard(block.mlp.up, "weight", 0, group)
        common.keep_shard(block.mlp.down, "weight", 1, group)


def drawn_after_cutting():
    group, full = dist.group.WORLD, gpt(SHAPE, seed=3)
    model = gpt(SHAPE, seed=None)
    cut_mlp(model, group)
    common.draw_weights(model, seed=3)
    cut_mlp(full, group)
    same = all(p.equal(q) for p, q in zip(model.parameters(), full.parameters()))
    return same, model.block2.mlp.up.weight.untyped_storage().nbytes()


def test_a_rank_draws_just_what_it_keeps(ranks):
    """The values, and no more memory than they take."""
    assert ranks(4, 180)(drawn_after_cutting) == [(True, 4 * 32 * 4 * 32 // 4)] * 4


def norms_of_a_cut_model():
    """Each rank keeps its part of a known gradient; kv heads live on several ranks."""
    world, group = dist.get_world_size(), dist.group.WORLD
    model = gpt(Config(2, 32, 8, 2, 16, 257), dtype=torch.float64)
    expected = torch.cat([p.flatten() for p in model.parameters()]).norm()
    cut_mlp(model, group)
    for block in model[1:-1]:
        common.keep_shard(block.attn.k, "weight", 0, group, parts=1 if world % 2 else 2)
    common.keep_shard(model.head.out, "weight", 0, group)  # 257 rows: padded
    for p in model.parameters():
        p.grad = p.detach().clone()
    norm = common.grad_norm(model.parameters(), group)
    clip_grads_with_norm_(model.parameters(), 1.0, norm)
    return expected.item(), norm.item(), common.grad_norm(model.parameters(), group).item()


@pytest.mark.parametrize("world", [1, 3, 4])
def test_grad_norm_counts_every_parameter_once(ranks, world):
    for expected, norm, clipped in ranks(world, 180)(norms_of_a_cut_model):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert clipped == pytest.approx(1, rel=1e-5)


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
