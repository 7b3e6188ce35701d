"""Draws the chapters' figures from the JSON of their runs.

    python -m lab.pictures runs/*.json [--out FOLDER]       one PNG for each chapter that is there

What a figure compares comes from several runs: the variants of a chapter, or chapter 04 beside 05.
What it shows is said in the figure.py of the chapter's room; of lab.scaling's, in lab/scaled.py.

Exit status: 0: all is drawn. 1: not all, since a run stopped before it was measured, or there is no
figure of it, or no room for one. 2: a file holds no run, or what none of our runs has recorded. A
line says which; the other figures are drawn, unless a file cannot be read at all.
"""

import warnings

from lab import scaled
from lab.chapters import rooms_with
from lab.drawing import runs_of, save
from lab.run import commands
from lab.run.refusals import one_line, say
from lab.run.runs import arguments, files_of, in_words, read_runs, was_measured

# {what a run's JSON calls its chapter: the room's figure.py}; lab.texts draws that of no run
FIGURES = {figure.OF: figure for figure in (*rooms_with("figure").values(), scaled) if figure.OF}


def draw(runs, chapter, path):
    """Draw the figure of a chapter from JSON objects, of which it takes those that it compares."""
    save(FIGURES[chapter].draw(runs), path)


def draw_all(runs, folder):
    """The figure of each chapter that there are runs of. Returns the exit status."""
    drawn, status = [], 0
    for run in runs:
        if run["chapter"] not in FIGURES:
            status = tell(f"{run['file']}: there is no figure of {run['chapter']}", 1)
        elif not was_measured(run):
            stopped = ["the run stopped before it was measured", *run["problems"][:1]]
            status = tell(f"{run['file']} is not drawn: {': '.join(stopped)}", 1)
        else:
            drawn.append(run)
    for chapter in FIGURES:
        if runs_of(drawn, chapter):
            status = max(status, draw_one(drawn, chapter, folder / f"{chapter}.png"))
    return status


def draw_one(runs, chapter, path):
    """One figure, and its name; or a line that says why not. Returns the exit status."""
    try:
        with warnings.catch_warnings(action="ignore"):
            draw(runs, chapter, path)
    except (OSError, ImportError) as error:             # a full disk, no matplotlib
        return tell(f"{path} is not written: {error}", 1)
    except Exception as error:
        beside = getattr(FIGURES[chapter], "BESIDE", None)
        read = [run for run in runs if run["chapter"] in (chapter, beside)]
        return tell(f"{files_of(read)} cannot be drawn: {in_words(error)}", 2)
    print(one_line(str(path)), flush=True)
    return 0


def tell(why, status):
    """Say why something is not drawn. Returns the status."""
    say(why)
    return status


def main(argv=None):
    args = arguments("-m lab.pictures", __doc__, argv, lambda parser: parser.add_argument(
        "--out", type=commands.output("pictures"), default="runs", metavar="FOLDER",
        help="for the PNGs; default: runs"))
    runs = read_runs(args.runs)
    args.out.mkdir(parents=True, exist_ok=True)
    return draw_all(runs, args.out)


if __name__ == "__main__":
    commands.program(main)
