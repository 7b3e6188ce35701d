"""The museum's exhibits, and whether types see them."""

import contextlib
import shlex
from unittest import mock

import common
from lab import ROOT
from lab.museum.exhibit import Exhibit
from lab.typecheck.fault import Fault
from lab.typecheck.plan import of_chapter, plan, rooms
from lab.typecheck.run import Untold, check

MODEL = "--layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=16"
SKIPPED = "--verify",   # of a run that is compared


def seen_by_types(exhibit: Exhibit) -> dict:
    """{"typed": whether its chapter can be typechecked; "where", "axis", "types", "sentence": of
    the fault that types see, or None}. Raises ValueError where the exhibit is in nobody's lines."""
    number = (exhibit.chapter or exhibit.file)[:2]
    nothing = dict.fromkeys(("where", "source", "axis", "types", "sentence"))
    if number not in rooms() and exhibit.file != "common.py" or exhibit.file.startswith("lab"):
        return {"typed": False} | nothing
    source = exhibit.plant((ROOT / exhibit.file).read_text(encoding="utf-8"))
    try:
        for rank in sorted({0, exhibit.ranks - 1}):
            run_planted(exhibit, number, source, rank)
    except Fault as fault:
        return {"typed": True} | {key: getattr(fault, key) for key in nothing}
    except Untold as why:
        return {"typed": False} | nothing | {"sentence": str(why)}
    return {"typed": True} | nothing


def run_planted(exhibit, number, source, rank):
    flags = [word for word in shlex.split(exhibit.flags) if word not in SKIPPED]
    argv = [*shlex.split(MODEL), f"--ranks={exhibit.ranks}", f"--rank={rank}", *flags]
    with contextlib.ExitStack() as stack:
        if exhibit.file == "common.py":
            stack.enter_context(mock.patch.dict(common.__dict__))
            exec(compile(source, common.__file__, "exec"), common.__dict__)
            source = None
        check(*plan(of_chapter(number), argv, source))
