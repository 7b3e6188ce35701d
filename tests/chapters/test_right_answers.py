"""Right answers to the exercises of 06 to 11 that do not look like ours: they must pass.

Other dtypes and orders of a sum, whole numbers where ours are floats, lists where ours are tuples:
no check may ask for more than the question does. (The kernels': tests/kernels.)
"""

import pytest

from lab.classroom import checks, grading
from tests.support.right_answers import graded

ANSWERS = {
    "06.4, by the larger of the two": """
def merge(out, lse, block_out, block_lse):
    largest = torch.maximum(lse, block_lse)
    mine, its = (lse - largest).exp(), (block_lse - largest).exp()
    both = mine + its
    out[:] = out * (mine / both)[..., None] + block_out * (its / both)[..., None]
    lse[:] = largest + both.log()
""",
    "06.6, without the forward's own function": """
    @staticmethod
    def backward(ctx, gradient):
        sent = torch.stack(gradient.chunk(ctx.group.size(), ctx.join))
        received = sent.new_empty(sent.shape)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return torch.cat([*received], ctx.split), None, None, None
""",
    "06.11, by a dictionary": """
def in_order(x, runs, dim):
    pieces, at = {}, 0
    for of_part in runs:
        for run in of_part:
            pieces[int(run[0])] = x.narrow(dim, at, len(run))
            at += len(run)
    return torch.cat([pieces[first] for first in sorted(pieces)], dim)
""",
    "07.7, with NumPy's numbers": """
def alive_over_time(actions):
    import numpy
    steps = [{"F": 1, "W": -1, "BW": -1}.get(kind, 0) for kind, _, _ in actions]
    return list(numpy.cumsum(numpy.array(steps, dtype=int)))
""",
    "08.2, by a division of whole numbers": """
def balance_loss(scores, chosen, over_batch=False, group=None):
    batch, seq, experts = scores.shape
    counts = F.one_hot(chosen, experts).sum((1, 2))
    shares = counts / counts.sum(-1, keepdim=True)
    if over_batch:
        shares = shares.mean(0, keepdim=True)
        if group and group.size() > 1:
            dist.all_reduce(shares, group=group)
            shares = shares / group.size()
    return (shares * scores.sum(1) / seq * experts).sum()
""",
    "08.2, by bincount": """
def balance_loss(scores, chosen, over_batch=False, group=None):
    experts, total = scores.shape[-1], 0
    shares = [torch.bincount(each.flatten(), minlength=experts) / each.numel() for each in chosen]
    if over_batch:
        shared = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
        if group and group.size() > 1:
            dist.all_reduce(shared, group=group)
            shared /= group.size()
        shares = [shared] * len(chosen)
    for share, of_sequence in zip(shares, scores):
        total = total + experts * (share * of_sequence.mean(0)).sum()
    return total
""",
    "08.10, by sorting": """
def choose(scores, cfg):
    if cfg.node_limit < cfg.nodes:
        size, k = cfg.experts // cfg.nodes, -(-cfg.top_k // cfg.node_limit)
        good = torch.stack([part.sort(-1, descending=True).values[..., :k].sum(-1)
                            for part in scores.split(size, -1)], -1)
        machines = good.argsort(-1, descending=True)[..., :cfg.node_limit]
        of_expert = torch.arange(cfg.experts) // size
        stays = (machines[..., None] == of_expert).any(-2)
        scores = torch.where(stays, scores, scores.new_tensor(float("-inf")))
    return scores.argsort(-1, descending=True)[..., :cfg.top_k]
""",
    "09.7, with lists": """
def balanced(layers, depth):
    blocks = [layers // depth + (1 if stage < layers % depth else 0) for stage in range(depth)]
    cuts = [0] + [1 + sum(blocks[:stage]) for stage in range(1, depth)] + [layers + 2]
    return [[cuts[stage], cuts[stage + 1]] for stage in range(depth)]
""",
    "11.1, with a little added to the norm": """
def orthogonalize(x, steps=5):
    if len(x) > x.shape[1]:
        return orthogonalize(x.T, steps).T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x
""",
}
OFTEN = "08.2", "11.1"                  # the others in `make test-all`


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


@pytest.mark.parametrize("what", [
    pytest.param(what, marks=[] if what.startswith(OFTEN) else [pytest.mark.full])
    for what in ANSWERS])
def test_a_right_answer_that_is_written_otherwise(what):
    assert graded(what.split(",")[0], ANSWERS[what]) == (grading.RIGHT, "")
