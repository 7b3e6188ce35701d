"""Gives each tensor of a step its type, by spmd_types' rules for operators, and what they lack.

    gradients   p.grad has the dual of p's type
    zeros       are replicated and partial at once: what adds up parts may begin with them
    views       share the type of their storage: that of a bucket, which is summed as a whole
    products    that add up what a parameter is cut along are partial sums
"""

import contextlib
import weakref

import torch
from spmd_types import SpmdTypeError, _state, get_local_type, has_local_type, no_typecheck
from spmd_types._checker import (
    _OP_REGISTRY,
    OpLinearity,
    _infer_local_type_for_axis_raw,
    _OpSpec,
    infer_output_type,
)
from spmd_types.checker import typecheck
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from lab.bench.fakes import tensors_in
from lab.typecheck import fault, functions
from lab.typecheck.fault import Fault
from lab.typecheck.mesh import DUAL, SAME, WORDS, I, P, R, V

LINEAR = OpLinearity.LINEAR
for _operation in ("__getitem__", "to", "float", "double", "bfloat16", "half", "type_as",
                   "tensor_split"):
    _OP_REGISTRY.setdefault(getattr(torch.Tensor, _operation), _OpSpec(LINEAR, (0,)))
_OP_REGISTRY.setdefault(torch.nn.functional.pad, _OpSpec(LINEAR, (0,)))

ADDS = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__",
        "cat", "stack", "index_add", "index_add_"}
ADDS_A_NUMBER = {"__radd__", "__rsub__", "add", "__add__"}
FILLED = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
EMPTY = {"empty_like", "new_empty", "empty", "rand_like"}
PRODUCTS = {"linear": 1, "matmul": 0, "__matmul__": 0}  # which dimension of a weight they add up
AS = {"view_as": "view", "expand_as": "expand", "reshape_as": "reshape"}
GET, SET = "__get__", "__set__"
GRAD, DATA = torch.Tensor.grad.__get__, torch.Tensor.data.__get__


