"""What a chapter says of a bad argument, and that the change it names works."""

import shlex
from unittest import mock

from common import Refused
from lab import launch
from tests.conftest import chapter, no_flags


def hold_refusals(run_chapter, name, table):
    """Exit status 2, and one line that names the flag and one change, with which the chapter
    accepts the flags.

    table: (flags, how many ranks, the flag that is named, what works: the change, or its end).
    """
    for flags, world, named, works in table:
        status, output, errors = run_chapter(name, *flags.split(), WORLD_SIZE=world, RANK=0)
        assert (status, output, errors.count("\n")) == (2, "", 1), (flags, errors)
        assert errors.startswith("error: ") and named in errors, (flags, errors)
        assert errors.endswith(f"{works} would work\n"), (flags, errors)
        refused = refusal_of(name, flags.split(), world)
        assert refusal_of(name, *changed(flags.split(), world, refused.args[1])) is None, flags


def refusal_of(name, argv, world):
    """The exception with which a chapter refuses these arguments on so many ranks, or None."""
    module = chapter(name)
    flags = getattr(module, "flags", no_flags)
    sizes = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    with mock.patch.dict("os.environ", sizes):
        try:
            launch.accept(module.__file__, "", module.VARIANTS, module.requires, flags, argv)
        except Refused as refused:
            return refused


def changed(argv, world, change):
    """(arguments, number of ranks) with the change of a refusal (see lab/run/refusals.py)."""
    words = shlex.split(change)
    if words[1:4] == ["in", "place", "of"]:
        return [words[0] if word == words[4] else word for word in argv], world
    if words[0] == "with":
        return [*argv, words[1]], world
    if words[0] == "without":
        return without(argv, words[1:]), world
    if words[0] == "--nproc_per_node":
        return argv, int(words[1])
    flags = [word for word in words if word.startswith("--")]
    return [*without(argv, flags), *words], world


def without(argv, dropped):
    """The arguments without these flags and their values."""
    kept, is_dropped = [], False
    for word in argv:
        if word.startswith("--") or not is_dropped:  # else it's a value of the flag before
            is_dropped = word.partition("=")[0] in dropped
        kept += [] if is_dropped else [word]
    return kept
