"""The chapters' autograd Functions: each is held to its rule, in forward and in backward.

A rule (lab/chapters/NN/types.py) says the types of the outputs, given those of the inputs. It is
spmd_types' own: `spmd_typecheck`, with the names of forward's arguments. The body of forward is
checked line by line, and where the rule says that all ranks have the same, the body must come to
that. Backward's body is given gradients of the dual types of the outputs, and must return those of
the dual types of the inputs.

A body that sums by send and receive comes to nothing like it: types know no sum of messages. So
for a rule that is marked `by_messages` (of RingColumns and RingRow in chapter 05) the rule is taken
on trust, in both passes, and a table says so. Inside of the body each operator is still checked.
"""

import contextlib
import inspect
import re
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from spmd_types import SpmdTypeError, get_local_type
from torch.overrides import handle_torch_function
from torch.utils._pytree import tree_leaves

from lab.typecheck import fault
from lab.typecheck.duality import misfit
from lab.typecheck.fault import Fault
from lab.typecheck.mesh import DUAL, LETTERS, SAME, WORDS, P, V

SAID = {LETTERS[kind]: word for kind, word in WORDS.items()}
WANTED = re.compile(r"expects its \w+ to be (\w).* but it is (\w)")     # words of spmd_types
ASSERTED = re.compile(r"tensor has \S*([RVPI]), expected \S*([RVPI])")
WHY = {("I", "R"): "its gradient would be summed twice",
       ("I", "V"): "ranks have different ones, which no sum of gradients makes one",
       "P": "its sum is missing", "R": "all ranks have the same already",
       "I": "all ranks have the same already"}


class Call(NamedTuple):
    """Of a Function, lists: the types of its inputs and outputs, by its rule; and those that the
    body of forward has found of the outputs."""
    inputs: list
    outputs: list
    found: list


@contextlib.contextmanager
def held_to(module, rules, checker):
    """In it, the Functions of a chapter have these rules. rules: {name: rule}."""
    with contextlib.ExitStack() as stack:
        for name, rule in rules.items():
            cls = getattr(module, name, None)
            if cls is not None:
                forward, backward = wrapped(cls, checker)
                for attribute, value in (
                        ("bodies", (cls.forward, cls.backward)), ("forward", forward),
                        ("backward", backward), ("spmd_typecheck", staticmethod(rule))):
                    stack.enter_context(mock.patch.object(cls, attribute, value, create=True))
        yield


def wrapped(cls, checker):
    body, body_backward = cls.forward, cls.backward

    def forward(ctx, *args):
        if not checker.applies:                         # a block is computed again
            with checker.off():
                return body(ctx, *args)
        checker.applies = False
        with checker.again():
            outputs = body(ctx, *args)
        ctx.call = checker.last = Call([], [], [])
        for out in in_a_tuple(outputs):
            ctx.call.found.append({**checker.type_of(out)})
            if not any(out is arg for arg in args):
                del out._local_type                     # the rule says it
        return outputs

    def backward(ctx, *gradients):
        for gradient, known in zip(gradients, ctx.call.outputs):
            if gradient is not None:
                gradient._local_type = {axis: DUAL[kind] for axis, kind in known.items()}
                gradient._said = f"the gradient that {cls.__name__} gets"
        with checker.again():                           # autograd runs it without
            returned = body_backward(ctx, *gradients)
            hold_backward(cls, checker, in_a_tuple(returned), ctx.call.inputs,
                          ctx.needs_input_grad)
        return returned

    forward.__signature__ = inspect.signature(body)     # spmd_types reads names of arguments there
    return staticmethod(forward), staticmethod(backward)


def in_a_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def is_known(func):
    """Whether it is the `apply` of a Function that has a rule."""
    cls = getattr(func, "__self__", None)
    return isinstance(cls, type) and hasattr(cls, "bodies")


def is_by_messages(cls):
    return getattr(cls.spmd_typecheck, "by_messages", False)


def apply(checker, func, args):
    """In place of Function.apply: spmd_types runs it, and then the rule."""
    cls, checker.applies = func.__self__, True
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    try:
        result = handle_torch_function(func, tensors, *args)
    except SpmdTypeError as error:
        raise of_rule(cls, checker, args, error) from None
    call = checker.last
    call.inputs.extend({**checker.type_of(x)} if isinstance(x, torch.Tensor) else None
                       for x in args)
    for out, found in zip(in_a_tuple(result), call.found):
        checker.put(out, {**get_local_type(out)})
        call.outputs.append({**get_local_type(out)})
        if not is_by_messages(cls):
            hold_forward(cls, checker, call.outputs[-1], found)
    checker.calls.append((cls.__name__, is_by_messages(cls), call.inputs[0], call.outputs[0]))
    return result


def hold_forward(cls, checker, said, found):
    for axis, kind in said.items():
        is_off = kind in SAME and found[axis] not in SAME or kind is V and found[axis] is P
        if is_off:
            name = checker.mesh.name(axis)
            what = "its sum" if found[axis] is P else "a sum or a gather"
            raise at_the_end(cls.bodies[0], Fault(
                name, (found[axis], kind), f"{cls.__name__}.forward gives what is "
                f"{WORDS[found[axis]]} over {name}, and should be {WORDS[kind]}: {what} is "
                "missing"))


def hold_backward(cls, checker, returned, inputs, needed):
    names = [*inspect.signature(cls.bodies[0]).parameters][1:]
    for i, (gradient, known) in enumerate(zip(returned, inputs)):
        if known is None or gradient is None or not needed[i] or is_by_messages(cls):
            continue
        name = names[min(i, len(names) - 1)]            # the last one may be *weights
        for axis, kind in known.items():
            found, axis = checker.type_of(gradient)[axis], checker.mesh.name(axis)
            why = misfit(found, DUAL[kind])
            if why:
                raise at_the_end(cls.bodies[1], Fault(
                    axis, (found, DUAL[kind]), f"{cls.__name__}.backward gives a gradient of "
                    f"{name} that is {WORDS[found]} over {axis}; {name} is {WORDS[kind]}, so its "
                    f"gradient must be {WORDS[DUAL[kind]]}: {why}"))


def at_the_end(function, told):
    """The fault, in the last line of a function that has returned."""
    code = function.__code__
    if code.co_filename in fault.FILES:
        told.place(code.co_filename, max(line for *_, line in code.co_lines() if line))
    return told


def of_rule(cls, checker, args, error):
    """The Fault of inputs that a rule does not take."""
    words, leaves = str(error).splitlines()[0], tree_leaves(args)
    groups = [x for x in leaves if isinstance(x, dist.ProcessGroup)]
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    wanted = found = None
    if WANTED.search(words):
        wanted, found = WANTED.search(words).groups()
    elif ASSERTED.search(words):
        found, wanted = ASSERTED.search(words).groups()
    for axis in [name for group in groups for name in checker.mesh.names(group) or ()]:
        operands = [(x, checker.kind(x, axis)) for x in tensors]
        of_kind = [x for x, kind in operands if LETTERS[kind] == found]
        if of_kind:
            why = WHY.get((wanted, found)) or WHY.get(found, "it is another on each rank")
            return Fault(axis, (found, wanted), f"{cls.__name__} takes what is {SAID[wanted]} over "
                         f"{axis}, and {fault.name_of(of_kind[0])} is {SAID[found]}: {why}")
        kinds = dict.fromkeys(kind for _, kind in operands)
        if found is None and len(kinds) > 1:
            return Fault(axis, kinds, fault.of_operands("", axis, operands))
    return Fault("", (), f"{cls.__name__}: {words}")
