"""Exercises of chapter 04, which tests of the grader have in place of all."""

import torch
import torch.distributed as dist

from lab.classroom.exercise import Exercise, Run, Same

CHAPTER = "04_tensor_parallel"


def who_pays(chapter):
    return [chapter.ranks_that_pay(dim, 2, 989e12, 450e9) for dim in (1024, 8192)]


SUM = Exercise("04.2", "SumOut.backward", 1, "?", ("", ""), (Run(2, "--steps=1 --layers=1"),))
PAYS = Exercise("04.7", "ranks_that_pay", 2, "?", ("", ""), (
    Same(who_pays, "[ranks_that_pay(dim, 2, 989e12, 450e9) for dim in (1024, 8192)]"),), "who pays")


def sums_on_ranks(chapter):
    """The gradient that a sum on all ranks hands back, of one that is 1, 10, 100 on each."""
    x = torch.zeros(2, requires_grad=True)
    y = chapter.SumOut.apply(x, dist.group.WORLD)
    (y * 10**dist.get_rank()).sum().backward()
    return {"y": y, "gradient": x.grad}


ON_RANKS = Exercise("04.2", "SumOut.forward SumOut.backward", 1, "?", ("?", "?"),
                    (Same(sums_on_ranks, "SumOut on 3 ranks", ranks=3),))
