"""One line for each run whose JSON is given.

    python -m lab.report runs/*.json

Exit status: 0, whatever the verdicts are; 2 for a file that holds no run, in a line that says why.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lab.run import commands
from lab.run.refusals import accepted, fail, one_line

HAVE = {                # what each run's JSON has; lab.faults leaves out more
    "chapter": str, "variant": str, "world_size": int, "config": dict, "recorded": dict,
    "problems": list, "checks": list}


# ------------------------------------------------------------------------------------ reading them

def read_runs(paths: Iterable[str]) -> list[dict]:
    """The JSON objects of runs, each with the name of its "file"; ends with status 2 and one line
    at the first file that holds something else."""
    runs = []
    for path in paths:
        try:
            if Path(path).exists() and not Path(path).is_file():    # a pipe would let us wait
                raise ValueError("it is no regular file")
            run = json.loads(Path(path).read_bytes(), parse_constant=finite, parse_float=finite)
            wrong = misfit(run)
        except OSError as error:
            wrong = error.strerror
        except (ValueError, RecursionError) as error:   # of JSON, or of its bytes
            wrong = str(error)
        if wrong:
            fail(f"{path or repr(path)} holds no run: {wrong}; what --json writes would work")
        runs.append(run | {"file": str(path)})
    return runs


def finite(text: str) -> float:
    """A number of the JSON. Raises ValueError for "NaN", or 1e999."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def misfit(run: object) -> str | None:
    """In words, what keeps this from being a run; None: nothing does."""
    if not isinstance(run, dict):
        return f"it is a {type(run).__name__}, not an object"
    for key, kind in HAVE.items():
        if not isinstance(run.get(key), kind):
            return f"it has no {key}" if key not in run else f"{key} is no {kind.__name__}"
    return None


def was_measured(run: dict) -> bool:
    """Whether a run of a chapter went on for long enough to be measured: one that came to a number
    that is not finite has stopped before. lab.faults writes what it measured."""
    is_of_a_chapter = {"loss", "device"} <= run.keys()
    return "timeline" in run["recorded"] or not is_of_a_chapter


# ------------------------------------------------------------------------------- what they come to

def summary(runs: list[dict]) -> Iterator[str]:
    """Yield a header, and one line for each run."""
    row = "{:<24}{:<16}{:>5}  {:<8}{:>11}{:>14}{:>8}{:>9}  {}"
    yield row.format("chapter", "variant", "ranks", "backend", "final loss", "from one GPU",
                     "checks", "seconds", "verdict")
    for run in runs:
        off = [run.get(f"max_{kind}_diff") for kind in ("loss", "grad", "param")]
        largest = "-" if None in off else f"{max(off):.0e}"
        checks = [check["ok"] for check in run["checks"] if check["ok"] is not None]
        yield row.format(run["chapter"], variant_of(run), run["world_size"],
                         run.get("backend", "-"), final_loss(run), largest,
                         f"{sum(checks)}/{len(checks)}",
                         f"{run['seconds']:.0f}" if "seconds" in run else "-", verdict(run))


def variant_of(run: dict) -> str:
    """The variant, and what else runs of one differ in."""
    more = []
    if "balance" in run["config"]:                      # chapter 08
        more.append(str(run["config"]["balance"]))
    if run.get("first_step"):                           # it has gone on
        more.append(f"from {run['first_step']}")
    return ", ".join([run["variant"], *more])


def final_loss(run):
    if not run.get("loss"):
        return "-"
    return "not finite" if run["loss"][-1] is None else f"{run['loss'][-1]:.4f}"


def verdict(run: dict) -> str:
    """✓, or ✗ and the first thing that is wrong, or - where nothing was compared."""
    wrong = run["problems"] + [check["name"] for check in run["checks"] if check["ok"] is False]
    nothing = not run["checks"] and run.get("max_loss_diff") is None
    if wrong:
        return f"✗ {wrong[0]}"
    return "-" if nothing else "✓"


# -------------------------------------------------------------------------------- the command line

def arguments(name: str, doc: str, argv: list[str] | None,
              more: Callable = lambda parser: None) -> argparse.Namespace:
    """Of a command that reads runs. more(parser): adds its own flags. Ends with status 2 for what
    does not fit."""
    parser = commands.Parser(name, description=doc)
    parser.add_argument("runs", nargs="+", help="what --json has written")
    more(parser)
    return accepted(parser.parse_args, sys.argv[1:] if argv is None else argv, alone=True)


def main(argv: list[str] | None = None) -> int:
    """Print the table of the runs that are named. Returns the exit status."""
    runs = read_runs(arguments("-m lab.report", __doc__, argv).runs)
    try:
        lines = list(summary(runs))
    except Exception as error:                          # what is recorded is no run's
        fail(f"{files_of(runs)} cannot be compared: {in_words(error)}")
    for line in lines:
        print(one_line(line))
    return 0


def files_of(runs: Iterable[dict]) -> str:
    """Their names, for a sentence."""
    return " or ".join(run["file"] for run in runs)


def in_words(error: Exception) -> str:
    """What stopped a comparison or a figure, on data that is not as a chapter records it."""
    if isinstance(error, KeyError):
        return f"it has no record of {error}"
    first, *_ = [*str(error).splitlines(), ""]
    return f"what is recorded is no run's ({type(error).__name__}: {first})"
