"""The museum: plant each exhibit's bug in a copy, run it, and say what sees it, and what does not.

    python -m lab.museum                        all exhibits, and the figure
    python -m lab.museum 06 torchtitan#596      those of a chapter, and of a thread
    python -m lab.museum kernels checkpoints    those of the kernels, and of checkpoints
    python -m lab.museum 02 --dtype bfloat16    in 16 bits, where fewer observables see a bug
    python -m lab.museum --published            bugs that TrainCheck and TTrace have published: how
                                                they see each, and what sees it here; plays nothing

Each runs for 20 steps with SGD and with AdamW, with the bug and without. Columns: the first step
whose loss is not that of the run without the bug; how far the loss is from it, at the first step
and after 20 with SGD (or the optimizer that the bug needs), and after 20 with AdamW; whether AdamW
hides it, so that after 20 steps a curve shows no difference (less than 0.1%) where one of SGD's
would; and the observables that see it with SGD.
"""

import json
import shlex
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.classroom import checks

AT_ONCE = 3             # runs: of one, the ranks often wait for each other


def chosen(words):
    """{room: exhibits} whose room or thread has one of these words; all of them without any."""
    from common import Refused
    from lab import museum

    is_meant = lambda room, exhibit: not words or any(
        word == room or "#" in word and exhibit.number.endswith(word)
        for word in words)
    found = {room: [exhibit for exhibit in those if is_meant(room, exhibit)]
             for room, those in museum.exhibits().items()}
    if not any(found.values()):
        said = " ".join(word or "''" for word in words)
        raise Refused(f"EXHIBIT {said}: there is none of such a chapter or thread; 06 and "
                      "torchtitan#596 would work")
    return {room: those for room, those in found.items() if those}


def play_all(rooms, dtype=None):
    """Yield (room, exhibit, {optimizer: (Seen without the bug, Seen with it)}), in order."""
    from lab.museum import observe

    def play(exhibit):
        return {optimizer: observe.play_both(exhibit, observe.flags_of(exhibit, optimizer, dtype))
                for optimizer in ("sgd", "adamw")}

    names = [room for room, those in rooms.items() for _ in those]
    every = [exhibit for those in rooms.values() for exhibit in those]
    firsts = {(exhibit.file, exhibit.flags): exhibit for exhibit in every}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(play, firsts.values()))           # what several are compared with, once
        yield from zip(names, every, pool.map(play, every))


def judge(room, exhibit, found, dtype=None):
    """What the table and the figure say of an exhibit, as plain data. Its caught_by are those that
    see it in its own dtype."""
    from lab.museum import observe

    clean, seen = found["sgd"]
    first, last = observe.silence(clean, seen)
    _, adamw = observe.silence(*found["adamw"])
    hidden = None if None in (last, adamw) else last >= observe.VISIBLE > adamw
    return {"number": exhibit.number, "title": exhibit.title, "room": room,
            "caught": list(seen.caught), "step": observe.first_step(clean, seen),
            "first loss": first, "last loss": last, "last loss, AdamW": adamw,
            "AdamW hides it": hidden,
            "control": all(without.status == 0 for without, _ in found.values()),
            "is caught": seen.status == 1 and bool(
                dtype or {*exhibit.caught_by} <= {*seen.caught})}


def line_of(told):
    number = lambda x: "-" if x is None else f"{x:.0e}" if x else "0"
    mark = "✓" if told["is caught"] else "✗ NOT caught"
    columns = [number(told[key]) for key in ("first loss", "last loss", "last loss, AdamW")]
    hides = {None: "", True: "hides it", False: ""}[told["AdamW hides it"]]
    step = "-" if told["step"] is None else told["step"]
    return (f"{mark} {told['number']:<38}{step:>4}" + "".join(f"{x:>8}" for x in columns)
            + f"  {hides:<9} {', '.join(told['caught'])}")


def seen_by(told):
    """{what somebody may look at: whether it sees the bug}, from curves to the bytes that are sent.
    A curve shows a difference of 0.1%, after 20 steps; all others are those of `judge`."""
    from lab.museum.observe import OBSERVABLES, VISIBLE

    curves = {"a curve,\nAdamW": told["last loss, AdamW"], "a curve,\nSGD": told["last loss"]}
    shows = {name: off is not None and off >= VISIBLE for name, off in curves.items()}
    names = {"first loss": "first loss,\nto 1e-5", "loss": "5 losses,\nto 1e-5",
             "gradient norm": "gradient\nnorm", "sent": "what is\nsent", "kept": "what is\nkept",
             "states": "model\nstates"}
    shows |= {names.get(name, name): name in told["caught"] for name in OBSERVABLES}
    return shows


