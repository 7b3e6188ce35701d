"""The museum: plant each exhibit's bug in a copy, run it, and say what sees it, and what does not.

    python -m lab.museum                        all exhibits, and the figure
    python -m lab.museum 06 torchtitan#596      those of a chapter, and of a thread
    python -m lab.museum kernels checkpoints    those of the kernels, and of checkpoints

Each runs for 20 steps with SGD and with AdamW, with the bug and without. Columns: the first step
whose loss is not that of the run without the bug; how far the loss is from it, at the first step
and after 20 with SGD (or the optimizer that the bug needs), and after 20 with AdamW; whether AdamW
hides it, so that after 20 steps a curve shows no difference (less than 0.1%) where one of SGD's
would; and the observables that see it with SGD.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab import museum
from lab.classroom import checks

AT_ONCE = 3             # runs: of one, the ranks often wait for each other
# What a reader may look at, from curves to the bytes that are sent, by its label in the figure.
LABELS = {"first loss": "first loss,\nto 1e-5", "loss": "5 losses,\nto 1e-5",
          "gradient norm": "gradient\nnorm", "sent": "what is\nsent", "kept": "what is\nkept",
          "states": "model\nstates"}


def choose_exhibits(words):
    """[(room, exhibit)] whose room or thread is one of these words; all of them without any."""
    from common import Refused

    chosen = []
    for room, exhibits in museum.exhibits().items():
        for exhibit in exhibits:
            threads = [word for word in words if "#" in word and exhibit.number.endswith(word)]
            if not words or room in words or threads:
                chosen.append((room, exhibit))
    if not chosen:
        typed = " ".join(word or "''" for word in words)
        raise Refused(f"EXHIBIT {typed}: there is none of such a chapter or thread; 06 and "
                      "torchtitan#596 would work")
    return chosen


def play_all(exhibits):
    """Yield the rows of the table, in order."""
    from lab.museum import observe

    def play(exhibit):
        return {optimizer: observe.play_both(exhibit, observe.flags_of(exhibit, optimizer))
                for optimizer in ("sgd", "adamw")}

    one_of_each_run = {(exhibit.file, exhibit.flags): exhibit for _, exhibit in exhibits}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(play, one_of_each_run.values()))     # the runs without a bug are played once
        played = pool.map(play, [exhibit for _, exhibit in exhibits])
        for (room, exhibit), seen in zip(exhibits, played):
            yield judge(room, exhibit, seen)


def judge(room, exhibit, played):
    """The row of an exhibit, as plain data. played: {optimizer: (Seen without the bug, and with
    it)}. It is caught if all observables see it that it names."""
    from lab.museum import observe

    clean, planted = played["sgd"]
    first, last = observe.relative_differences(clean, planted)
    _, adamw = observe.relative_differences(*played["adamw"])
    is_known = None not in (last, adamw)
    return {"number": exhibit.number, "room": room, "caught": planted.caught, "said": planted.said,
            "step": observe.first_step(clean, planted),
            "losses": {"first": first, "last": last, "AdamW": adamw},
            "AdamW hides it": is_known and last >= observe.VISIBLE > adamw,
            "is clean": all(without.status == 0 for without, _ in played.values()),
            "is caught": planted.status == 1 and {*exhibit.caught_by} <= {*planted.caught}}


def line_of(row):
    """A line of the table."""
    mark = "✓" if row["is caught"] else "✗ NOT caught"
    losses = "".join(f"{in_digits(loss):>8}" for loss in row["losses"].values())
    hides = "hides it" if row["AdamW hides it"] else ""
    seen = ", ".join(row["caught"]) or " ".join(row["said"])
    return f"{mark} {row['number']:<38}{row['step'] or '-':>4}{losses}  {hides:<9} {seen}"


def in_digits(difference):
    """A relative difference in one digit; "-": it is not known."""
    if difference is None:
        return "-"
    return f"{difference:.0e}" if difference else "0"


def dots_of(row):
    """{label of a column of the figure: whether it sees the bug}. A curve shows a difference of
    0.1%, after 20 steps."""
    from lab.museum.exhibit import OBSERVABLES
    from lab.museum.observe import VISIBLE

    curves = {"a curve,\nAdamW": row["losses"]["AdamW"], "a curve,\nSGD": row["losses"]["last"]}
    dots = {label: (loss or 0) >= VISIBLE for label, loss in curves.items()}
    return dots | {LABELS.get(name, name): name in row["caught"] for name in OBSERVABLES}


def draw(rows, path):
    """Exhibits by observables: a dot where an observable sees one. The planner's, which train
    nothing, are left out."""
    from lab.drawing import BLUE, new_figure, save

    rows = [row for row in rows if row["room"] != "10"]
    dots = [dots_of(row) for row in rows]
    counts = {label: sum(row[label] for row in dots) for label in (dots[0] if dots else ())}
    labels = [label for label, count in counts.items() if count]
    figure, axes = new_figure(10, 2 + 0.16 * len(rows))
    for y, row in enumerate(dots):
        colors = [BLUE if row[label] else "#dddddd" for label in labels]
        axes.scatter(range(len(labels)), [y] * len(labels), c=colors, s=22)
    axes.set_xticks(range(len(labels)), [f"{label}\n{counts[label]}" for label in labels],
                    fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), [f"{row['room']}  {row['number']}" for row in rows],
                    fontsize=6.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(f"{len(rows)} silent bugs, and what sees each of them", fontsize=12, pad=12)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path, dpi=110)


def arguments(argv):
    """The arguments, with the exhibits that are chosen. Raises Refused."""
    from common import Refused
    from lab.run import commands

    parser = commands.Parser("-m lab.museum", description=__doc__)
    parser.add_argument("exhibit", nargs="*", default=[], metavar="EXHIBIT", help="06, or a thread")
    parser.add_argument("--out", type=commands.output("museum.png"),
                        help="draw exhibits by observables")
    args = parser.parse_args(argv)
    try:
        args.exhibits = choose_exhibits(args.exhibit)
    except ValueError as error:                         # a room's exhibits.toml is wrong
        raise Refused(str(error)) from None
    return args


def main(argv=None):
    checks.warm_up()
    from lab.run import refusals

    args = refusals.accepted(arguments, sys.argv[1:] if argv is None else argv, alone=True)
    begin, rows = time.monotonic(), []
    print(f"  {'':<38}step  loss 1 loss 20   AdamW            what sees it")
    for row in play_all(args.exhibits):
        rows.append(row)
        print(line_of(row), flush=True)
    caught, are_clean = sum(row["is caught"] for row in rows), all(row["is clean"] for row in rows)
    hidden = sum(row["AdamW hides it"] for row in rows)
    print(f"{caught} of {len(rows)} caught; AdamW hides {hidden}; without a bug "
          f"{'nothing was found' if are_clean else 'SOMETHING was found'}; "
          f"{time.monotonic() - begin:.0f} s")
    if args.out:
        draw(rows, Path(args.out))
    return 0 if caught == len(rows) and are_clean else 1


if __name__ == "__main__":
    checks.warm_up()
    from lab.run import commands

    commands.program(main)
