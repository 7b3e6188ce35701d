"""The five texts on the page: what they say that doesn't hold, and where their numbers differ."""

import re
from typing import NamedTuple

from markupsafe import Markup, escape

from lab.texts import SOURCES, shown, shown_range, shown_ratio
from lab.texts.claims import CONTRADICTIONS, DIFFERENCES


class Line(NamedTuple):
    """A row, as the page shows it."""

    anchor: str
    where: str
    what: str
    claimed: str
    ours: str
    ratio: str
    by: str
    why: str


def anchors(places):
    """An id for each of these places of a text, such as "8.3" or "table 2": the second one of a
    place ends in .2, as no other place does, and so on."""
    seen, ids = {}, []
    for place in places:
        name = "at-" + re.sub(r"\W+", "-", place.lower()).strip("-")
        seen[name] = seen.get(name, 0) + 1
        ids.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return ids


def contradictions():
    """[(anchor, entry, the text's number, ours)], in words."""
    ids = anchors(f"{entry.source} {entry.where}" for entry in CONTRADICTIONS)
    return [(anchor, entry, shown(entry.claimed, entry.unit), shown(entry.ours(), entry.unit))
            for anchor, entry in zip(ids, CONTRADICTIONS)]


def anchors_of_rows(source):
    return anchors(f"row {source.number} {row.where}" for row in DIFFERENCES[source.number])


def lines_of(source):
    """The rows of a text that differ, computed."""
    lines = []
    for anchor, row in zip(anchors_of_rows(source), DIFFERENCES[source.number]):
        ours = row.ours()
        lines.append(Line(anchor, row.where, row.what, shown_range(row.claimed, row.to, row.unit),
                          shown(ours, row.unit), shown_ratio(ours, row.nearest(ours)), row.by,
                          row.why))
    return lines


def linked(by, sources):
    """The functions that give a number, "03_zero.held", as HTML: a function of a file that is read
    here leads there. sources: {file: its Source}."""
    parts = []
    for name in by.split(", ") if by else ():
        file, _, function = name.rpartition(".")
        place = sources[file].place(function) if file in sources else None
        code = escape(name)
        parts.append(Markup('<code><a href="{}">{}</a></code>').format(place, code) if place
                     else Markup("<code>{}</code>").format(code))
    return Markup(", ").join(parts)


def search():
    """Entries of what search looks through: rows that differ, and what doesn't hold."""
    entries = []
    for source in SOURCES:
        rows = DIFFERENCES[source.number]
        entries += [[f"{source.name} {row.where} · {row.what}", f"texts.html#{anchor}",
                     f"{row.by}\n{row.why}"]
                    for anchor, row in zip(anchors_of_rows(source), rows)]
    ids = anchors(f"{entry.source} {entry.where}" for entry in CONTRADICTIONS)
    entries += [[f"does not hold · {entry.says}", f"texts.html#{anchor}",
                 f"{entry.holds}\n{entry.derivation}"]
                for anchor, entry in zip(ids, CONTRADICTIONS)]
    return entries
