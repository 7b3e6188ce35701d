"""Predictions on paper: a sheet with questions for a student to fill in, and its marks.

A sheet says which chapter and seed it asks, and whose name has drawn the seed. Nothing of it is
believed but the answers: the questions are drawn anew. So a sheet that asks something else than all
were asked (`--mark class 04 --seed 7`), or whose seed is not that of its name, has none right.
"""

import contextlib
import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

from common import Refused
from lab.chapters import NAMES, name_of
from lab.classroom import predict, questions
from lab.run import refusals

LARGEST = 10**6         # bytes of a sheet
FIRST = re.compile(r"^Sheet: chapter (\d\d), seed (\d{1,10})(?:, for (.+))?$", re.MULTILINE)
ANSWER = re.compile(r"^ *Answer (\d{1,2}): *(.*)$", re.MULTILINE)


class Sheet(NamedTuple):
    """chapter: "04". student: whose name has drawn the seed, or None. answers: {1: a text}."""
    chapter: str
    seed: int
    student: str | None
    answers: dict


# -------------------------------------------------------------------------------------- to write it

def write(path, case, asked, seed, student):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = as_json if path.suffix == ".json" else as_markdown
    path.write_text(text(case, asked, seed, student), encoding="utf-8")


def as_markdown(case, asked, seed, student):
    named = f", for {student}" if student else ""
    parts = [f"# Predictions: {case.name.replace('_', ' ')}",
             f"Sheet: chapter {case.name[:2]}, seed {seed}{named}", predict.HOW,
             f"The run that all questions are about:\n\n    {case.command}"]
    for i, question in enumerate(asked, start=1):
        parts += [f"## Question {i}\n\n{predict.wrapped(question.text.split())}\n\n"
                  f"{predict.given(question, case.sizes)}", f"Answer {i}: "]
    return "\n\n".join(parts) + "\n"


def as_json(case, asked, seed, student):
    these = [{"number": i, "question": question.text,
              "given": predict.given(question, case.sizes).strip(), "answer": ""}
             for i, question in enumerate(asked, start=1)]
    sheet = {"chapter": case.name[:2], "seed": seed, "for": student, "how": predict.HOW,
             "run": case.command, "questions": these}
    return json.dumps(sheet, indent=1, ensure_ascii=False) + "\n"


# --------------------------------------------------------------------------------------- to mark it

def sheets_in(text):
    """[(student, path)] of a file, of the files in a folder, or of its students' folders: of what
    ends in .md or .json. Raises Refused where there is none."""
    path, found = Path(text), []
    with contextlib.suppress(OSError):
        if text and path.is_file() and read(path):
            found = [(path.stem, path)]
        elif text and path.is_dir():
            files = [*path.glob("*"), *path.glob("[!.]*/*")]
            found = [(file.stem if file.parent == path else file.parent.name, file)
                     for file in files if file.suffix in (".md", ".json") and file.is_file()]
    if not found:
        raise Refused(f"--mark: {text!r} is no sheet such as sheet.md, and no folder of such; "
                      "`python -m lab.predict 04 --export sheet.md` writes one")
    return sorted(found)


def read(path):
    """The Sheet of a file; None: it is none."""
    try:
        if path.stat().st_size > LARGEST:
            return None
        text = path.read_text(encoding="utf-8")
        chapter, seed, student, answers = (
            of_json(json.loads(text)) if path.suffix == ".json" else of_markdown(text))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    is_there = chapter in {name[:2] for name in NAMES} and 0 <= seed < predict.SEEDS
    return Sheet(chapter, seed, student, answers) if is_there else None


def of_markdown(text):
    chapter, seed, student = FIRST.search(text).groups()
    return chapter, int(seed), student, {int(i): line for i, line in ANSWER.findall(text)}


def of_json(sheet):
    chapter, seed, student = sheet["chapter"], sheet["seed"], sheet["for"]
    if type(seed) is not int or not isinstance(student, str | None):
        raise TypeError
    return chapter, seed, student, {question["number"]: str(question["answer"])
                                    for question in sheet["questions"]}


@functools.lru_cache
def asked_by(chapter, seed):
    _, asked = questions.questions(name_of(chapter), seed)
    return asked


def is_as_asked(sheet, chapter, seed, student=None):
    """chapter, seed: what all were asked; None: anything. student: who hands it in, of a class; so
    it is that student's own sheet, or the one of all."""
    if chapter not in (None, sheet.chapter):
        return False
    if sheet.student is None:
        return seed == sheet.seed or seed is None and student is None
    is_own = student is None or " ".join(student.split()).casefold() == sheet.student
    return (is_own and seed is None
            and sheet.seed == predict.seed_of(sheet.student, sheet.chapter))


def right_in(sheet):
    """How many of its answers are right, and of how many."""
    asked, right = asked_by(sheet.chapter, sheet.seed), 0
    for i, question in enumerate(asked, start=1):
        try:
            value = predict.understood(sheet.answers.get(i, ""), question.unit)
            right += predict.is_right(value, question)
        except ValueError:                              # it says no number
            pass
    return right, len(asked)


def mark(found, chapter, seed, to):
    """Print a line for each sheet. to: a JSON file, or None."""
    marks, width = [], max(len(refusals.one_line(student)) for student, _ in found)
    is_class = len(found) > 1
    for student, path in found:
        student, sheet = refusals.one_line(student), read(path)
        if sheet is None:
            print(f"{student:{width}}  {refusals.one_line(path.name)} is no sheet")
            continue
        owner = student if is_class else None
        is_fair = is_as_asked(sheet, chapter and chapter[:2], seed, owner)
        right, count = right_in(sheet) if is_fair else (0, 5)
        named = f", for {refusals.one_line(sheet.student)}" if sheet.student else ""
        print(f"{student:{width}}  {right} of {count}  chapter {sheet.chapter}, seed {sheet.seed}"
              f"{named}{'' if is_fair else ': that was not asked'}")
        marks.append({"student": student, "chapter": sheet.chapter, "seed": sheet.seed,
                      "right": right, "of": count})
    if to:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(json.dumps(marks, indent=1) + "\n", encoding="utf-8")
    return 0
