"""Slides of the weeks' lectures: Markdown, of which Marp makes slides, and pandoc as well.

    npx @marp-team/marp-cli --allow-local-files slides/week-04.md
    pandoc --to revealjs --standalone --slide-level 2 slides/week-04.md --output week-04.html

A slide is a Point of the week's outline. What it says is a piece of a chapter's lesson, as it
stands there; its numbers are computed when it is written; and its figure is a chapter's, the
upper part of one that is tall. So a slide says what the course says on that day.
"""

import ast
import functools
import re

from PIL import Image

from lab import ROOT
from lab.course import drawn, times
from lab.page.typeset import blocks, joined, parted
from lab.sources import lecture, texts
from lab.sources.asked import QUESTIONS

TALL = 0.62             # of the width: what is higher than that is cut
HEAD = """---
marp: true
theme: default
paginate: true
headingDivider: 2
title: "Fivefold, week {number}: {title}"
style: |
  section {{ font-size: 26px; }}
  section img {{ display: block; margin: auto; max-width: 100%; max-height: 500px; }}
  section pre {{ font-size: 18px; }}
---

# {title}

Week {number} of ten · {reads}
"""


def make(week):
    """The slides of a week, as Markdown. figures/ lies beside it."""
    reads = ", ".join(f"`{name}.py`" for name in week.reads)
    parts = [HEAD.format(number=week.number, title=week.title, reads=reads)]
    parts += [f"## {point.title}\n\n{body(point)}\n" for point in week.outline]
    return "\n".join([*parts, next_steps(week)])


def write(weeks, folder):
    """Write them, with their figures. Returns the files."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    written = []
    for week in weeks:
        path = folder / f"week-{week.number:02}.md"
        path.write_text(make(week), encoding="utf-8")
        written.append(path)
        for point in week.outline:
            if point.figure:
                shown(point.figure).save(folder / f"figures/{point.figure}.png")
    return written


def body(point):
    """What a slide has below its title."""
    if point.figure:
        return (f"![{point.title}](figures/{point.figure}.png)\n\n"
                f"`{drawn.by(point.figure)}` draws all of it.")
    if point.question:
        return of_question(point.question)
    return "\n\n".join(piece(point.lesson, begin) for begin in point.begins)


def next_steps(week):
    """The last slide: what a student does until the next lecture."""
    minutes = times.of_week(week)
    return "\n".join([
        "## Until next week", "",
        f"- before anything runs: `{week.prediction}`",
        f"- exercises {', '.join(week.required)}: about {times.in_hours(minutes['exercises'])}",
        f"- a bug to find: `{week.hunt.command}`",
        f"- all of it, with reading: about {times.in_hours(sum(minutes.values()))}", ""])


# ------------------------------------------------------------------------------------- of a lesson

@functools.cache
def pieces(name):
    """A file's docstring: [(whether it is indented, its lines)], with what is indented in parts
    where blank lines divide it."""
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    found = []
    for indented, lines in blocks(ast.get_docstring(tree).splitlines()):
        parts = parted(lines) if indented else [lines]
        found += [(indented, part) for part in parts]
    return found


def entries(lines):
    """The entries of a list: each goes on in lines that are indented further than its first."""
    edge = min(len(line) - len(line.lstrip()) for line in lines)
    found = []
    for line in lines:
        if line[edge] != " ":
            found.append([])
        found[-1].append(line)
    return found


def piece(name, begin):
    """Of a lesson, as Markdown, the paragraph or picture that begins so; "- Sum.": the entry of a
    list that begins with "Sum.". Raises LookupError if there is none."""
    wanted = begin.removeprefix("- ")
    for indented, lines in pieces(name):
        parts = entries(lines) if indented and begin != wanted else [lines]
        for part in parts:
            if " ".join(joined(part).split()).startswith(wanted):
                return in_markdown(part) if indented and begin == wanted else as_entry(part)
    raise LookupError(f"nothing in the lesson of {name} begins with {begin!r}")


def in_markdown(lines):
    """A picture, as it stands."""
    edge = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(["```text", *(line[edge:] for line in lines), "```"])


def as_entry(lines):
    """A paragraph; or an entry of a list, with its name."""
    name, *more = re.split(r" {2,}", lines[0].strip(), maxsplit=1)
    if not more:
        return as_text(joined(lines))
    return f"**{as_text(name)}** {as_text(joined([*more, *lines[1:]]))}"


def as_text(words):
    """Words of a docstring, of which Markdown shall make nothing but `code` and *emphasis*."""
    parts = words.split("`")
    parts[::2] = [escaped(part) for part in parts[::2]]
    return "`".join(parts)


def escaped(words):
    """Signs of Markdown as signs; an underscore inside of a name is none."""
    found = re.sub(r"[\\*\[\]<>|$]|(?<!\w)_|_(?!\w)|^#", r"\\\g<0>", words)
    return re.sub(r"(?<![\w*])\\\*(\w[\w ]*)\\\*(?![\w*])", r"*\1*", found)


# ----------------------------------------------------------------------------- numbers and figures

def of_question(number):
    """The numbers that answer a question, computed now."""
    [asked] = [one for one in (*QUESTIONS, *lecture.QUESTIONS) if one.number == number]
    rows = [f"| {as_text(row.what)} | {texts.shown(row.ours(), row.unit)} |" for row in asked.rows]
    return "\n".join([as_text(asked.question), "", "| | |", "| --- | --- |", *rows, "",
                      f"`python -m lab.questions {number}` says why."])


def shown(figure):
    """Its picture: of one that is tall the upper part, which is read from afar."""
    with Image.open(drawn.file_of(figure)) as image:
        height = min(image.height, round(image.width * TALL))
        return image.convert("RGB").crop((0, 0, image.width, height))
