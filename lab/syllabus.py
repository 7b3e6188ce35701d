"""A course of ten weeks: what is read, predicted, solved, hunted and shown.

    python -m lab.syllabus                      the weeks, a line each
    python -m lab.syllabus 3                    one of them
    python -m lab.syllabus --pages pages        write pages/: the weeks, the midterm, the project,
                                                office hours, notation, levels and points
    python -m lab.syllabus --slides slides      write the slides of all weeks; with 3: of the third

The weeks are a table, lab/course/weeks.py. Hours are estimates, made of what is read and written:
lab/course/times.py. Slides are made of the chapters' lessons and figures, and their numbers are
computed when they are written. Marp or pandoc shows them: lab/course/slides.py says how.
"""

import sys
import textwrap
from pathlib import Path

from common import Refused
from lab.cli import commands, refusals
from lab.course import drawn, pages, slides, times
from lab.course.week import TABLE
from lab.course.weeks import WEEKS


def a_week(text):
    """An argparse type: a week, by its number."""
    for week in WEEKS:
        if text == str(week.number):
            return week
    raise Refused(f"there is no week {text!r}; there are 1 to {len(WEEKS)}", "1")


def parse(argv):
    parser = commands.Parser("-m lab.syllabus", description=__doc__)
    add = parser.add_argument
    add("week", nargs="?", type=a_week, metavar="WEEK", help="such as 3; default: all")
    add("--pages", type=commands.output("pages"), metavar="FOLDER", help="write the pages")
    add("--slides", type=commands.output("slides"), metavar="FOLDER", help="write slides")
    args = parser.parse_args(argv)
    if args.pages and args.slides:
        raise Refused("--pages and --slides are written one at a time", "without --pages")
    if args.pages and args.week:
        raise Refused(f"WEEK {args.week.number} means nothing beside --pages, which are of all",
                      f"without {args.week.number}")
    return args


# ---------------------------------------------------------------------------------- what is printed

def lines_of_all():
    for week in WEEKS:
        hours = times.in_hours(sum(times.of_week(week).values()))
        yield (f"{week.number:>2}  {week.title:<52}{len(week.required):>3} exercises, "
               f"{len(week.optional):>2} optional   {hours:>6}")
    yield ""
    yield "`python -m lab.syllabus 3` prints the third. pages/course.md has all of them."


def lines_of(week):
    minutes = times.of_week(week)
    yield f"week {week.number} · {week.title} · {times.in_hours(sum(minutes.values()))}"
    yield ", ".join(f"{what} {count} min" for what, count in minutes.items())
    yield wrapped("read", ", ".join(f"{name}.py" for name in week.reads))
    for text, places in week.texts.items():
        yield wrapped("beside it", f"{pages.TITLES[text]}: {', '.join(places)}")
    yield wrapped("predict", week.prediction)
    yield wrapped("hunt", week.hunt.command)
    yield wrapped("grade", f"python -m lab.grade class {' '.join(week.required)}")
    for said, those in (("required", week.required), ("optional", week.optional)):
        for number in those:
            exercise = TABLE[number][1]
            after = f"   calls {', '.join(times.calls(number))}" * bool(times.calls(number))
            yield (f"{said}  {number:<17}level {exercise.level} "
                   f"{times.of_exercise(number):>4} min   {exercise.what}{after}")
    for i, point in enumerate(week.outline, start=1):
        shows = f"   {drawn.by(point.figure)}" if point.figure else ""
        asks = f"   python -m lab.questions {point.question}" if point.question else ""
        yield f"{i:>8}. {point.title}{shows}{asks}"


def wrapped(said, words):
    return textwrap.fill(words, 100, initial_indent=f"{said:<10}", subsequent_indent=" " * 10)


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    if args.pages:
        return tell(pages.write(args.pages))
    if args.slides:
        return tell(slides.write([args.week] if args.week else WEEKS, args.slides))
    print("\n".join(lines_of(args.week) if args.week else lines_of_all()))
    return 0


def tell(written):
    for path in written:
        print(refusals.one_line(str(Path(path))))
    return 0


if __name__ == "__main__":
    commands.program(main)
