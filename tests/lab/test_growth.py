"""What only a rehearsal sees, no small run: each finding names its line."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import common
from lab import rehearse
from lab.rehearsal import growth
from tests.conftest import SMALL, TEXT, chapter, sample
from tests.lab.test_rehearse import from_a_file, run

BILLION = 10**9


def found_by(make, core="plain"):
    """The sentences that a Watch finds while make() runs, which is in this file."""
    with growth.Watch({__file__}, core) as watch:
        make()
    return [*watch.found.values()]


# ------------------------------------------------------------------------ integers, and scores

BEYOND = {
    "cumsum": lambda: torch.tensor([BILLION] * 3).cumsum(0, dtype=torch.int32),
    "cast": lambda: torch.tensor([3 * BILLION]).to(torch.int32),
    "copy": lambda: torch.zeros(1, dtype=torch.int32).copy_(torch.tensor([3 * BILLION])),
}
WITHIN = {
    "largest": lambda: torch.tensor([2**30 - 1, 2**30]).cumsum(0, dtype=torch.int32),
    "int64": lambda: torch.tensor([BILLION]) * 3,
    "not filled": lambda: [torch.full((999,), 2**40).sum(), torch.empty(999, dtype=torch.int32)],
    "drawn": lambda: torch.zeros(9, dtype=torch.int32).random_(),
}


def test_an_integer_beyond_int32_is_found_where_it_is_made():
    for make in BEYOND.values():
        [sentence] = found_by(make)
        assert re.match(r"test_growth.py:\d+: ", sentence), sentence
        assert re.search("3,000,000,000|2,999,999,999", sentence), sentence
    for what, make in WITHIN.items():
        assert found_by(make) == [], what


def test_a_fake_tensor_has_no_integers():
    with FakeTensorMode():
        assert found_by(lambda: torch.ones(3, dtype=torch.int32) * 10**9 * 3) == []


def test_scores_are_found_if_the_core_is_to_make_none():
    for made_by, core, number in (("plain", "plain", 0), ("plain", "sdpa", 1), ("sdpa", "sdpa", 0)):
        model = common.gpt(common.Config(1, 64, 4, 2, 32, 256, attention=made_by))
        model(torch.zeros(2, 32, dtype=torch.int64))  # is not looked at
        with growth.Watch({common.__file__}, core) as watch:
            model(torch.zeros(2, 32, dtype=torch.int64))
        assert len(watch.found) == number
        assert all("--attention sdpa" in sentence for sentence in watch.found.values())


# ------------------------------------------------------------------------- what grows with ranks

ARGV = f"--ranks=2048 --rank=5 --batch=2048 --data={TEXT}".split()


def half_of(name, *flags):
    argv = [f"{name}.py", *SMALL, *ARGV, *flags]
    module = chapter(name)
    args = rehearse.parse(module, argv)
    return args, growth.halved(module, args, argv, rehearse.parse)


@pytest.mark.parametrize(("name", "flags"), sample([
    ("09_5d", "--tp=2 --pp=2"), ("03_zero", "--variant=zero1"),
    ("09_5d", "--tp=2 --order=tp,dp,cp,pp --dp=1024")]))  # fmt: skip
def test_half_the_cluster_has_the_same_work_for_a_rank(name, flags):
    args, half = half_of(name, *flags.split())
    assert (half.ranks, half.batch, 2 * half.shares) == (1024, 1024, args.shares)
    assert half.micro_batch == args.micro_batch
    if name == "09_5d":
        at, there = (chapter(name).places_of_ranks(x)[x.rank] for x in (args, half))
        assert at._replace(dp=0) == there._replace(dp=0)


@pytest.mark.parametrize(("name", "flags"), sample([
    ("02_data_parallel", "--ranks=1025 --batch=1025"),  # has no half
    ("06_context_parallel", "--ranks=1024 --seq=2048 --batch=1"),  # a half has other work
    ("08_expert_parallel", "--experts=2048 --top-k=1"),  # and other experts
], 2))
def test_no_half_where_that_would_be_another_run(name, flags):
    assert half_of(name, *flags.split())[1] is None


LOSS = ("        dist.all_reduce(loss, group=group)              # for the report, which shows the "
        "whole loss\n")  # fmt: skip
MADE = "    replica = replicate(args.variant, model, group, 2**20 * args.bucket_mb)\n"
GROWING = {  # in 02_data_parallel.py: before which line, what is put, and the numbers found
    "a loop": (LOSS, "        for other in range(run.world):\n            pass\n",
               r"times in a step with 1,024 ranks, and 51\d with 512: (for|pass)"),
    "a list": (LOSS, "        sizes = [loss for _ in range(run.world)]\n",
               r"1,02\d times in a step with 1,024 ranks, and 51\d with 512: sizes"),
    "bytes": (LOSS, "        loss.new_empty(run.world, 512)\n",
              r"2.10 MB in a step with 1,024 ranks, and 1.05 MB with 512: loss"),
    "groups": (MADE, "    groups = [dist.new_group() for _ in range(run.world)]\n",
               r"1,024 groups with 1,024 ranks, and 512 with 512: groups"),
}  # fmt: skip


def rehearsed_with(capsys, folder, before, line):
    """Chapter 02 with a line more: the status and the output of its rehearsal."""
    module = from_a_file(folder, "02_data_parallel", before, line + before)
    status, output, _ = run(capsys, "02_data_parallel.py", "--ranks=1024", "--batch=1024",
                            module=module)  # fmt: skip
    return status, output


@pytest.mark.parametrize("what", sample(GROWING))
def test_what_grows_is_named_by_its_line(what, capsys, tmp_path):
    before, line, sentence = GROWING[what]
    status, output = rehearsed_with(capsys, tmp_path, before, line)
    found = re.findall(r"✗ 02_data_parallel.py:\d+ (.*)", output)
    assert status == 1 and any(re.search(sentence, one) for one in found), output


@pytest.mark.full
@pytest.mark.parametrize(("before", "line"), [
    (LOSS, ""),  # the chapter as it is
    (LOSS, "        loss.new_empty(run.world, 128)\n"),  # half of what would be found
    (MADE, "    for other in range(run.world):\n        pass\n"),  # not in a step
])  # fmt: skip
def test_what_does_not_matter_is_not_found(before, line, capsys, tmp_path):
    status, output = rehearsed_with(capsys, tmp_path, before, line)
    assert status == 0 and "✗" not in output and "with half the data-parallel ones" in output


@pytest.mark.full
def test_an_error_behind_a_finding_costs_no_traceback(capsys, tmp_path):
    right = "        pieces = flat.split([*(p.numel() for p in self.parameters), self.padding])\n"
    wrong = ("        ends = torch.tensor([p.numel() for p in self.parameters]).cumsum(0, dtype="
             "torch.int32)\n        pieces = flat.tensor_split(ends.tolist())\n")  # fmt: skip
    module = from_a_file(tmp_path, "03_zero", right, wrong)
    flags = "03_zero.py", "--ranks=2", "--variant=zero1"
    assert run(capsys, *flags, module=module)[0] == 0
    status, output, errors = run(capsys, *flags, "--layers=1", "--dim=16384", module=module)
    assert (status, errors) == (1, "") and output.count("\n") == 1
    assert re.match(r"  ✗ 03_zero.py:\d+: an int32 holds .*: ends = ", output)
