"""The rooms: what belongs to one chapter and to nothing else lies in one folder, NN/.

    exercises.toml    what students write, with questions, hints and checks (the format is in
                      lab/classroom/exercise.py); NAME_exercises.toml: of a file of FILES
    checks.py         what the checks of the exercises call, if an expression isn't enough
    predictions.py    predictions(pick), what lab.predict asks: a run, and five questions about it
    figure.py         draw(runs), what lab.pictures draws of the JSON of runs whose "chapter" is OF,
                      and of those that are BESIDE them; OF = None: draw(), for lab.texts
    exhibits.toml     the museum's silent bugs (lab/museum/exhibit.py has the format)
    held.py           Held, what its runs are held to beside all others: see lab/run/instrument.py;
                      or Run, if they are no runs of a model
    about.py          what lab/ knows of it:
        LIMITS            {flag: (its lowest value, the first too high, one that would work)}
        rounding(args)    what a run rounds to: a --dtype, or a key of lab/run/verify.py's LOSSY
        TRAINS            False: it trains no model
        UNSAVED           variants that cannot be saved
        is_late(args)     whether gradients are those of weights that are a step old
        HELD              whose held.py a run is held to, if not its own alone
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
from types import SimpleNamespace

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
    return {name: room(name, what) for name in ROOMS if (HERE / name / f"{what}.py").exists()}


def room(number, what):
    """The module of a file in a room: room("00", "simulate")."""
    return importlib.import_module(f"lab.chapters.{number}.{what}")


def about(name):
    """The about.py of a chapter, "03_zero"; an empty one, if it has none."""
    is_there = name in NAMES and (HERE / name[:2] / "about.py").exists()
    return room(name[:2], "about") if is_there else SimpleNamespace()


def trains(name):
    """Whether a chapter trains a model."""
    return getattr(about(name), "TRAINS", True)


def held(number):
    """The held.py of a chapter, "06"."""
    return room(number, "held")


def instruments(args):
    """What a run is held to beside all others, for its chapter and for --optimizer muon."""
    number = args.chapter[:2]
    numbers = getattr(about(args.chapter), "HELD", (number,))
    if args.optimizer == "muon" and "11" not in numbers:
        numbers = (*numbers, "11")
    return [held(number).Held() for number in numbers if (HERE / number / "held.py").exists()]
