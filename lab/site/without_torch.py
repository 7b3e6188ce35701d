"""Names of torch and numpy, for a browser, which has neither.

The chapters import torch at their top. Their formulas and schedules never call it, so they run with
names only: `torch.float32` is one, and `class Block(nn.Module)` makes another.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

LIBRARIES = "torch", "numpy"


class Name(type):
    """A class, so that a chapter's can inherit from it. Its attributes are names, too."""

    def __getattr__(cls, name):
        return make_name(f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *args, **kwargs):
        raise RuntimeError(f"{cls.__qualname__} was called, and there is no torch here to compute")


def make_name(path, name):
    if name.startswith("__"):                           # what Python asks of every object
        raise AttributeError(name)
    return Name(name, (), {"__qualname__": path})


class Library(ModuleType):
    def __getattr__(self, name):
        return make_name(f"{self.__name__}.{name}", name)


class Finder:
    """Finds a Library for each import of torch or numpy, or of a part of them."""

    def find_spec(self, name, path=None, target=None):
        is_library = name.split(".")[0] in LIBRARIES
        return ModuleSpec(name, self, is_package=True) if is_library else None

    def create_module(self, spec):
        return Library(spec.name)

    def exec_module(self, module):
        """Nothing is executed."""


def install():
    """From now on, imports find names."""
    sys.meta_path.insert(0, Finder())
