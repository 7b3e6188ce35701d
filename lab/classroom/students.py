"""What students have handed in: their folders, and their files, whatever is in them."""

import ast
import os
import shlex
import tokenize
from pathlib import Path
from typing import NamedTuple

from common import Refused
from lab.classroom import exercises

LARGEST = 10**6         # bytes of a student's file


class Unreadable(Exception):
    """Why a file cannot be graded, in a few words."""


class NotThere(Unreadable):
    """There is no file."""


class File(NamedTuple):
    """A student's file. folder: from which it may import."""
    chapter: str
    folder: Path
    text: str
    tree: ast.Module


def read(folder, chapter):
    """The File of a chapter in a student's folder; raises Unreadable."""
    path = folder / f"{chapter}.py"
    try:
        if not path.exists():
            raise NotThere("is not there")
        if not path.is_file():                          # to open a pipe would take for ever
            raise Unreadable("is no file")
        if path.stat().st_size > LARGEST:
            raise Unreadable(f"is larger than {LARGEST:,} bytes")
        with tokenize.open(path) as file:
            text = file.read()
    except (SyntaxError, UnicodeDecodeError, LookupError):      # the last: of `# coding: rot13`
        raise Unreadable("is no text in UTF-8") from None
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    return File(chapter, folder, text, parse(text))


def parse(text):
    """The tree of a file; raises Unreadable, with the line that is no Python."""
    try:
        tree = ast.parse(text)
        compile(tree, "", "exec", dont_inherit=True)    # it finds more
        return tree
    except SyntaxError as error:
        raise Unreadable(f"line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"cannot be parsed: {error}") from None


def students_in(folder):
    """{name: folder} of the students: of one whose chapters lie in the folder, or of all that have
    a folder in it. Raises Refused if there are none."""
    writes = f"`python -m lab.exercises --write {shlex.quote(str(folder))}` writes them there"
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise Refused(f"FOLDER {str(folder)!r}: {error.strerror}", "exercises/") from None
    own = where_chapters_lie(folder)
    if has_chapters(own):
        return {folder.resolve().name: own}
    folders = {path.name: where_chapters_lie(path) for path in inside
               if os.path.isdir(path) and not path.name.startswith(".")}
    if not any(map(has_chapters, folders.values())):
        raise Refused(f"FOLDER {str(folder)!r} has no exercise such as 04_tensor_parallel.py, nor "
                      f"has a folder in it; {writes}")
    return folders


def has_chapters(folder):
    """Whether a file that is graded lies in it."""
    return any(os.path.exists(folder / f"{chapter}.py") for chapter in exercises.EXERCISES)


def where_chapters_lie(folder):
    """Of a student. Where the folder is a copy of the course, its own chapters are the solution;
    in what `make bundle` writes they are the student's."""
    if os.path.exists(folder / "lab" / "classroom" / "answers.json"):
        return folder
    is_course = os.path.exists(folder / "lab" / "exercises.py")
    return folder / "exercises" if is_course or os.path.isdir(folder / "exercises") else folder
