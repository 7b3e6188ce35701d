"""What is to be typechecked: a chapter's file, on how many ranks, with which flags."""

import argparse
import functools
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from common import Refused
from lab import ROOT, chapters
from lab.cli import commands, strict
from lab.typecheck.run import load

SMALL = "--layers=2",   # one block is typed like the other


class NoChapter(Exception):
    """A file lacks what makes it a chapter: what."""


class Plan(NamedTuple):
    """module: the chapter's, made anew; room: its lab/chapters/NN/types.py."""
    module: object
    room: object
    args: argparse.Namespace


def rooms() -> dict:
    """{number: its types.py} of the chapters that can be typechecked."""
    return chapters.rooms_with("types")


def plan(path: Path, argv: list[str], source: str | None = None) -> Plan:
    """path: of a chapter, or of a student's file of its name; source: in place of what is there;
    argv: the chapter's flags, and --ranks and --rank. Raises Refused, NoChapter, and whatever the
    file does."""
    room = rooms()[path.name[:2]]
    module = load(path, path.read_text(encoding="utf-8") if source is None else source)
    if not getattr(module, "VARIANTS", None) or not hasattr(module, "requires"):
        raise NoChapter(f"{path.name} has no VARIANTS or no requires, as chapters have")
    is_small = not any(word.startswith(("--layers", "--preset", "--pp", "--like")) for word in argv)
    return Plan(module, room, parse(module, room, [*SMALL * is_small, *argv]))


def flags(module, ranks, parser):
    add = parser.add_argument
    add("--ranks", type=commands.number(int, 2, 2**20, 2), default=ranks, help="of the cluster")
    add("--rank", type=commands.number(int, 0, 2**20, 0), default=0, help="whose step is typed")
    getattr(module, "flags", lambda parser: None)(parser)


def parse(module, room, argv):
    ranks, usual = getattr(room, "USUAL", (2, ""))
    words = {word.partition("=")[0] for word in argv}
    more = [] if {"--ranks", "--like"} & words else usual.split()   # they are about so many ranks
    with mock.patch("lab.cli.strict.refuse_sizes"):     # what this machine has is no limit
        args = strict.parse(module.__file__, module.__doc__, module.VARIANTS,
                            functools.partial(flags, module, ranks), [*more, *argv])
    strict.refuse_as_one_rank(args, words, "where no number is computed", ("--plot",))
    if args.variant == "torch" or getattr(args, "kernels", False) or args.precision == "fp8":
        raise Refused("PyTorch's own way and the kernels have no typing rules here",
                      f"--variant {next(iter(module.VARIANTS))}" if args.variant == "torch"
                      else "without --kernels" if args.precision != "fp8" else "--precision fp32")
    with strict.ranks_by_flag():
        module.requires(args, args.ranks)
        getattr(room, "requires", lambda args: None)(args)
    return args


def of_chapter(number: str) -> Path:
    return ROOT / f"{chapters.name_of(number)}.py"
