"""The pages of the course, as Markdown. Those in files/ are templates: what can be computed is
computed when the pages are written, into pages/, and a test holds the written ones to it."""

import functools
from pathlib import Path

import jinja2

from lab import ROOT
from lab.classroom.exercises import EXERCISES, short
from lab.course import answers, drawn, midterm, project, slides, times, week
from lab.course.weeks import WEEKS
from lab.page import glossary, markdown
from lab.sources import SOURCES

FILES = Path(__file__).parent / "files"
FOLDER = ROOT / "pages"
TITLES = {source.name: source.title.partition(" (")[0].partition(":")[0] for source in SOURCES}


@functools.cache
def templates():
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(FILES), trim_blocks=True,
                              lstrip_blocks=True, keep_trailing_newline=True,
                              undefined=jinja2.StrictUndefined)
    made.filters |= {"code": code, "text": slides.as_text, "hours": times.in_hours,
                     "minutes": times.of_exercise, "reads": times.of_file, "calls": times.calls,
                     "level": level, "linked": linked, "what": what,
                     "anchor": markdown.anchor_of, "named": named}
    return made


def names():
    """The pages that are computed, "course.md" and others."""
    return sorted(path.relative_to(FILES).as_posix() for path in FILES.rglob("*.md"))


def make(name):
    """The text of a page."""
    return templates().get_template(name).render(
        weeks=WEEKS, times=times, drawn=drawn, midterm=midterm, project=project, week=week,
        glossary=glossary, table=week.TABLE, chapters=EXERCISES, short=short, titles=TITLES,
        wrong=answers.read(), up="../" * (1 + name.count("/")), levels=levels, home=home,
        headline=headline)


def write(folder=FOLDER):
    """Write all. Returns their files."""
    written = []
    for name in names():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(name), encoding="utf-8")
        written.append(path)
    return written


def levels():
    """{level: (how many exercises, the fewest minutes, the most)}."""
    found = {}
    for level in times.BEFORE:
        minutes = [times.of_exercise(number) for number, (_, exercise) in week.TABLE.items()
                   if exercise.level == level]
        found[level] = len(minutes), min(minutes), max(minutes)
    return found


def home(files):
    """{file: its entries of the notation that are defined there} of the glossary."""
    found = {}
    for entry in files:
        found.setdefault(entry.at.split()[0], []).append(entry)
    return found


# ------------------------------------------------------------------------------------------- words

def code(words):
    """As code in a line, whatever is in it."""
    words = " ⏎ ".join(line.strip() for line in words.strip().split("\n")) or " "
    fence = "``" if "`" in words else "`"
    return f"{fence}{words}{fence}" if fence == "`" else f"{fence} {words} {fence}"


def linked(name, up):
    """A file of the course, by its name without .py."""
    return f"[{name}.py]({up}{name}.py)"


def named(file):
    """"04" to "Chapter 04"."""
    return f"Chapter {file}" if file.isdigit() else file


def headline(one):
    """Of a week."""
    return f"Week {one.number}: {one.title}"


def level(number):
    return week.TABLE[number][1].level


def what(number):
    """What an exercise asks for, in words."""
    return slides.as_text(week.TABLE[number][1].what)
