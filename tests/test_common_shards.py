"""common.py's record of who holds which part, and its sums and norms."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grads_with_norm_

import common
from common import Config, gpt
from lab.bench.meters import MemoryTimeline
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


@pytest.mark.parametrize(("world", "rows"), [(1, 4), (2, 4), (3, 7), (4, 10), (8, 16), (4, 3)])
def test_shards_put_together_are_the_whole(ranks, world, rows):
    results = ranks(world)(shards_of_a_matrix, rows, None)
    whole = np.concatenate([shard for shard, _, _ in results])
    assert (whole[:rows] == np.arange(rows * 5.0).reshape(rows, 5)).all() and not whole[rows:].any()
    assert {len(shard) for shard, _, _ in results} == {math.ceil(rows / world)}
    assert [cuts for _, cuts, _ in results] == [[(0, r, world), (1, 0, 1)] for r in range(world)]
    assert results[0][2] == (rows, 5)


def test_fewer_parts_than_ranks_go_to_neighbours(ranks):
    results = ranks(4)(shards_of_a_matrix, 6, 2)
    assert [shard[0, 0] for shard, _, _ in results] == [0, 0, 15, 15]


def test_the_worked_shard_is_what_is_kept():
    linear = nn.Linear(6, 4, bias=False)
    linear.weight.data = torch.arange(24.0).view(4, 6)
    common.name_parameters(linear)
    ranks = {"rows": (1, 2), "columns": (2, 3)}
    rows, columns = (mock.Mock(rank=lambda r=rank: r, size=lambda n=size: n)
                     for rank, size in ranks.values())
    common.keep_shard(linear, "weight", 0, rows)
    assert linear.weight.tolist() == [[*range(12, 18)], [*range(18, 24)]]
    common.keep_shard(linear, "weight", 1, columns)
    assert linear.weight.tolist() == [[16, 17], [22, 23]]
    assert linear.weight.cuts == ((0, 1, 2, rows), (1, 2, 3, columns))
    assert tuple(linear.weight.full_shape) == (4, 6)


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
    assert ranks(4)(drawn_after_cutting) == [(True, 4 * 32 * 4 * 32 // 4)] * 4


def norms_of_a_cut_model(whole):
    """Each rank keeps its part of a known gradient; kv heads live on several ranks."""
    world, group = dist.get_world_size(), dist.group.WORLD
    model = gpt(Config(2, 32, 8, 2, 16, 257), dtype=torch.float64)
    for p in model.parameters():
        p.grad = p.detach() * 3
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    if not whole:
        cut_mlp(model, group)
        for block in model[1:-1]:
            common.keep_shard(block.attn.k, "weight", 0, group, parts=1 if world % 2 else 2)
        common.keep_shard(model.head.out, "weight", 0, group)  # 257 rows: padded
        for p in model.parameters():
            p.grad = p.detach() * 3
    norm = common.grad_norm(model.parameters(), group)
    clip_grads_with_norm_(model.parameters(), 1.0, norm)
    return expected.item(), norm.item(), common.grad_norm(model.parameters(), group).item()


@pytest.mark.parametrize(("world", "whole"), [
    (1, True), (4, True), (1, False), (2, False), (3, False), (4, False), (8, False)])
def test_grad_norm_counts_every_parameter_once(ranks, world, whole):
    for expected, norm, clipped in ranks(world)(norms_of_a_cut_model, whole):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert clipped == pytest.approx(1, rel=1e-5)


def norm_over_stages():
    """Each rank has a layer of its own, as in a pipeline: the squares of their norms add up."""
    layer = nn.Linear(2, 2)
    for p in layer.parameters():
        p.grad = torch.full_like(p, dist.get_rank() + 1.0)
    square = common.grad_norm(layer.parameters()) ** 2
    dist.all_reduce(square)
    return square.item()


def test_squared_norms_add_up_over_stages(ranks):
    assert ranks(3)(norm_over_stages) == pytest.approx([6 * (1 + 4 + 9)] * 3)


def test_grad_norm_needs_no_group_and_skips_parameters_without_gradient():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([3.0, 0.0, 4.0])
    assert common.grad_norm([p, q]).item() == 5
    p = nn.Parameter(torch.ones(3, dtype=torch.float16))
    p.grad = torch.full((3,), 300, dtype=torch.float16)  # float16 would overflow
    assert common.grad_norm([p]).item() == pytest.approx(300 * math.sqrt(3))


def norms_in_groups_of_two():
    """Two models of two ranks each: the rows of the mesh are models, the columns their parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.LayerNorm(4)
    common.name_parameters(module)
    common.keep_shard(module, "weight", 0, mesh["tp"].get_group())
    for p in module.parameters():
        p.grad = torch.full_like(p, 1.0 + mesh["dp"].get_local_rank())
    module.bias.partial = mesh["tp"].get_group()
    norm = common.grad_norm(module.parameters(), mesh["tp"].get_group()).item()
    common.PartialSums(module.parameters()).finish()
    return norm, module.bias.grad.tolist(), module.weight.untyped_storage().nbytes()


