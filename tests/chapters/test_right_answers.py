"""Right answers to the exercises of 06 to 11 that don't look like ours must pass.

Other dtypes and orders of a sum, whole numbers where ours are floats, lists where ours are tuples:
no check may ask for more than the question does. (Those to the kernels' are in tests/kernels.)
"""

import pytest

from lab.classroom import checks, grading
from tests.support.right_answers import graded

ANSWERS = {
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
    "06.6, without the forward's own function": """
    @staticmethod
    def backward(ctx, gradient):
        sent = torch.stack(gradient.chunk(ctx.group.size(), ctx.join))
        received = sent.new_empty(sent.shape)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return torch.cat([*received], ctx.split), None, None, None
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
    "09.7, with lists": """
def balanced(layers, depth):
    blocks = [layers // depth + (1 if stage < layers % depth else 0) for stage in range(depth)]
    cuts = [0] + [1 + sum(blocks[:stage]) for stage in range(1, depth)] + [layers + 2]
    return [[cuts[stage], cuts[stage + 1]] for stage in range(depth)]
""",
}


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


@pytest.mark.full
@pytest.mark.parametrize("what", ANSWERS)
def test_a_right_answer_that_is_written_otherwise(what):
    assert graded(what.split(",")[0], ANSWERS[what]) == (grading.RIGHT, "")