class Checker(TorchFunctionMode):
    """mesh: a Mesh. types: {address of a storage: its type}, for tensors that autograd has made
    anew. loss: the type of what `backward` was called on. calls: (autograd Function, whether by its
    rule alone, the types of its first input and of its first output), call by call."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.types, self.is_off, self.loss = mesh, {}, False, None
        self.calls, self.cuts = [], {}                  # cuts: of parameters, where they lie
        self.applies = False                            # a Function, which comes next
        self.last = None                                # the latest Call of an autograd Function

    @contextlib.contextmanager
    def on(self):
        """Check all that runs in it."""
        _state._push_mesh(dict(self.mesh.axes))
        try:
            with typecheck(strict_mode="strict", local=True), self:
                yield
        finally:
            _state._pop_mesh()

    @contextlib.contextmanager
    def again(self):
        """Check inside of an operator, for which PyTorch has taken the modes away."""
        with _state._current_mode(), self:
            yield

    @contextlib.contextmanager
    def off(self):
        before, self.is_off = self.is_off, True
        try:
            with no_typecheck():
                yield
        finally:
            self.is_off = before

    # ---------------------------------------------------------------------------- types of tensors

    def kind(self, tensor, axis):
        """Along a named axis."""
        return self.type_of(tensor)[self.mesh.axes[axis]]

    def type_of(self, tensor):
        """Its type; if it has none so far, that of its storage; else it is a constant, which all
        ranks have alike."""
        if not get_local_type(tensor):
            known = self.types.get(address(tensor))
            self.put(tensor, self.mesh.all(R) if known is None else known)
        return get_local_type(tensor)

    def put(self, tensor, local_type):
        """Give it this type, the very dict."""
        tensor._local_type = local_type
        key = address(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            self.cuts[key, tensor.shape] = getattr(tensor, "cuts", ())
            return                                      # others that lie there are not like it
        if key not in self.types:
            weakref.finalize(tensor.untyped_storage(), self.types.pop, key, None)
        self.types[key] = local_type

    def change(self, tensor, names, kind):
        """Along these axes, of the tensor and of all that share its storage and type."""
        self.type_of(tensor).update({self.mesh.axes[name]: kind for name in names})

    def become(self, tensor, local_type):
        """In place: it, and what shares its storage and type."""
        self.type_of(tensor).update(local_type)

    def note_gradient(self, p, gradient):
        if gradient is not None and not has_local_type(gradient):
            self.put(gradient, {axis: DUAL[kind] for axis, kind in self.type_of(p).items()})
            if hasattr(p, "global_name"):
                gradient._said = f"the gradient of {p.global_name}"

    # --------------------------------------------------------------------------------- an operator

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.is_off or name in (SET, "untyped_storage"):
            return self.untyped(func, args, kwargs)
        if func is torch.autograd.backward:
            with bare():
                return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self.backward(*args, **kwargs)
        if func == GRAD:
            gradient = func(*args)
            self.note_gradient(args[0], gradient)
            return gradient
        if func == DATA:
            data = func(*args)
            data._local_type = self.type_of(args[0])
            return data
        if name == GET and func not in _OP_REGISTRY:
            return func(*args)
        return self.run(func, name, args, kwargs)

    def run(self, func, name, args, kwargs):
        operands = [*tensors_in([*args, *kwargs.values()])]
        shared = {address(x): self.type_of(x) for x in operands}
        self.let_zeros_be(name, operands)
        if name.endswith("_") and operands and not operands[0].requires_grad:
            self.let_no_gradient_be(*operands)
        if name == "apply" and functions.is_known(func):
            return functions.apply(self, func, args)
        if name == "to" and len(operands) > 1:          # another's dtype and device
            args, kwargs = (args[0], operands[1].dtype), {}
        if name in AS:
            name, args = AS[name], (args[0], args[1].shape)
            func = getattr(torch.Tensor, name)
        if name in FILLED or name in EMPTY:
            result = self.untyped(func, args, kwargs)
            self.put(result, self.mesh.all(V if name in EMPTY else R))
            result._is_zero = "zero" in name
            return result
        if name in ("copy_", "__setitem__"):
            return self.overwrite(func, name, args, kwargs)
        if name in ("zero_", "fill_"):
            args[0]._is_zero = name == "zero_"
            return self.untyped(func, args, kwargs)
        if name.startswith("_foreach_"):
            return self.each(func, name, args, kwargs)
        if name in ADDS_A_NUMBER and len(operands) == 1 and args[1] == 0:
            result = self.untyped(func, args, kwargs)   # no constant that each rank adds
            self.put(result, {**self.type_of(operands[0])})
            return result
        try:
            result = func(*args, **kwargs)
        except SpmdTypeError as error:
            raise self.explained(func, args, kwargs, error) from None
        for x in tensors_in([result]):
            self.note_result(func, name, x, args, shared)
        return result

    def note_result(self, func, name, x, args, shared):
        known = get_local_type(x)
        if not known:
            self.put(x, self.mesh.all(V))               # whatever is in memory there
            return
        old = shared.get(address(x))
        if any(x is arg for arg in args):               # in place
            old.update(known)
            self.put(x, old)
            x._is_zero = False
        elif old == known:
            self.put(x, old)                            # a view
            x._is_zero = any(getattr(arg, "_is_zero", False) for arg in tensors_in(args))
        else:
            self.put(x, {**known})
            x._is_zero = func in (torch.zeros,)
        if name in PRODUCTS and len(args) > 1:
            for cut in self.cuts.get((address(args[1]), args[1].shape), ()):
                for axis in self.mesh.names(cut.group) or () if cut.dim == PRODUCTS[name] else ():
                    if cut.parts == cut.group.size() and self.kind(x, axis) is V:
                        self.change(x, [axis], P)

    def untyped(self, func, args, kwargs):
        with self.off():
            return func(*args, **kwargs)

    def let_zeros_be(self, name, operands):
        """Zeros that are added to what is partial."""
        if name in ADDS:
            for axis in self.mesh.axes.values():
                if any(self.type_of(x)[axis] is P for x in operands):
                    for x in operands:
                        if getattr(x, "_is_zero", False):
                            self.type_of(x)[axis] = P

    def let_no_gradient_be(self, target, *others):
        """What changes in place and has no gradient: there, invariant is replicated."""
        for axis, kind in self.type_of(target).items():
            if kind is I and any(self.type_of(x)[axis] is not I for x in others):
                self.type_of(target)[axis] = R

    def overwrite(self, func, name, args, kwargs):
        """All or a part of a tensor has new numbers: it is what they are, and where a part is, what
        both are."""
        target, source = args[0], args[-1]
        new = self.type_of(source) if isinstance(source, torch.Tensor) else self.mesh.all(R)
        result = self.untyped(func, args, kwargs)
        is_whole, is_zero = name == "copy_", getattr(target, "_is_zero", False)
        for axis, kind in self.type_of(target).items():
            if not is_whole and kind is not new[axis]:
                both = kind, new[axis]
                if P in both and not is_zero:
                    raise Fault(self.mesh.name(axis), both,
                                f"a part of {fault.name_of(target)} is overwritten with what is "
                                f"{WORDS[new[axis]]} over {self.mesh.name(axis)}, and the rest is "
                                f"{WORDS[kind]}")
                new = {**new, axis: P if P in both else V if V in both else kind}
        self.become(target, new)
        target._is_zero = False
        return result

    def each(self, func, name, args, kwargs):
        """An operator on lists, such as those of the norm: each element by itself."""
        lists = [x for x in args if isinstance(x, (list, tuple)) and [*tensors_in(x)]]
        single = [x for x in args if isinstance(x, torch.Tensor)]
        linear = (OpLinearity.MULTILINEAR if "mul" in name or "div" in name
                  else LINEAR if "add" in name else OpLinearity.NONLINEAR)
        kinds = []
        for operands in zip(*lists):
            operands = [*operands, *single]
            types = [self.type_of(x) for x in operands]
            try:
                kinds.append(infer_output_type(types, no_grad=[True] * len(types),
                                               linearity=linear))
            except SpmdTypeError as error:
                raise self.explained(func, operands, {}, error) from None
        result = self.untyped(func, args, kwargs)
        for x, new, before in zip(args[0] if result is None else result, kinds, lists[0]):
            if result is None:
                self.hold_in_place(before, new)
            else:
                self.put(x, new)
        return result

    def hold_in_place(self, x, new):
        for axis, kind in self.type_of(x).items():
            if kind in SAME and new[axis] is V:
                axis = self.mesh.name(axis)
                raise Fault(axis, (kind, V), f"{fault.name_of(x)} is the same on all ranks of "
                            f"{axis}, and is multiplied by what is varying: each rank goes on "
                            "with another one")
        self.become(x, {a: k for a, k in new.items() if self.type_of(x)[a] is not I})

    def backward(self, loss, gradient=None, **kwargs):
        if gradient is None:
            self.hold_loss(loss)
        with bare():
            return torch.autograd.backward(loss, gradient, **kwargs)

    def hold_loss(self, loss):
        """Of what backward is called on, each rank's gradient is 1."""
        self.loss = dict(self.type_of(loss))
        for axis, kind in self.loss.items():
            if kind not in (I, P):
                axis = self.mesh.name(axis)
                why = ("each rank has another one, which is no part of a sum" if kind is V else
                       "all ranks have the same, so that its gradient counts once on each")
                raise Fault(axis, [kind], f"backward is called on a loss that is {WORDS[kind]} "
                            f"over {axis}: {why}")

    def explained(self, func, args, kwargs, error):
        """A Fault in place of the error of spmd_types, for the first axis that does not fit."""
        operands = [*tensors_in([*args, *kwargs.values()])]
        spec = _OP_REGISTRY.get(func)
        linearity = spec.linearity if spec else OpLinearity.NONLINEAR
        for name, axis in self.mesh.axes.items():
            kinds = [self.type_of(x)[axis] for x in operands]
            free = [not (torch.is_grad_enabled() and x.requires_grad) for x in operands]
            try:
                _infer_local_type_for_axis_raw(axis, kinds, False, linearity, free)
                is_off = kinds[1:] == [P] and kinds[0] is not P
            except SpmdTypeError:
                is_off = True
            if is_off or len(operands) == 1 and P in kinds:
                return Fault(name, dict.fromkeys(kinds), fault.of_operands(
                    getattr(func, "__name__", ""), name, [*zip(operands, kinds)]))
        return Fault("", (), str(error).splitlines()[0])


@contextlib.contextmanager
def bare():
    """In it, no mode sees an operator."""
    with contextlib.ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield


def address(tensor):
    return tensor.untyped_storage()._cdata
