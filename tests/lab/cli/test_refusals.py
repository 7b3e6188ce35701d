"""What a refusal suggests is followed, as a user would do it, and is not refused."""

import argparse
import contextlib
import io
import os
import random
import re
import shlex
import shutil
from unittest import mock

import pytest

import common
from common import Refused
from lab.bench import collectives, report
from lab.cli import refusals
from lab.cli.commands import Parser, number
from tests.conftest import (
    CHAPTERS,
    SMALL,
    TEXT,
    chapter,
    chapter_names,
    main,
    no_flags,
    training_chapters,
)
from tests.support import programs

REFUSED = 500  # command lines of all chapters together
ODD = {
    int: [-1, 0, 1, 2, 3, 5, 6, 7, 12, 33, 100, 1000, "x", 1.5, 10**7, 2**40],
    float: [-1, 0, 1e-9, 0.3, 2, 1e9, "nan", "x"],
    None: ["", "nowhere", "a.json", "a.png", "folder", "plain", "mixture", "text"],
}


# ------------------------------------------------------------------------------- by hand


def packed(argv):
    """Refuses what does not fit together, as a chapter does."""
    words = refusals.parsed(" ".join(argv[1:]).replace("=", " ") or "--nothing")
    eggs, coins = int(*words.get("--eggs", ["12"])), int(*words.get("--coins", ["6"]))
    if eggs % 6:
        raise Refused(f"--eggs {eggs} are no half dozen", f"--eggs {eggs + 6 - eggs % 6}")
    if coins < eggs // 2:
        raise Refused(f"--coins {coins} are too few", f"--coins {eggs // 2}")
    if "--bag" in words and eggs > 12:
        raise Refused(f"--eggs {eggs} do not fit into a bag", "--eggs 13")
    if "--straw" in words:
        raise Refused("--straw is sold out", "--straw 2")
    if argv[0] == "stone":
        raise Refused("a stone is not packed", "--eggs 6")
    if argv[0] == "straw":
        raise Refused("straw is not packed", "fair in place of straw")
    if argv[0] in ("lead", "gold") and argv[1:]:
        raise Refused(f"{argv[0]} is packed as it is")
    if argv[0] == "gold":
        raise Refused("gold is not packed", "fair in place of gold")


@pytest.mark.parametrize(("words", "advice"), [
    ("fair --eggs 7", "--eggs 12 would work"),
    ("fair --coins 2", "--coins 6 would work"),
    ("fair --coins 2 --eggs 7", "--eggs 12 --coins 6 would work"),
    ("fair --bag --coins=9 --eggs=18", "without --eggs would work"),  # 13 are no half dozen
    ("fair --straw 1", "without --straw would work"),
    ("fair --straw 1 --eggs 7", "--eggs 12 without --straw would work"),
    ("stone --coins 7", "with --eggs 6, a stone is not packed; no change of a few "
     "flags was found to work"),
    ("straw --coins 7", "fair in place of straw would work"),
    ("lead --coins 7 --eggs 24", "without --coins --eggs would work"),
    ("gold --coins 7 --eggs 24", "fair in place of gold without --coins --eggs would work"),
])  # fmt: skip
def test_advice(words, advice):
    argv = words.split()
    with pytest.raises(Refused) as refused:
        packed(argv)
    assert "; ".join(refusals.advice(refused.value, packed, argv)) == advice


def test_a_change_is_put_in_place_of_what_is_given():
    argv = ["1f1b", "--ranks", "3", "--ep=4", "--deep", "--ep", "-5", "--json", "a b"]
    changed = lambda change: refusals.changed(argv, refusals.parsed(change))
    assert changed("--ep 2") == ["1f1b", "--ranks", "3", "--deep", "--json", "a b", "--ep", "2"]
    assert changed("without --ep --ranks") == ["1f1b", "--deep", "--json", "a b"]
    assert changed("--json 'c d' --deep") == [*argv[:4], "--ep", "-5", "--json", "c d", "--deep"]
    assert changed("--nproc_per_node 4") == argv
    assert changed("1f1 in place of 1f1b without --ep") == ["1f1", *argv[1:3], "--deep", *argv[-2:]]
    assert changed("without 1f1b 3") == ["--ranks", *argv[3:]]
    assert changed("with 'x y'") == ["x y", *argv]
    assert refusals.changed(["", "x"], refusals.parsed("with y without ''")) == ["y", "x"]
    for change in ("--json 'c d' --deep", "without --a --b", "with y",
                   "--a 1 'x y' in place of z without b"):
        assert refusals.in_words(refusals.parsed(change)) == change
    flags_end = refusals.changed(["--ep=4", "--", "x"], refusals.parsed("--ep 2"))
    assert flags_end == ["--ep", "2", "--", "x"]


