"""Names of torch and numpy, for a browser, which has neither.

The chapters import torch at their top. Their formulas and schedules never call it, so that they run
with names alone: `torch.float32` is one, and `class Block(nn.Module)` makes another. Whoever calls
a name, and so wants to compute, is told that there is no torch.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

LIBRARIES = "torch", "numpy"


class Name(type):
    """A class, so that it can be inherited from. Its attributes are names, too."""

    def __getattr__(cls, name):
        return named(f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *args, **kwargs):
        raise RuntimeError(f"{cls.__qualname__} was called, and there is no torch here to compute")


def named(path, name):
    if name.startswith("__"):                           # what Python asks of every object
        raise AttributeError(name)
    return Name(name, (), {"__qualname__": path})


class Library(ModuleType):
    """A module whose attributes are names."""

    def __getattr__(self, name):
        return named(f"{self.__name__}.{name}", name)


class Finder:
    """Finds such a module for each import of a library, or of a part of it."""

    def find_spec(self, name, path=None, target=None):
        is_ours = name.split(".")[0] in LIBRARIES
        return ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec):
        return Library(spec.name)

    def exec_module(self, module):
        pass


def install():
    """From now on, imports find names."""
    sys.meta_path.insert(0, Finder())
