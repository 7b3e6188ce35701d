"""Two exercises of chapter 04, which tests of the grader have in place of all."""

from lab.classroom.exercise import Exercise, Run, Same

CHAPTER = "04_tensor_parallel"


def who_pays(chapter):
    return [chapter.ranks_that_pay(dim, 2, 989e12, 450e9) for dim in (1024, 8192)]


SUM = Exercise("04.2", "SumOut.backward", 1, "?", ("", ""), (Run(2, "--steps=1 --layers=1"),))
PAYS = Exercise("04.7", "ranks_that_pay", 2, "?", ("", ""), (
    Same(who_pays, "[ranks_that_pay(dim, 2, 989e12, 450e9) for dim in (1024, 8192)]"),), "who pays")
