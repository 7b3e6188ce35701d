"""The museum's exhibits, and whether types see them."""

import contextlib
import functools
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
    """{"typed": whether its chapter can be typechecked with its flags; "where", "source", "axis",
    "types", "sentence": of the fault that types see, or None}."""
    nothing = dict.fromkeys(("where", "source", "axis", "types", "sentence"))
    number, run = (exhibit.chapter or exhibit.file)[:2], (exhibit.ranks, exhibit.flags)
    is_typed = number in rooms() and exhibit.file in ("common.py", of_chapter(number).name)
    if not is_typed or fault_of(number, exhibit.file, None, *run):
        return {"typed": False} | nothing
    source = exhibit.plant((ROOT / exhibit.file).read_text(encoding="utf-8"))
    found = fault_of(number, exhibit.file, source, *run)
    if isinstance(found, Fault):
        return {"typed": True} | {key: getattr(found, key) for key in nothing}
    return {"typed": found is None} | nothing


@functools.lru_cache(maxsize=None)
def fault_of(number, file, source, ranks, flags):
    """The Fault of a run, or why it cannot be typechecked; None: it is well typed. source: of the
    file, if it is not as it stands there. In a pipeline, the first and the last stage are typed."""
    words = [word for word in shlex.split(flags) if word not in SKIPPED]
    with contextlib.ExitStack() as stack:
        if file == "common.py" and source:
            stack.enter_context(mock.patch.dict(common.__dict__))
            exec(compile(source, common.__file__, "exec"), common.__dict__)
            source = None
        try:
            for rank in (0, ranks - 1) if "--pp" in words else (0,):
                argv = [*shlex.split(MODEL), f"--ranks={ranks}", f"--rank={rank}", *words]
                check(*plan(of_chapter(number), argv, source))
        except (Fault, Untold, common.Refused) as why:
            return why
    return None
