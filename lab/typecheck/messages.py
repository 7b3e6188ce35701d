"""What collectives do to types, in forward, in backward and in the step.

spmd_types knows those of torch.distributed that PyTorch lets it see, and wants a type beforehand of
what they write into. Ours are called by their names in torch.distributed and in common, so these
are replaced here: for asynchronous ones, for groups of several axes, and for messages as well.

    all_reduce         partial or varying to replicated: the sum of what the ranks have
    all_gather         varying to replicated
    reduce_scatter     partial or varying to varying
    all_to_all         varying to varying
    broadcast          to replicated
    send, receive      what comes is what is sent: the program is the same on all ranks
"""

import contextlib
from unittest import mock

import torch.distributed as dist

import common
from lab.typecheck import fault
from lab.typecheck.fault import Fault
from lab.typecheck.mesh import SAME, WORDS, P, R, V

TWICE = "all ranks have the same already, and it is counted once for each of them"


@contextlib.contextmanager
def seen(checker):
    """In it, the checker sees every collective."""
    with contextlib.ExitStack() as stack:
        for module, name, rule in (
                (dist, "all_reduce", all_reduce), (dist, "broadcast", broadcast),
                (dist, "all_gather", all_gather_list), (dist, "all_to_all_single", all_to_all),
                (dist, "batch_isend_irecv", messages),
                (common, "all_gather", all_gather), (common, "reduce_scatter", reduce_scatter)):
            stack.enter_context(
                mock.patch.object(module, name, with_rule(rule, getattr(module, name), checker)))
        yield


def with_rule(rule, original, checker):
    def collective(*args, **kwargs):
        if not checker.is_off:
            rule(checker, *args, **kwargs)
        with checker.off():
            return original(*args, **kwargs)

    return collective


def axes_of(checker, group):
    names = checker.mesh.names(group)
    if names is None:
        raise Fault("", (), f"a collective runs on the ranks {dist.get_process_group_ranks(group)},"
                    " which are no axis of the mesh: types have nothing to say of it")
    return names


def hold_summed(checker, x, names, what):
    """It is not the same on all ranks."""
    for name in names:
        kind = checker.kind(x, name)
        if kind in SAME and not getattr(x, "_is_zero", False):
            raise Fault(name, [kind], f"{what} over {name} sums {fault.name_of(x, 'its input')}, "
                        f"which is {WORDS[kind]}: {TWICE}")


def hold_no_parts(checker, x, names, what):
    for name in names:
        if checker.kind(x, name) is P:
            raise Fault(name, [P], f"{what} over {name} takes {fault.name_of(x, 'its input')}, "
                        "which is partial: its sum is missing")


def all_reduce(checker, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    names = axes_of(checker, group)
    if op == dist.ReduceOp.SUM:
        hold_summed(checker, tensor, names, "an all_reduce")
    else:
        hold_no_parts(checker, tensor, names, "an all_reduce that is no sum")
    checker.change(tensor, names, R)


def all_gather(checker, out, x, group=None, async_op=False):
    names = axes_of(checker, group)
    hold_no_parts(checker, x, names, "an all_gather")
    for name in names:
        kind = checker.kind(x, name)
        if kind in SAME:
            raise Fault(name, [kind], f"an all_gather over {name} takes "
                        f"{fault.name_of(x, 'its input')}, which is {WORDS[kind]}: it brings "
                        "copies of the same together")
    checker.become(out, checker.type_of(x))
    checker.change(out, names, R)


def all_gather_list(checker, outs, x, group=None, async_op=False):
    """A tensor of each rank, apart from each other: of parts, whoever has them can add them up."""
    names = axes_of(checker, group)
    for out in outs:
        checker.become(out, checker.type_of(x))
        checker.change(out, names, R)


def reduce_scatter(checker, out, x, op=dist.ReduceOp.SUM, group=None, async_op=False):
    names = axes_of(checker, group)
    hold_summed(checker, x, names, "a reduce_scatter")
    checker.become(out, checker.type_of(x))
    checker.change(out, names, V)


def all_to_all(checker, out, x, *sizes, group=None, async_op=False):
    names = axes_of(checker, group)
    hold_no_parts(checker, x, names, "an all_to_all")
    checker.become(out, checker.type_of(x))
    checker.change(out, names, V)


def broadcast(checker, tensor, src=None, group=None, async_op=False, group_src=None):
    checker.change(tensor, axes_of(checker, group), R)


def messages(checker, operations):
    sent = [one.tensor for one in operations if one.op == dist.isend]
    for one in operations:
        if one.op == dist.irecv and sent:
            checker.become(one.tensor, checker.type_of(sent[0]))
