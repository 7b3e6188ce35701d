"""What students have handed in: their folders, and their files, whatever is in them."""

import ast
import os
import re
import shlex
import tokenize
import warnings
from pathlib import Path
from typing import NamedTuple

from common import Refused
from lab.classroom import holes

LARGEST = 10**6         # bytes of a student's file


class Unreadable(Exception):
    """Why a file cannot be graded, in a few words; and the SyntaxError, if it is one."""


class NotThere(Unreadable):
    """There is no file."""


class File(NamedTuple):
    """A student's file. text: without the functions that are no Python. faults: {their names: what
    is wrong}."""
    chapter: str
    folder: Path
    text: str
    tree: ast.Module
    faults: dict


def read(folder, chapter):
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
    return File(chapter, folder, *without_faults(text))


def parse(text):
    try:
        with holes.ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")             # of a "\d" in a string, say
            tree = ast.parse(text)
            compile(tree, "", "exec", dont_inherit=True)        # it finds more
            return tree
    except SyntaxError as error:
        raise Unreadable(f"line {error.lineno}: {error.msg}", error) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"cannot be parsed: {error}") from None


def without_faults(text):
    """The text without the functions that are no Python, its tree, and {their names: what is
    wrong}. Raises Unreadable where more is wrong than functions."""
    lines, faults = text.split("\n"), {}
    while True:
        text = "\n".join(lines)
        try:
            return text, parse(text), faults
        except Unreadable as why:
            message, *errors = why.args
            where = [re.search(r" on line (\d+)", error.msg) for error in errors]
            line = int(where[0][1]) if any(where) else errors[0].lineno if errors else None
            name, first, last = function_around(lines, line)
            if name is None or name in faults:
                raise Unreadable(next(iter(faults.values()), message)) from None
            indent = re.match(r"\s*", lines[first - 1])[0]
            lines[first - 1 : last] = [stub(lines[first - 1 : last], name, indent)]
            lines[first:first] = [""] * (last - first)
            faults[name] = message


def stub(lines, name, indent):
    """What stands in place of a definition, so that its name is there."""
    name = name.split(".")[-1]
    is_class = any(line.startswith(f"{indent}class {name}") for line in lines)
    what = f"class {name}" if is_class else f"def {name}(*args, **more)"
    return f"{indent}{what}: raise NotImplementedError"


def function_around(lines, line):
    """The name, first and last line of the method, function or class in which a line is, by the
    looks of it, since it cannot be parsed. Nones: there is none."""
    outer, name = definition_above(lines, line, "")
    if not outer:
        return None, None, None
    found = [(name, outer)]
    if lines[outer - 1].startswith("class"):
        indents = [re.match(r"(\s+)def ", text) for text in lines[outer:line]]
        indent = next((match[1] for match in indents if match), None)
        method, its_name = definition_above(lines, line, indent) if indent else (None, None)
        if method:
            found.insert(0, (f"{name}.{its_name}", method))
    for name, first in found:
        indent = re.match(r"\s*", lines[first - 1])[0]
        after = (number for number in range(first, len(lines))
                 if re.match(rf"\s{{0,{len(indent)}}}[^\s)\]}}#]", lines[number]))
        last = next(after, len(lines))
        if line <= last:
            while first > 1 and lines[first - 2].startswith(f"{indent}@"):
                first -= 1
            return name, first, last
    return None, None, None


def definition_above(lines, line, indent):
    """The number of the last line up to this one that begins a definition, so far indented, and its
    name. Nones: there is none."""
    for number in range(line or 0, 0, -1):
        match = re.match(rf"{indent}(?:def|class)\s+(\w+)", lines[number - 1])
        if match:
            return number, match[1]
    return None, None


# ------------------------------------------------------------------------------------ their folders

def students_in(folder):
    """{name: folder} of the students: of one whose chapters lie in the folder, or of all that have
    a folder in it. Raises Refused if there are none."""
    from lab.classroom.exercises import EXERCISES

    has_chapters = lambda path: any(os.path.exists(path / f"{chapter}.py") for chapter in EXERCISES)
    writes = f"`python -m lab.exercises --write {shlex.quote(str(folder))}` writes them there"
    try:
        folders = {path.name: where_chapters_lie(path) for path in sorted(folder.iterdir())
                   if os.path.isdir(path) and not path.name.startswith(".")}
    except FileNotFoundError:
        raise Refused(f"FOLDER {str(folder)!r} is not there; {writes}") from None
    except OSError as error:
        beside = folder.parent
        works = str(beside) if has_chapters(where_chapters_lie(beside)) else "exercises/"
        raise Refused(f"FOLDER {str(folder)!r}: {error.strerror}; {works} would work" + (
                      ", after `make exercises`" * (works == "exercises/"))) from None
    if has_chapters(where_chapters_lie(folder)):
        return {folder.resolve().name: where_chapters_lie(folder)}
    if not any(map(has_chapters, folders.values())):
        raise Refused(f"FOLDER {str(folder)!r} has no exercise such as 04_tensor_parallel.py, nor "
                      f"has a folder in it; {writes}")
    return folders


def where_chapters_lie(folder):
    """Of a student. Where the folder is a copy of the course, its own chapters are the solution;
    in what `make bundle` writes they are the student's."""
    if os.path.exists(folder / "lab" / "classroom" / "answers.json"):
        return folder
    is_course = os.path.exists(folder / "lab" / "exercises.py")
    return folder / "exercises" if is_course or os.path.isdir(folder / "exercises") else folder
