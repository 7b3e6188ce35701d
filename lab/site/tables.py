"""The five texts on the page: what they say that doesn't hold, and where their numbers differ."""

from markupsafe import Markup, escape

from lab.texts import SOURCES, shown, shown_range, shown_ratio
from lab.texts.claims import CONTRADICTIONS, DIFFERENCES


def contradictions():
    """[(entry, the text's number, ours)], in words."""
    return [(entry, shown(entry.claimed, entry.unit), shown(entry.ours(), entry.unit))
            for entry in CONTRADICTIONS]


def differences():
    """[(text, its rows)] for each text."""
    return [(source, [in_words(row) for row in DIFFERENCES[source.number]])
            for source in SOURCES]


def in_words(row):
    """(row, the text's number, ours, how far they differ) of a number that differs from ours."""
    ours = row.ours()
    return (row, shown_range(row.claimed, row.to, row.unit), shown(ours, row.unit),
            shown_ratio(ours, row.nearest(ours)))


def linked(by, sources):
    """The functions that give a number, "03_zero.held", as HTML: a function of a file that is read
    here leads there. sources: {file: its Source}."""
    parts = []
    for name in by.split(", ") if by else ():
        file, _, function = name.rpartition(".")
        place = sources[file].place(function) if file in sources else None
        code = escape(name)
        if place:
            code = Markup('<a href="{}">{}</a>').format(place, code)
        parts.append(Markup("<code>{}</code>").format(code))
    return Markup(", ").join(parts)