def test_norms_and_sums_stay_in_their_group(ranks):
    one, two = (math.sqrt(8), [2.0] * 4, 8), (math.sqrt(32), [4.0] * 4, 8)
    for result, expected in zip(ranks(4)(norms_in_groups_of_two), (one, one, two, two)):
        assert result[0] == pytest.approx(expected[0]) and result[1:] == expected[1:]


def norm_of_a_matrix_cut_both_ways():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    module = nn.Linear(6, 4)
    module.weight.data = torch.arange(24.0).view(4, 6)
    common.keep_shard(module, "weight", 0, mesh["a"].get_group())
    common.keep_shard(module, "weight", 1, mesh["b"].get_group())
    module.weight.grad = module.weight.detach().clone()
    module.bias.grad = torch.ones(4)
    return common.grad_norm(module.parameters(), dist.group.WORLD).item()


def test_a_matrix_cut_both_ways_counts_once(ranks):
    expected = math.sqrt(sum(x * x for x in range(24)) + 4)
    assert ranks(4)(norm_of_a_matrix_cut_both_ways) == pytest.approx([expected] * 4)


@pytest.mark.parametrize("largest", [1e-4, 1e-3, 1.0])
def test_clipping_is_pytorchs(largest):
    ours, theirs = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    ours.grad, theirs.grad = (torch.full((3,), 1e-3, dtype=torch.float64) for _ in range(2))
    clip_grads_with_norm_([ours], largest, common.grad_norm([ours]))
    nn.utils.clip_grad_norm_([theirs], largest)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)


def partial_gradients():
    norm, half = nn.LayerNorm(4), nn.LayerNorm(2)
    common.name_parameters(nn.ModuleDict({"block1": norm, "block2": half}))
    norm.weight.partial = dist.group.WORLD
    half.bias.partial = dist.group.WORLD
    norm.weight.grad = torch.full((4,), dist.get_rank() + 1.0) if dist.get_rank() else None
    norm.bias.grad, half.bias.grad = torch.ones(4), torch.ones(2)
    common.PartialSums([*norm.parameters(), *half.parameters()]).finish()
    return norm.weight.grad.tolist(), norm.bias.grad.tolist(), half.bias.grad.tolist()


def test_partial_gradients_are_summed_and_whole_ones_left_alone(ranks):
    """Where a rank has no gradient, it is zero: every rank must join in the same all_reduce."""
    expected = [0.0 + 2 + 3 + 4] * 4, [1.0] * 4, [4.0] * 2
    assert ranks(4)(partial_gradients) == [expected] * 4


def sums_in_backward(skipped, turned, limit):
    """Gradients of a small GPT, summed over all ranks in the second backward of two: largest
    difference from what the two backwards give on all ranks, added up afterwards; and what was
    sent: how many numbers each time, and after how many gradients of the last backward. A rank of
    `skipped` leaves out the first block; one of `turned` uses the blocks in the other order.
    limit: of numbers in one bucket."""
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
        p.register_post_accumulate_grad_hook(ready.append)      # before that of the sums
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
    return off, sent, sum(len(p._post_accumulate_grad_hooks) for p in model.parameters())


@pytest.mark.parametrize(("skipped", "turned"), [((), ()), ((1,), ()), ((), (1,)), ((0,), (1,))])
def test_partial_sums_start_in_backward_in_one_order(ranks, skipped, turned):
    """Whatever the order in which a rank's gradients come, and whether it has all of them."""
    results = ranks(2)(sums_in_backward, skipped, turned, 100)
    sizes = [sent for _, sent, _ in results]
    assert max(off for off, *_ in results) < 1e-12
    assert [size for size, _ in sizes[0]] == [size for size, _ in sizes[1]]
    assert len(sizes[0]) == 5                           # the head, three blocks, the embedding
    for rank, (_, sent, hooks) in enumerate(results):
        assert hooks == 34                              # those of this test: ours are gone
        when = [after for _, after in sent]
        if rank not in (*skipped, *turned):
            assert when == [3, 13, 23, 33, 34]          # a module's last gradient, each time
        assert when[0] == 3                             # while the rest is still to come


def test_few_gradients_are_one_message(ranks):
    """A message costs its latency, however small it is."""
    for off, sent, _ in ranks(2)(sums_in_backward, (), (), common.ONE_BUCKET):
        assert off < 1e-12 and [when for _, when in sent] == [34]


def memory_of_sums():
    """The most bytes beside parameters and gradients, those of the largest module, and of all."""
    model = common.gpt(common.Config(8, 64, 2, 2, 4, 16))
    for p in model.parameters():
        p.grad, p.partial = torch.ones_like(p), dist.group.WORLD
    parameters = list(model.parameters())
    watch = MemoryTimeline(lambda: (parameters, [p.grad for p in parameters], []))
    with mock.patch.object(common, "ONE_BUCKET", 100), watch:
        common.PartialSums(parameters).finish()
    largest = max(sum(p.numel() for p in module.parameters()) for module in model) * 4
    everything = sum(p.numel() for p in model.parameters()) * 4
    return max(rest for *_, rest in watch.samples), largest, everything


def test_partial_sums_copy_a_module_at_a_time(ranks):
    """A copy of all gradients would be as large as they are."""
    [(most, largest, everything)] = ranks(1)(memory_of_sums)
    assert 0 < most <= 1.01 * largest < everything / 4
