"""The tour: the course on this machine, chapter by chapter, then one table and the figures.

    python -m lab.tour                  all of it; `make tour`
    python -m lab.tour 02 06            these rooms of lab/chapters
    python -m lab.tour 02 --first       only the first run of each room; `make quick` is this one
    python -m lab.tour --figures        what figures/ is drawn from, on 8 ranks; `make figures`

Chapter 02 comes first. Each run is told as a reader types it; its ranks are forked from one
interpreter that has imported torch (lab/run/ranks.py), which saves seconds a run. A run
that fails is named, and the others go on. tour.toml lists the runs of each room.

Exit status: 0; 1 if a run has failed, or a figure; 2 for a word that is no room; 130 after Ctrl-C:
then what is done stays, and a line says what draws it.
"""

import difflib
import shlex
import shutil
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from lab import ROOT
from lab.run import commands, ranks, refusals

# Not torch, nor what imports it: the other interpreter does so while this one reads on.

STOPS = tomllib.loads(Path(__file__).with_name("tour.toml").read_text(encoding="utf-8"))
FIRST = "02"                            # what a reader sees first
LIMIT = 600                             # seconds; a run that takes longer hangs


# -------------------------------------------------------------------------------- what there is

class Stop(NamedTuple):
    """One command of tour.toml, which describes the fields. drawn_on: False, no figure shows it."""

    words: str
    what: str
    seconds: float
    name: str = ""
    ranks: int = 4
    drawn_on: int | bool = 8


def stops_of(room, figures=False):
    """The runs of a room; figures: those that figures/ shows, as it does."""
    stops = [Stop(**stop) for stop in STOPS[room]]
    if figures:
        stops = [stop._replace(ranks=stop.drawn_on) for stop in stops
                 if stop.drawn_on is not False]
    return stops


def rooms():
    """Those that have a run, in the order of the tour."""
    return sorted(STOPS, key=lambda room: room != FIRST)


def words_of(stop, folder):
    """What is typed, with its JSON in the folder."""
    words = shlex.split(stop.words)
    return [*words, f"--json={folder / stop.name}.json"] if stop.name else words


# -------------------------------------------------------------------------------- how it goes

def play(stop, words):
    """Run it, and print what it does. Returns its exit status; None: it had no end."""
    for word in words:                  # a checkpoint of an earlier tour would be gone on from
        if word.startswith("--save="):
            shutil.rmtree(ROOT / word.removeprefix("--save="), ignore_errors=True)
    print(f"\n# {stop.what}\n$ {ranks.typed(words, stop.ranks)}", flush=True)
    started = ranks.Ranks(*words, world=stop.ranks, cwd=ROOT, buffering=1)
    shown, end = 0, time.monotonic() + LIMIT
    try:
        while None in (statuses := started.wait(0.2, grace=2)) and time.monotonic() < end:
            shown = show(started, shown)
        show(started, shown)
    finally:
        started.stop()
    if any(status != 0 for status in statuses):
        print(started.err(), end="", flush=True)
    return None if None in statuses else max(statuses) or min(statuses)


def show(started, shown):
    """Print the lines of a program's output that are new. Returns how much of it is shown."""
    text = started.out()
    end = text.rfind("\n") + 1
    print(text[shown:end], end="", flush=True)
    return end


def name_of(stop):
    return stop.name or stop.words


def drawing(done, folder, out):
    """The programs that make the table and the figures of these runs, as words."""
    def files(stops):
        return [f"{folder / stop.name}.json" for stop in stops]

    done = sorted((stop for stop in done if stop.name), key=lambda stop: stop.name[:2])
    trained = files(done)
    drawn = files(stop for stop in done if stop.drawn_on is not False)
    programs = []
    if trained:
        programs.append(["-m", "lab.report", *trained])
    if drawn:
        programs.append(["-m", "lab.pictures", *drawn, f"--out={out}"])
    return programs


def draw(programs):
    """Make them. Returns the exit status."""
    status = 0
    for words in programs:
        [its_status], printed, errors = ranks.run(*words, cwd=ROOT, timeout=LIMIT)
        print(f"\n{printed}{errors}", end="", flush=True)
        status = status or its_status
    return status


def tour(stops, folder, out, more=()):
    """Run the stops, then draw what they have left. more: programs besides, as words. Returns the
    exit status."""
    done, failed = [], []
    seconds = sum(stop.seconds for stop in stops)
    print(f"{len(stops)} runs, about {seconds:.0f} seconds on two quiet cores")
    ranks.start_interpreter("matplotlib.backends.backend_agg")
    try:
        for number, stop in enumerate(stops, start=1):
            print(f"\n[{number} of {len(stops)}]", end="")
            status = play(stop, words_of(stop, folder))
            if status == 0:
                done.append(stop)
                continue
            failed.append(stop)
            what = f"failed: status {status}" if status else f"had no end within {LIMIT} s"
            print(f"{name_of(stop)} has {what}", flush=True)
    except BaseException:
        for words in drawing(done, folder, out):
            print(f"what is done is drawn by: {ranks.typed(words)}", flush=True)
        raise
    status = draw([*drawing(done, folder, out), *more])
    if failed:
        print(f"\n{len(failed)} of {len(stops)} runs have failed: "
              f"{', '.join(map(name_of, failed))}", flush=True)
    return int(bool(status or failed))


# ---------------------------------------------------------------------------- the command line

def a_room(text):
    """An argparse type: one of rooms()."""
    if text not in rooms():
        near = difflib.get_close_matches(text, rooms(), n=1, cutoff=0.3) or [FIRST]
        raise refusals.refusal()(f"{text or repr(text)} is no stop of the tour, which has "
                                 f"{' '.join(rooms())}", *near)
    return text


def parse(argv):
    parser = commands.Parser("-m lab.tour", description=__doc__)
    add = parser.add_argument
    add("rooms", nargs="*", type=a_room, metavar="ROOM", help="such as 02; default: all")
    add("--first", action="store_true", help="only the first run of each room")
    add("--figures", action="store_true", help="draw figures/, from runs on 8 ranks")
    return parser.parse_args(argv)


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    chosen = [room for room in rooms() if room in args.rooms or not args.rooms]
    stops = [stop for room in chosen for stop in stops_of(room, args.figures)[: args.first or None]]
    if not args.figures:
        return tour(stops, Path("runs"), "runs")
    more = [["-m", "lab.texts", "--draw=figures"]] if "10" in chosen else []
    return tour(stops, Path("runs/figures"), "figures", more)


if __name__ == "__main__":
    commands.program(main)