def test_a_flag_without_a_value_goes_alone():
    """The word behind it is no value of its."""
    parser = Parser("-m lab.spam")
    parser.add_argument("chapters", nargs="*")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--folder", type=number(int, 0, 9, 1))
    argv = ["--force", "04", "--folder", "x", "05"]
    with pytest.raises(Refused):
        parser.parse_args(argv)
    changed = lambda change: refusals.changed(argv, refusals.parsed(change))
    assert changed("without --force") == argv[1:]
    assert changed("--folder 1") == ["--force", "04", "05", "--folder", "1"]
    assert changed("without --folder --force") == ["04", "05"]


# ------------------------------------------------------------------------------- by chance


@contextlib.contextmanager
def launched(ranks):
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    with mock.patch.dict(os.environ, dict(zip(names, map(str, (0, 0, ranks, ranks))))):
        yield


def words_of(flags):
    """{flag: value}, where None stands for a flag without one."""
    return [flag if value is None else f"{flag}={value}" for flag, value in flags.items()]


def line_of(name, ranks, flags):
    """What a chapter says that refuses these; None: it would run."""
    errors, trains = io.StringIO(), mock.Mock(side_effect=StopIteration)
    with (launched(ranks), contextlib.redirect_stderr(errors),
          mock.patch.object(report, "Run", trains), mock.patch.object(collectives, "Run", trains)):
        try:
            main(chapter(name), words_of(flags))
        except StopIteration:
            return None
        except SystemExit as leaving:
            assert leaving.code == 2 and errors.getvalue().count("\n") == 1
    return errors.getvalue()


def followed(ranks, flags, suggestion):
    """The number of ranks and the flags that a user would try next."""
    put, _, dropped = suggestion.partition("without ")
    flags = {flag: value for flag, value in flags.items() if flag not in dropped.split()}
    for flag, value in re.findall(r"(--\S+)((?: (?!--)(?:'[^']*'|\S+))?)", put):
        if flag == "--nproc_per_node":
            ranks = int(value)
        else:
            flags[flag] = shlex.split(value)[0] if value else None
    return ranks, flags


LABS = {"--json": None, "--plot": None, "--save": None, "--resume": None, "--save-every": int,
        "--keep": int, "--timeout": int}


def flags_of(name):
    """{flag: the type of its values}, or a list of all its values."""
    module, found = chapter(name), {}
    if name not in training_chapters():
        return {"--variant": [*module.VARIANTS], "--dtype": [*common.DTYPES], "--seed": int,
                "--device": ["cpu", "cuda"], "--numbers": int, "--json": None, "--plot": None,
                "--timeout": int}  # fmt: skip

    class Watching(argparse.ArgumentParser):
        def parse_args(self, argv):
            for action in self._actions[1:]:
                kind = [] if action.nargs == 0 else list(action.choices or ()) or action.type
                found.update(dict.fromkeys(action.option_strings, kind))
            return super().parse_args(argv)

    own = getattr(module, "flags", no_flags)
    common.parse(module.__file__, "", module.VARIANTS, own, [], Watching)
    return found | LABS


def drawn(rng, known):
    """Ranks and flags, some of which are bad, or do not fit each other."""
    flags = {}
    for flag in rng.sample(list(known), rng.choice((1, 2, 2, 3, 4))):
        kind = known[flag]
        values = kind if isinstance(kind, list) else ODD[kind]
        flags[flag] = rng.choice(values) if values else None
    return rng.choice((1, 2, 3, 4, 6, 8)), flags


@pytest.mark.parametrize("name", chapter_names())
def test_no_suggestion_is_refused(name, saved, monkeypatch):
    monkeypatch.setattr(common, "standard_library", lambda: bytes(range(200)) * 20)
    rng, known, refused, helpless = random.Random(name), flags_of(name), 0, 0
    while refused < REFUSED / len(chapter_names()):
        ranks, flags = drawn(rng, known)
        line = line_of(name, ranks, flags)
        if line is None:
            continue
        refused += 1
        suggestion = re.search("; ([^;]*) would work$", line)[1]
        if suggestion == "no change of a few flags":
            helpless += 1
        else:
            again = line_of(name, *followed(ranks, flags, suggestion))
            assert again is None, f"{name} on {ranks}: {words_of(flags)}\n{line}{again}"
    assert helpless < 0.05 * refused


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Of a plain model and of a mixture, each after a step."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for saved, name in (("plain", "02_data_parallel"), ("mixture", "08_expert_parallel")):
        flags = *SMALL, "--steps=1", f"--data={TEXT}", f"--save={saved}", "--no-verify"
        statuses, _, errors = programs.run(CHAPTERS / f"{name}.py", *flags, cwd=folder)
        assert statuses == [0], errors
    return folder


@pytest.fixture
def saved(checkpoints, monkeypatch, tmp_path):
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_bytes(bytes(range(250)) * 9)
    monkeypatch.chdir(tmp_path)
