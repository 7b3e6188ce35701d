"""What the five texts behind the course say that doesn't hold, and where their numbers differ.

    python -m lab.texts                     contradictions, then the rows that differ
    python -m lab.texts 002                 those of one text: 000 to 004, or its name, megatron
    python -m lab.texts --contradictions    only contradictions
    python -m lab.texts --draw figures      draw playbook.png, planned beside measured, and
                                            10_planner.png

Each number of ours is computed now, by the function in brackets.
"""

import sys
import textwrap

from common import Refused
from lab.chapters import rooms_with
from lab.drawing import save
from lab.run import commands, refusals
from lab.texts import SOURCES, figure, shown, shown_range, shown_ratio
from lab.texts.claims import CONTRADICTIONS, DIFFERENCES

PICTURES = {"10_planner": rooms_with("figure")["10"].draw, "playbook": figure.draw}


def source_of(text):
    """An argparse type: a text by its number or its name. Raises Refused."""
    for source in SOURCES:
        if text.lower() in (source.number, source.name):
            return source
    raise Refused(f"there is no text {text!r}; there are "
                  + ", ".join(f"{source.number} ({source.name})" for source in SOURCES),
                  *(source.number for source in SOURCES))


def paragraph(text, indent):
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=" " * 5,
                         break_long_words=False, break_on_hyphens=False)


def print_contradictions(sources):
    for entry in CONTRADICTIONS:
        if entry.source in sources:
            claimed, ours = shown(entry.claimed, entry.unit), shown(entry.ours(), entry.unit)
            print(paragraph(f"{entry.source} {entry.where}: {entry.says}", ""))
            print(paragraph(f"told {claimed}, ours {ours}: {entry.holds} {entry.derivation} "
                            f"({entry.by})", " " * 5))


def print_differences(source):
    rows = DIFFERENCES[source.number]
    if rows:
        print(f"\n{source.number} · {source.title} {source.address}")
    for row in rows:
        ours = row.ours()
        print(paragraph(f"{row.where}: {row.what}", ""))
        print(paragraph(f"told {shown_range(row.claimed, row.to, row.unit)}, ours "
                        f"{shown(ours, row.unit)}, {shown_ratio(ours, row.nearest(ours))}: "
                        f"{row.why} ({row.by})", " " * 5))


def print_texts(sources, only_contradictions):
    print_contradictions([source.number for source in sources])
    for source in sources if not only_contradictions else ():
        print_differences(source)


def draw(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        save(picture(), folder / f"{name}.png", dpi=110)
        print(folder / f"{name}.png")


def main(argv=None):
    parser = commands.Parser("-m lab.texts", description=__doc__)
    parser.add_argument("text", nargs="?", type=source_of, help="default: all five")
    parser.add_argument("--contradictions", action="store_true", help="leave out the rows")
    parser.add_argument("--draw", type=commands.output("figures"), metavar="FOLDER",
                        help="draw the pictures, and print nothing else")
    args = refusals.accepted(parser.parse_args, sys.argv[1:] if argv is None else argv, alone=True)
    if args.draw:
        draw(args.draw)
    else:
        print_texts([args.text] if args.text else SOURCES, args.contradictions)
    return 0


if __name__ == "__main__":
    commands.program(main)
