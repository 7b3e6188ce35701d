"""The rooms: what belongs to one chapter and to nothing else lies in one folder, NN/.

    exercises.py      EXERCISES: what students write, with questions, hints and checks;
                      BESIDE: {another file: its exercises}
    predictions.py    predictions(pick), what lab.predict asks: a run, and five questions about it
    figure.py         draw(runs), what lab.pictures draws of the JSON of runs whose "chapter" is OF,
                      and of those that are BESIDE them; OF = None: draw(), for lab.texts
    exhibits.py       EXHIBITS: the museum's silent bugs
    about.py          what lab/ knows of it:
        TOUR              its runs in the tour, Stops of lab/run/stop.py
        LIMITS            {flag: (its lowest value, the first too high, one that would work)}
        rounding(args)    what a run rounds to: a --dtype, or a key of lab/run/verify.py's LOSSY
        TRAINS            False: it trains no model
        PLAYS             {how a paragraph of its lesson begins: (the tool that is mounted below
                          it, of lab/site/tools.py, {name: value} of what it begins with)}
        FILES             {file that is read beside the chapters: its figure, or None}

`kernels` and `checkpoints` are rooms as well. A room has what it needs, and no other room imports
it: the rest of lab/ finds it here.
"""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path

from lab import ROOT

NAMES = sorted(path.stem for path in ROOT.glob("[0-9][0-9]_*.py"))      # "00_collectives", ...
ROOMS = [*(name[:2] for name in NAMES), "kernels", "checkpoints"]
HERE = Path(__file__).parent


def name_of(number):
    """Of a chapter: "04" to "04_tensor_parallel"."""
    [name] = [name for name in NAMES if name.startswith(f"{number}_")]
    return name


@functools.cache
def chapter(number):
    """The module of a chapter, "04": loaded once, by its name, as it stands beside lab/, whatever a
    student has written of it elsewhere."""
    name = name_of(number)
    path = ROOT / f"{name}.py"
    known = sys.modules.get(name)
    if known is not None and Path(known.__file__).resolve() == path:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def kernel(name):
    """The module of a file of kernels/, "matmul"."""
    return importlib.import_module(f"kernels.{name}")


def rooms_with(what):
    """{room: its module} of the rooms that have a file of this name: "exercises", "figure", ..."""
    return {room: importlib.import_module(f"lab.chapters.{room}.{what}")
            for room in ROOMS if (HERE / room / f"{what}.py").exists()}


def said(name, what, otherwise):
    """What the about.py of a chapter, "03_zero", says under a name, or `otherwise`."""
    if name not in NAMES or not (HERE / name[:2] / "about.py").exists():
        return otherwise
    return getattr(importlib.import_module(f"lab.chapters.{name[:2]}.about"), what, otherwise)


def trains(name):
    """Whether a chapter trains a model."""
    return said(name, "TRAINS", True)
