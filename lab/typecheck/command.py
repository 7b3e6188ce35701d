"""python -m lab.types: what it takes, checks and prints."""

import json
import os
import shlex
import traceback
from pathlib import Path

from common import Refused
from lab import ROOT
from lab.cli import commands, refusals
from lab.museum import __main__ as exhibition
from lab.typecheck import told
from lab.typecheck.fault import Fault
from lab.typecheck.plan import NoChapter, of_chapter, plan, rooms
from lab.typecheck.run import Untold, check
from lab.typecheck.seen import seen_by_types


def main(argv: list[str], doc: str) -> int:
    """The exit status: 1 if something is not well typed."""
    if "--museum" in argv or {"-h", "--help"} & {*argv}:
        return visit(refusals.accepted(lambda argv: asked(argv, doc), argv, alone=True))
    plans = refusals.accepted(accepted, argv, alone=True)
    results = [typecheck(one) for one in plans]
    if plans[0].args.json:
        write(plans[0].args.json, results if len(results) > 1 else results[0])
    return int(any(result["fault"] for result in results))


def asked(argv, doc):
    parser = commands.Parser("-m lab.types", description=doc)
    add = parser.add_argument
    add("what", nargs="*", default=[], metavar="CHAPTER.py",
        help="files of chapters, and their flags; behind --museum its rooms and threads")
    add("--museum", action="store_true", help="plant its exhibits, and see which ones types see")
    add("--json", type=commands.output("types.json"), help="write all types")
    add("--ranks", help="of the cluster; default: a few")
    add("--rank", help="whose step is typed; default: 0")
    args = parser.parse_args(argv)
    for flag in ("ranks", "rank"):
        if getattr(args, flag):
            raise Refused(f"--{flag} means nothing beside --museum", f"without --{flag}")
    args.rooms = exhibition.chosen(args.what)
    return args


def accepted(argv):
    """A Plan for each file; raises Refused."""
    files = [word for word in argv if word.endswith(".py")]
    flags = [word for word in argv if not word.endswith(".py")]
    if not files:
        raise Refused("no chapter's file is given", "with 04_tensor_parallel.py")
    return [planned(word, flags) for word in files]


def planned(word, flags):
    """The Plan of a file. Raises Refused, for one that does not run as well."""
    path = found(word)
    change = f"{shlex.quote(os.path.relpath(of_chapter(path.name[:2])))} in place of " \
             f"{shlex.quote(word)}"
    try:
        return plan(path, flags)
    except NoChapter as why:
        raise Refused(str(why), change) from None
    except UnicodeDecodeError:
        raise Refused(f"{path.name} is no text in UTF-8", change) from None
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename == str(path)]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno or 1)             # none, of a null byte
        if not lines:                                   # then it is not the file's
            raise
        words = f"{type(error).__name__}: {getattr(error, 'msg', error)}".split("\n")[0]
        raise Refused(f"{path.name}:{lines[-1]} raises {words}", change) from None


def found(word):
    """The path of a chapter's file: where it is said to be, or in the course."""
    paths = [path for path in (Path(word), ROOT / word) if path.is_file()]
    if not paths or Path(word).name[:2] not in rooms():
        raise Refused(f"{word!r} is no file of chapter {', '.join(rooms())}",
                      f"04_tensor_parallel.py in place of {shlex.quote(word)}")
    return paths[0]


def typecheck(one):
    """Check a Plan, and print its table or its fault: its types as plain data."""
    try:
        run = check(*one)
    except Fault as fault:
        print(f"{one.module.__name__} · {one.args.variant} · {one.args.ranks} ranks\n"
              f"✗ {fault.where}: {fault.sentence}\n    {fault.source}", flush=True)
        return {"chapter": one.args.chapter, "variant": one.args.variant,
                "fault": {key: getattr(fault, key)
                          for key in ("where", "source", "axis", "types", "sentence")}}
    except Untold as why:
        refusals.fail(f"{one.module.__name__} cannot be typechecked: {why}")
    print("\n".join(told.table(run)), flush=True)
    return told.as_json(run)


def visit(args):
    """Which of the museum's exhibits types see."""
    found = []
    for room, those in args.rooms.items():
        for exhibit in those:
            seen = seen_by_types(exhibit)
            found.append({"room": room, "number": exhibit.number, "title": exhibit.title,
                          "caught_by": exhibit.caught_by, "blind": exhibit.blind, **seen})
            print(line_of(found[-1]), flush=True)
    for line in counted(found):
        print(line)
    if args.json:
        write(args.json, found)
    return 0


def line_of(one):
    if not one["typed"]:
        return f"  {one['room']:<12}{one['number']:<44}not typechecked"
    mark = "✓" if one["sentence"] else "·"
    said = f"{one['where']}: {one['sentence']}" if one["sentence"] else ""
    return f"{mark} {one['room']:<12}{one['number']:<44}{said}".rstrip()


def counted(found):
    """How many types see, and how that goes together with the first loss."""
    typed = [one for one in found if one["typed"]]
    seen = [one for one in typed if one["sentence"]]
    of_loss = lambda those: sum("first loss" in one["caught_by"] for one in those)
    not_seen = [one for one in typed if not one["sentence"]]
    return [f"of {len(found)} exhibits {len(typed)} are of chapters that are typechecked; types see"
            f" {len(seen)} of these, with no number computed",
            f"the first loss sees {of_loss(typed)} of them: both {of_loss(seen)}, types alone "
            f"{len(seen) - of_loss(seen)}, the first loss alone {of_loss(not_seen)}, neither "
            f"{len(not_seen) - of_loss(not_seen)}"]


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1))