def draw(told, path):
    """Exhibits by observables: a dot where an observable sees one. The planner's, which train
    nothing, are left out."""
    from lab.drawing import BLUE, new_figure, save

    told = [one for one in told if one["room"] != "10"]
    rows = [seen_by(one) for one in told]
    names = [name for name in seen_by(told[0]) if any(row[name] for row in rows)] if told else []
    figure, axes = new_figure(10, 2 + 0.16 * len(told))
    for y, row in enumerate(rows):
        colors = [BLUE if row[name] else "#dddddd" for name in names]
        axes.scatter(range(len(names)), [y] * len(names), c=colors, s=22)
    counts = [sum(row[name] for row in rows) for name in names]
    axes.set_xticks(range(len(names)), [f"{name}\n{count}" for name, count in zip(names, counts)],
                    fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(told)), [f"{one['room']}  {one['number']}" for one in told],
                    fontsize=6.5)
    axes.set_ylim(len(told) - 0.4, -0.6)
    axes.set_title(f"{len(told)} silent bugs, and what sees each of them", fontsize=12, pad=12)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    save(figure, path, dpi=110)


def arguments(argv):
    from common import DTYPES
    from lab.run import commands

    parser = commands.Parser("-m lab.museum", description=__doc__)
    parser.add_argument("exhibit", nargs="*", default=[], metavar="EXHIBIT", help="06, or a thread")
    parser.add_argument("--out", type=commands.output("museum.png"),
                        help="draw exhibits by observables")
    parser.add_argument("--json", type=commands.output("museum.json"), help="write the table")
    parser.add_argument("--dtype", choices=DTYPES, help="of all runs that do not need another")
    parser.add_argument("--stories", action="store_true", help="tell each exhibit's story as well")
    parser.add_argument("--published", action="store_true", help="print other catalogues, beside")
    args = parser.parse_args(argv)
    if args.published:
        alone(args)
    args.rooms = chosen(args.exhibit)
    return args


def alone(args):
    """Refuse what means nothing beside --published."""
    from common import Refused

    for word in args.exhibit:
        word = shlex.quote(word)
        raise Refused(f"EXHIBIT {word} means nothing beside --published, which plays none",
                      f"without {word}")
    for flag in ("--out", "--json", "--dtype", "--stories"):
        if getattr(args, flag[2:]):
            raise Refused(f"{flag} means nothing beside --published, which plays no exhibit",
                          f"without {flag}")


def main(argv=None):
    checks.warm_up()
    from lab.run import refusals

    args = refusals.accepted(arguments, sys.argv[1:] if argv is None else argv, alone=True)
    if args.published:
        from lab import museum
        from lab.museum import published
        print("\n".join(published.table(museum.exhibits())))
        return 0
    begin, told = time.monotonic(), []
    print(f"  {'':<38}step  loss 1 loss 20   AdamW            what sees it")
    for room, exhibit, found in play_all(args.rooms, args.dtype):
        told.append(judge(room, exhibit, found, args.dtype))
        print(line_of(told[-1]), flush=True)
        if args.stories:
            print(textwrap.indent(textwrap.fill(f"{exhibit.title}. {exhibit.story}", 92), "    "))
    caught, control = sum(one["is caught"] for one in told), all(one["control"] for one in told)
    hidden = sum(bool(one["AdamW hides it"]) for one in told)
    print(f"{caught} of {len(told)} caught; AdamW hides {hidden}; without a bug "
          f"{'nothing was found' if control else 'SOMETHING was found'}; "
          f"{time.monotonic() - begin:.0f} s")
    for path, write in ((args.json, lambda path: path.write_text(json.dumps(told, indent=1))),
                        (args.out, lambda path: draw(told, path))):
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write(path)
    return 0 if caught == len(told) and control else 1


if __name__ == "__main__":
    checks.warm_up()
    from lab.run import commands

    commands.program(main)
