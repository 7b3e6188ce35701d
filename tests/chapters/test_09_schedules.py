"""Chapter 09's schedules, and what it has from chapters 07 and 08."""

import contextlib
import inspect
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lab.schedules import check_rendezvous
from tests.chapters.test_09_5d import NINE, nine  # noqa: F401  (a fixture)
from tests.conftest import chapter

SEVEN = "07_pipeline_parallel"


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe-v"])
def test_schedules_are_those_of_chapter_07_and_nobody_blocks(nine, name):
    seven = chapter(SEVEN)
    for p, more in itertools.product((1, 2, 3, 4), (0, 1, 3)):
        m = 2 * p + (more * p if name == "interleaved" else more)
        (ours, owners), theirs = nine.make_schedule(name, p, m), seven.make_schedule(name, p, m, 2)
        whole = [[tuple(action._replace(kind="BW") if action.kind == "B" else action)
                  for action in actions if action.kind != "W"] for actions in theirs.actions]
        assert ours == whole and owners == theirs.ranks
        check_rendezvous(in_words_of_07(nine.make_programs(ours, owners, "full")), theirs.needs)
        programs = nine.make_programs(ours, owners)
        check_rendezvous(in_words_of_07(programs), theirs.needs)
        cuts = [cut for cut in zip(owners, owners[1:]) if cut[0] != cut[1]]
        for rank, program in enumerate(programs):
            assert [step for step in program if isinstance(step, nine.Action)] == ours[rank]
            sent = [step for step in program if getattr(step, "sender", None) == rank]
            assert len(sent) == m * sum(rank in cut for cut in cuts)  # as `formulas` has it


def in_words_of_07(programs):
    """Its check tells a BW's output from the action: it may be a B's as well."""
    seven = chapter(SEVEN)
    return [[seven.Action(*step) if hasattr(step, "kind") else
             seven.Message(seven.Action(*step.output).output, step.sender, step.receiver)
             for step in program] for program in programs]


def test_a_schedule_in_which_ranks_wait_for_each_other_is_refused(nine):
    schedule, owners = nine.make_schedule("1f1b", 2, 2)
    schedule[1].reverse()
    with pytest.raises(ValueError, match="ranks wait for each other"):
        nine.make_programs(schedule, owners)


def messages_in_memory(micro_batches):
    """Of a rank of 1f1b whose stage computes nothing: how many there are in any action, at the
    most, beside the one that it takes; and after the step."""
    nine, rank, p = chapter(NINE), dist.get_rank(), dist.get_world_size()
    schedule, owners = nine.make_schedule("1f1b", p, micro_batches)
    made, seen = [], []

    def message():
        tensor = torch.zeros(3)
        made.append(weakref.ref(tensor))
        return tensor

    def alive(but=None):
        return sum(tensor() is not None and tensor() is not but for tensor in made)

    def forward(i, x, targets, valid):
        seen.append(alive(but=x))
        return torch.zeros(()) if stage.is_last else message()

    def backward(i, gradient, last):
        seen.append(alive(but=gradient))
        return message() if rank else None

    stage = SimpleNamespace(is_last=rank == p - 1, kept_for_backward={}, forward=forward,
                            backward=backward)
    program = nine.make_programs(schedule, owners)[rank]
    nine.execute(program, {rank: stage}, dist.group.WORLD, message,
                 lambda action, *kept: contextlib.nullcontext(),
                 micro_batches * [(torch.zeros(1), None)], 1)
    return max(seen), alive()


@pytest.mark.parametrize("p", [2, 4])
def test_messages_do_not_pile_up_in_memory(ranks, p):
    """What has been sent and used can go, before the step ends."""
    for m in (2 * p, 5 * p):
        assert ranks(p, timeout=120)(messages_in_memory, m) == [(p - 1, 0), *(p - 1) * [(1, 0)]]


def test_what_two_chapters_have_is_the_same_text():
    for name, parts in ((SEVEN, ["one_forward_one_backward"]),
                        ("08_expert_parallel", ["AddLoss", "AllToAll", "run_experts"])):
        for part in parts:
            ours, theirs = (inspect.getsource(getattr(chapter(one), part)) for one in (NINE, name))
            assert ours == theirs, part
