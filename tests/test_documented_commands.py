"""Every command that a document names is there, and takes the flags that stand there.

Nothing of it works for long: tests/support/every_command.py says where each command's work begins,
and there it is stopped.
"""

import dataclasses
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import CHAPTERS, ROOT, TEXT
from tests.support import every_command, trials
from tests.test_documents import BLOCK, documents, text_of

IN_LINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
OURS = re.compile(r"((?:[A-Z_]+=\S+ )*)(make|python|torchrun) ")
OTHERS = "source", "mkdir", "sed", "docker"  # what else a block may have, as a command
READ_BY_TESTS = "CHAPTERS", "FULL"
ANY = "NN_name.py", "lab.NAME", "pytest"  # said of any chapter, of any command
STOPS = (  # where work begins, besides the places of the table
    "lab.run.bench.Bench.prepare common.join_ranks "
    "lab.planner.contexts.tables lab.planner.planning.Question.find lab.planner.problems.problems "
    "lab.planner.published.lines lab.checkpoints.resuming.goes_on_from")


def commands(name):
    """What a reader types of a document, without the $ and what is said of it."""
    for block in BLOCK.findall(text_of(name)):
        lines = re.sub(r"\\\n\s*", "", block).split("\n")[1:-1]
        typed = [line[2:] for line in lines if line.startswith("$ ")]
        yield from typed or [line for line in lines if OURS.match(line)]
    for words in IN_LINE.findall(BLOCK.sub("", text_of(name))):
        yield from (one for one in " ".join(words.split()).split("; ") if OURS.match(one))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the documents' commands read, under the names that stand there."""
    made = tmp_path_factory.mktemp("reader")
    run, hunt = every_command.a_run(), every_command.a_hunt()
    exercise = every_command.an_exercise()
    texts = {"shakespeare.txt": Path(TEXT).read_bytes(), "train.bin": bytes(100_000),
             "runs/naive.json": run, "runs/bucket.json": run, "runs/faults.json": run,
             "FILE": hunt,
             "hunts/05_sequence_parallel.py": hunt, "class/ada/04_tensor_parallel.py": exercise,
             "runs/saved/step-000005/rank": b"", "runs/steady/rank": b""}
    for path in CHAPTERS.glob("[0-9]*.py"):
        texts[path.name] = texts[f"runs/bug/{path.name}"] = path.read_bytes()
    for name in ("exercises", "autograder/submission"):
        texts[f"{name}/04_tensor_parallel.py"] = exercise
    for name, content in texts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    return made


def fault_of_make(words):
    """What is wrong with the words of a `make` command, or None."""
    makefile = "".join(path.read_text() for path in (ROOT / "Makefile", ROOT / "lab/setup.mk"))
    for word in words:
        name, is_variable, _ = word.partition("=")
        known = rf"[$][({{]{name}\b|[$][(](?:if|or) [$][(]{name}\b" if is_variable else rf"^{name}:"
        if not re.search(known, makefile, re.MULTILINE) and name not in READ_BY_TESTS:
            return f"the Makefile does not know {name}"
    return None


def launched(words):
    """(what torchrun sets in the environment, what follows its own flags)."""
    flags = {}
    while words[0].startswith("--"):
        flag, _, value = words.pop(0).partition("=")
        flags[flag] = value or flag == "--standalone" or words.pop(0)
    here = int(flags.get("--nproc_per_node", 1))
    world = here * int(flags.get("--nnodes", 1))
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(here)}
    return every_command.ON_A_RANK | sizes, words


def fault(line, folder):
    """What is wrong with a command, or None."""
    variables, program = OURS.match(line).groups()
    words = [word for word in shlex.split(line, comments=True) if word != "..."]
    if program == "make":
        return fault_of_make(words[:len(variables.split())] + words[len(variables.split()) + 1:])
    words = [word.replace("/autograder", str(folder / "autograder"))
             for word in words[len(variables.split()) + 1:]]
    ranks, words = launched(words) if program == "torchrun" else ({}, words)
    start = words[:2] if words[0] == "-m" else words[:1]
    if start[-1] in ANY:
        return None
    name = " ".join(["python", *(Path(word).name for word in start)])
    entries = [command for command in (*every_command.ON_RANKS, *every_command.OTHERS,
                                       every_command.PLANNER) if command.name == name]
    if not entries:
        return None if (ROOT / start[-1]).exists() else "there is no such command"
    if not words[len(start):] and not ranks:
        return None  # it has no flag
    stops = " ".join([STOPS, *(entry.stops_at for entry in entries)])
    command = dataclasses.replace(entries[0], stops_at=stops, environment=ranks)
    with mock.patch("lab.run.strict.least_bytes", lambda args: 0):  # a cluster has room
        outcome = trials.attempt(command, words[len(start):])
    return None if outcome.status in (0, "accepted") else str(outcome)


def test_commands_are_there_and_take_their_flags(folder, monkeypatch):
    monkeypatch.chdir(folder)
    faults = []
    for name in {*documents()} - {"CONTRIBUTING.md"}:  # tests/test_contributing.py has its own
        for line in dict.fromkeys(commands(name)):
            if OURS.match(line):
                found = fault(line, folder)
                faults += [f"{name}: {line}: {found}"] if found else []
            else:
                assert line.split()[0] in OTHERS, line
    assert not faults, "\n".join(faults)
