"""The five texts on the page: their rows as tables, the questions, and what does not hold."""

import re
import threading
from typing import NamedTuple

from markupsafe import Markup, escape

from lab.sources import SOURCES, lecture, texts
from lab.sources.asked import QUESTIONS as OF_TUTORIAL
from lab.sources.contradictions import CONTRADICTIONS

COMPUTING = threading.Lock()    # a row may count what PyTorch sends, once in a process at a time
QUESTIONS = (*OF_TUTORIAL, *lecture.QUESTIONS)


class Line(NamedTuple):
    """A row, as the page shows it."""

    anchor: str
    where: str
    what: str
    told: str
    ours: str
    verdict: str
    is_wrong: bool          # it differs, and does not say why
    by: str
    why: str


def page_of(source):
    return f"text-{source.number}.html"


def anchors(places):
    """An id for each of these places of a text, such as "8.3" or "table 2": the second one of a
    place ends in .2, as no other place does, and so on."""
    seen, found = {}, []
    for place in places:
        name = "at-" + re.sub(r"\W+", "-", place.lower()).strip("-")
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return found


def line(row, value, anchor=""):
    return Line(anchor, row.where, row.what, texts.told(row), texts.shown(value, row.unit),
                texts.verdict(row, value), texts.unexplained(row, value), row.by, row.why)


def lines_of(source):
    """Of all rows of a text, computed."""
    with COMPUTING:
        pairs = texts.values_of(source.number)
    ids = anchors(row.where for row, _ in pairs)
    return [line(row, value, anchor) for (row, value), anchor in zip(pairs, ids)]


def lines_of_question(question):
    with COMPUTING:
        return [line(row, row.ours()) for row in question.rows]


def contradictions():
    """[(anchor, entry, what is told, ours)], in words."""
    ids = anchors(f"{entry.source} {entry.where}" for entry in CONTRADICTIONS)
    with COMPUTING:
        return [(anchor, entry, texts.shown(entry.told, entry.unit),
                 texts.shown(entry.ours(), entry.unit))
                for anchor, entry in zip(ids, CONTRADICTIONS)]


def counts():
    """[(text, how many rows it has, and how much of it is left out)]."""
    modules = texts.MODULES
    return [(source, len(modules[source.number].ROWS), len(modules[source.number].LEFT_OUT))
            for source in SOURCES]


def linked(by, sources):
    """Who gives a number, "03_zero.held", as HTML: a function of a file that is read here leads
    there. sources: {file: its Source}."""
    parts = []
    for name in by.split(", ") if by else ():
        file, _, function = name.rpartition(".")
        place = sources[file].place(function) if file in sources else None
        shown = escape(name)
        parts.append(Markup('<code><a href="{}">{}</a></code>').format(place, shown) if place
                     else Markup("<code>{}</code>").format(shown))
    return Markup(", ").join(parts)


def search():
    """Entries of what search looks through: rows, questions, and what does not hold."""
    entries = []
    for source in SOURCES:
        rows = texts.MODULES[source.number].ROWS
        for row, anchor in zip(rows, anchors(row.where for row in rows)):
            told = f"told {texts.told(row)} · " if row.told is not None else ""
            entries.append([f"{source.name} {row.where} · {row.what}",
                            f"{page_of(source)}#{anchor}", f"{told}{row.by}\n{row.why}"])
    entries += [[f"question {one.number} · {one.question}", f"questions.html#question-{one.number}",
                 f"{one.why}\n{one.command}"] for one in QUESTIONS]
    ids = anchors(f"{entry.source} {entry.where}" for entry in CONTRADICTIONS)
    entries += [[f"does not hold · {entry.says}", f"contradictions.html#{anchor}",
                 f"{entry.holds}\n{entry.derivation}"]
                for anchor, entry in zip(ids, CONTRADICTIONS)]
    return entries
