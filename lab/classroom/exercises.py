"""The table of exercises, and the chapters with holes that are written from it.

An exercise is defined in one place, lab/chapters/NN/exercises.toml. What belongs into a hole
stands in the chapter itself.
"""

import difflib
import shlex
from pathlib import Path

from common import Refused
from lab import ROOT, chapters
from lab.classroom import holes
from lab.classroom.exercise import read
from lab.run import refusals

LEVELS = 1, 2, 3


def read_all():
    """{file without .py: its exercises}: of chapters, and of the files beside them."""
    paths = [chapters.HERE / room / "exercises.toml" for room in chapters.ROOMS]
    for room, about in chapters.rooms_with("about").items():
        names = [Path(file).name for file in getattr(about, "FILES", ())]
        paths += [chapters.HERE / room / f"{name}_exercises.toml" for name in names]
    try:
        return dict(read(path) for path in paths if path.exists())
    except ValueError as error:
        refusals.fail(str(error))


EXERCISES = read_all()


def solution(chapter):
    """The source of a chapter, as it is."""
    return (ROOT / f"{chapter}.py").read_text(encoding="utf-8")


def short(chapter):
    """What the numbers of a chapter's exercises begin with: "04", "layernorm"."""
    name = chapter.split("/")[-1]
    return name[:2] if name[0].isdigit() else name


def chosen(words, level=None):
    """{chapter: its exercises} that words such as "04", "04.2" and "layernorm" name; no words: all.
    level: only those of it. Raises Refused."""
    known = {name for chapter, exercises in EXERCISES.items()
             for name in (short(chapter), *(exercise.number for exercise in exercises))}
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, sorted(known), 1, 0)[0]
            raise Refused(f"there is no EXERCISE {word!r}; `python -m lab.exercises` lists all",
                          f"{near} in place of {shlex.quote(word)}")
    found = {}
    for chapter, exercises in EXERCISES.items():
        is_named = not words or short(chapter) in words
        these = [exercise for exercise in exercises
                 if (is_named or exercise.number in words) and level in (None, exercise.level)]
        if these:
            found[chapter] = these
    if not found:
        raise Refused(f"--level {level}: none of these exercises is of that level",
                      "without --level")
    return found


def with_holes(chapter, level=None):
    """The source of a chapter with a hole for every exercise, or for those of a level."""
    source = solution(chapter)
    for exercise in EXERCISES[chapter]:
        if level in (None, exercise.level):
            words = f"{exercise.number}, level {exercise.level}: {exercise.question}"
            for name in exercise.functions:
                source = holes.cut(source, name, words, f"{exercise.number}: {name}")
                words = f"{exercise.number}: see {exercise.functions[0]}"
    return source


def write(folder, level=None, force=False):
    """Write the chapters with holes, but without force not over a file that is there: somebody may
    have changed it. Returns the paths of those that stay."""
    kept = []
    for chapter in EXERCISES:
        path = folder / f"{chapter}.py"
        if path.exists() and not force:
            kept.append(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(with_holes(chapter, level), encoding="utf-8")
    return kept
