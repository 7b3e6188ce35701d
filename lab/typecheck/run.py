"""A run of a chapter that is typechecked: as one rank of a cluster that is not there, two steps.

Types come from what the chapter says itself: which axes its mesh has; of each parameter, along
which of them it is cut (p.cuts), and over which its gradient is summed (p.partial, p.holders); and
from its room (lab/chapters/NN/types.py): along which axes ranks have other tokens, and its rules.
"""

import contextlib
import functools
import linecache
import os
import sys
import traceback
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from spmd_types import has_local_type
from spmd_types.checker import typecheck
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

import common
from lab.bench import fakes
from lab.typecheck import fault, functions, messages
from lab.typecheck.fault import Fault
from lab.typecheck.mesh import DUAL, SAME, WORDS, I, P, R, V, mesh_of
from lab.typecheck.mode import Checker, bare

STEPS = 2               # the second begins with what the first has left


class Untold(Exception):
    """Types cannot be told of this run: why."""


class Run(common.Run):
    """room: a chapter's types.py. seams: {module: (type of its input, of its output)}, as letters
    by axis; gradients: {parameter: (its type, that of the gradient which the optimizer takes)};
    reported: of the loss and the norm; loss: of what backward was called on."""

    def __init__(self, args, room, module):
        self.args, self.dtype = args, common.DTYPES[args.dtype]
        self.text = object.__new__(common.Text)         # its numbers are not read
        self.text.args = args
        self.rank, self.world = common.environment("RANK", 0), common.environment("WORLD_SIZE", 1)
        self.device, self.first_step, self.status = torch.device("cpu"), 0, 0
        self.room, self.module = room, module
        self.checker, self.models, self.optimizers = None, [], []
        self.seams, self.gradients, self.paths, self.reported = {}, {}, {}, {}
        self.stack = contextlib.ExitStack()

    # ----------------------------------------------------------------- what a chapter says to it

    def mesh(self, **axes):
        self.take_axes(axes)
        with unset_fake_temporarily():                  # it computes with ranks
            return super().mesh(**axes)

    def take_axes(self, sizes):
        self.checker = Checker(mesh_of(self.rank, sizes))

    def draw(self, model):
        self.models.append(model)
        return super().draw(model)

    def optimizer(self, parameters, **remembered):
        optimizer = super().optimizer(parameters, **remembered)
        return self.held(optimizer)

    def mixed(self, parameters, device=None):
        optimizer = super().mixed(parameters, device)
        return optimizer if optimizer in self.optimizers else self.held(optimizer)

    def held(self, optimizer):
        """Its step takes whole gradients alone."""
        step = optimizer.step

        def hold_and_step(*args, **kwargs):
            if not self.checker.is_off:
                self.hold_gradients(optimizer)
            with self.checker.off():
                return step(*args, **kwargs)

        optimizer.step = hold_and_step
        self.optimizers.append(optimizer)
        return optimizer

    def batches(self, share=0, build=common.gpt, after_step=None):
        args, seq = self.args, self.args.model.seq
        if self.checker is None:
            self.take_axes(self.room.axes(args))
        self.type_parameters()
        with self.stack:
            self.enter()
            for step in range(STEPS):
                self.buffers = self.types_of_buffers()
                mine = [torch.zeros((args.batch // args.shares, seq), dtype=torch.int64)
                        for _ in range(2)]
                for x in mine:
                    self.checker.put(x, self.of_tokens())
                pairs = list(zip(*(x.split(args.micro_batch) for x in mine)))
                yield common.Batch(step, None, None, args.batch * seq, pairs,
                                   self.text.starts(step))

    measure = span = lambda self, *about: contextlib.nullcontext()

    def log(self, batch, loss, norm, model, updated=None, skipped=False, **shown):
        for what, x in (("loss", loss), ("norm", norm)):
            for name in self.checker.mesh.axes:
                kind = self.checker.kind(x, name)
                if kind not in SAME:
                    raise Fault(name, [kind], f"the {what} that is reported is {WORDS[kind]} over "
                                f"{name}: " + ("its sum is missing" if kind is P
                                               else "each rank has another one"))
            self.reported[what] = self.told(x)
        for key, before in self.buffers.items():
            for name, kind in self.types_of_buffers()[key].items():
                if before[name] == "R" and kind == "V":
                    raise Fault(name, (R, V), f"{key} was the same on all ranks of {name}, and is "
                                "varying after the step: the copies have begun to differ")

    # ------------------------------------------------------------------------------- around that

    @contextlib.contextmanager
    def hooks(self):
        """In it, what autograd is to call in the middle of backward is checked, too."""
        register = torch.Tensor.register_post_accumulate_grad_hook

        def register_checked(p, hook):
            def checked(p):
                with self.checker.again():
                    return hook(p)

            return register(p, checked)

        def run_bare(*args, **kwargs):
            with bare():
                return engine(*args, **kwargs)

        engine = torch.autograd._engine_run_backward
        with (mock.patch.object(torch.Tensor, "register_post_accumulate_grad_hook",
                                register_checked),
              mock.patch.object(torch.autograd, "_engine_run_backward", run_bare)):
            yield

    def enter(self):
        checker, room, module = self.checker, self.room, self.module
        for context in (
                functions.held_to(module, room.RULES, checker), messages.seen(checker),
                self.marked(), checker.on()):
            self.stack.enter_context(context)
        self.paths = {id(part): path for model in self.models
                      for path, part in model.named_modules() if path}
        for hook in (register_module_forward_pre_hook(self.note_input),
                     register_module_forward_hook(self.note_output)):
            self.stack.callback(hook.remove)

    @contextlib.contextmanager
    def marked(self):
        """In it, what a chapter's types.py says of its functions holds, and what we say of two of
        common's."""
        checker, module = self.checker, self.module
        more = {"loss_sum": loss_sum, "grad_norm": grad_norm, **getattr(self.room, "MARKS", {})}
        with contextlib.ExitStack() as stack:
            for name, rule in more.items():
                first, _, method = name.partition(".")
                for owner in (module, common):
                    owner = getattr(owner, first, None) if method else owner
                    function = getattr(owner, method or name, None)
                    if function:
                        stack.enter_context(mock.patch.object(
                            owner, method or name, ruled(rule, checker, function)))
            yield

    def type_parameters(self):
        """By what is noted on them."""
        lists = [[*model.parameters()] for model in self.models]
        lists += [group["params"] for optimizer in self.optimizers
                  for group in optimizer.param_groups]
        for p in (p for those in lists for p in those):
            if not hasattr(p, "_local_type"):
                self.checker.put(p, self.of_parameter(p))
                p.register_hook(functools.partial(self.note_accumulated, p))

    def of_parameter(self, p):
        mesh = self.checker.mesh
        kinds = dict.fromkeys(mesh.axes, I) | dict.fromkeys(self.room.TOKENS, R)
        kinds |= dict.fromkeys(getattr(self.room, "LAYERS", ()), V)
        if hasattr(p, "flat"):                          # a shard of parameters, over a group
            first = self.of_parameter(p.flat[0][0])
            kinds = {name: first[axis] for name, axis in mesh.axes.items()}
            kinds |= self.along(p.flat[2], V)
        for noted in ("partial", "holders"):
            kinds |= self.along(getattr(p, noted, None), R)
        for cut in getattr(p, "cuts", ()):
            if cut.parts > 1:
                kinds |= self.along(cut.group, V)
        return {mesh.axes[name]: kinds[name] for name in mesh.axes}

    def along(self, group, kind):
        names = self.checker.mesh.names(group) if group else ()
        if names is None:
            raise Untold(f"a parameter is shared by the ranks "
                         f"{dist.get_process_group_ranks(group)}, which are no axis of the mesh")
        return dict.fromkeys(names, kind)

    def of_tokens(self):
        return {axis: V if name in self.room.TOKENS else R
                for name, axis in self.checker.mesh.axes.items()}

    def types_of_buffers(self):
        """Of those that go on from step to step: {name: {axis: letter}}."""
        found = {}
        for model in self.models:
            kept = model.state_dict(keep_vars=True)
            for name, x in kept.items():
                if not isinstance(x, nn.Parameter):
                    found[name] = self.told(x)
        return found

    def loss_type(self):
        return self.checker.loss and self.checker.mesh.told(self.checker.loss)

    def told(self, x):
        with self.checker.off():
            return self.checker.mesh.told(self.checker.type_of(x))

    def note_accumulated(self, p, gradient):
        """Before a gradient is added to p.grad: has that been summed already?"""
        before = p.grad
        if before is None or not has_local_type(before):
            return
        for axis, kind in self.checker.type_of(p).items():
            if DUAL[kind] is P and self.checker.type_of(before)[axis] in SAME:
                name = self.checker.mesh.name(axis)
                raise Fault(name, (P, R), f"{p.global_name} gets a gradient that is partial over "
                            f"{name}, and it is added to one that has been summed already")

    def note_input(self, module, inputs):
        path = self.paths.get(id(module))
        if path and path not in self.seams and not self.checker.is_off:
            kinds = [self.told(x) for x in inputs if isinstance(x, torch.Tensor)]
            self.seams[path] = [kinds[0] if kinds else None, None]

    def note_output(self, module, inputs, output):
        path = self.paths.get(id(module))
        if path and isinstance(output, torch.Tensor) and not self.checker.is_off:
            output._said = f"the output of {path}"
            if self.seams[path][1] is None:
                self.seams[path][1] = self.told(output)

    def hold_gradients(self, optimizer):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is None or not hasattr(p, "_local_type"):
                continue
            name = (p.global_name if hasattr(p, "global_name") else
                    f"the shard with {p.flat[0][0].global_name}")
            of_p, of_gradient = self.told(p), self.told(p.grad)
            self.gradients.setdefault(name, (of_p, of_gradient))
            for axis, kind in of_gradient.items():
                if kind == "P":
                    raise Fault(axis, [P], f"the optimizer takes the gradient of {name}, which is "
                                f"partial over {axis}: its sum is missing")
                if of_p[axis] == "V" and kind == "R" and not getattr(p.grad, "_is_zero", False):
                    raise Fault(axis, ["R", "V"], f"the optimizer takes the gradient of {name}, "
                                f"which is the same on all ranks of {axis}, and {name} is varying: "
                                "gradients of different parts have been summed")
                if kind == "V" and of_p[axis] in "RI":
                    raise Fault(axis, [V, of_p[axis]], f"the optimizer takes the gradient of "
                                f"{name}, which is varying over {axis}, and {name} is the same on "
                                "all ranks: they will differ")


def ruled(rule, checker, function):
    return lambda *args, **kwargs: rule(checker, function, *args, **kwargs)


def loss_sum(checker, function, logits, targets):
    """A sum over tokens: where ranks have other tokens, each has a part of it."""
    total = function(logits, targets)
    checker.change(total, [name for name in checker.mesh.axes if checker.kind(total, name) is V], P)
    return total


def grad_norm(checker, function, parameters, group=None):
    """Of whole gradients. Over the ranks of the group, where copies count once, it is of all."""
    held = [p for p in parameters if p.grad is not None]
    kinds = checker.mesh.all(R)
    for p in held:
        for axis, kind in checker.type_of(p.grad).items():
            if kind is P:
                name = checker.mesh.name(axis)
                raise Fault(name, [P], f"the norm is taken of {fault.name_of(p.grad)}, which is "
                            f"partial over {name}: its sum is missing")
            kinds[axis] = V if kind is V else kinds[axis]
    with checker.off():
        norm = function(held, group)
    checker.put(norm, kinds)
    checker.change(norm, checker.mesh.names(group) if group else (), R)
    return norm


def load(path, source):
    """The module of a chapter with this source. It may keep a Function's `apply` in a table, so it
    is made where PyTorch's own one has been replaced."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    linecache.cache[str(path)] = len(source), None, source.splitlines(True), str(path)
    with typecheck():
        exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def line_of(error):
    """The innermost line of the chapter, or of common, that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [f"{fault.FILES[frame.filename]}:{frame.lineno}" for frame in frames
             if frame.filename in fault.FILES]
    return found[-1] if found else "a line"


def check(module, room, args):
    """Take the chapter's steps. Returns the Run. Raises Fault, or Untold."""
    train = module.VARIANTS[args.variant]
    train = train[0] if isinstance(train, tuple) else train
    fault.FILES.clear()
    fault.FILES.update({module.__file__: f"{module.__name__}.py", common.__file__: "common.py"})
    with (mock.patch.dict(os.environ, fakes.place(args.rank, args.ranks)),
          mock.patch.object(sys, "excepthook", sys.excepthook),     # which a group replaces
          fakes.cluster("cpu")):
        run = Run(args, room, module)
        try:
            with run.hooks():
                train(run)
        except (Fault, Untold):
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise Untold(f"{line_of(error)} asks a tensor for its value") from error
        except Exception as error:
            words = f"{type(error).__name__}: {error}".split("\n")[0]
            raise Untold(f"{line_of(error)} raises {words}") from error
        finally:
            run.stack.close()
    return run
