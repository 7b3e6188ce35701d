"""Every command that a document names is there, and takes the flags that stand there.

Nothing of it works for long: tests/support/every_command.py says where each command's work begins,
and there it is stopped. tests/test_contributing.py runs those of CONTRIBUTING.
"""

import dataclasses
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from lab import plans
from tests.conftest import CHAPTERS, ROOT, TEXT
from tests.support import every_command, trials
from tests.test_documents import BLOCK, DOCUMENTS, text_of

IN_LINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
OURS = re.compile(r"((?:[A-Z_]+=\S+ )*)(make|python|torchrun) ")
OTHERS = "source", "mkdir", "sed", "docker"             # what else a block may have, as a command
READ_BY_TESTS = "CHAPTERS", "FULL"
ANY = "NN_name.py", "lab.NAME"                          # said of any chapter, of any command
STOPS = (               # where work begins, beside those of the table
    "benchmarks.time_muon.trained", "lab.bench.bench.Bench.meet", "lab.bench.meeting.join",
    "lab.planner.contexts.tables", "lab.planner.planning.Question.find",
    "lab.planner.problems.problems", "lab.planner.published.tables",
    "lab.checkpoints.resuming.goes_on_from", "lab.typecheck.command.visit")


def blocks(name):
    """The lines of a document's blocks, whose backslashes are joined."""
    for block in BLOCK.findall(text_of(name)):
        yield re.sub(r"\\\n\s*", "", block).split("\n")[1:-1]


def commands(name):
    """What a reader types of a document, without the $ and what is said of it."""
    for lines in blocks(name):
        typed = [line[2:] for line in lines if line.startswith("$ ")]
        yield from typed or [line for line in lines if OURS.match(line)]
    for words in IN_LINE.findall(BLOCK.sub("", text_of(name))):
        yield from (one for one in " ".join(words.split()).split("; ") if OURS.match(one))


def started(words):
    """(ranks, those of a machine, what follows torchrun's own flags)."""
    flags = {}
    while words[0].startswith("--"):
        flag, _, value = words.pop(0).partition("=")
        flags[flag] = value or flag == "--standalone" or words.pop(0)
    here = int(flags.get("--nproc_per_node", 1))
    return here * int(flags.get("--nnodes", 1)), here, words


def tried(program, module):
    """The entries of a command in the table of all; program: a file, or with module a name."""
    every = (*every_command.ON_RANKS, *every_command.OTHERS, every_command.PLANNER)
    name = f"python -m {program}" if module else f"python {Path(program).name}"
    return [command for command in every if command.name == name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the documents' commands read, under the names that stand there."""
    made = tmp_path_factory.mktemp("reader")
    run, hunt = every_command.a_run(), every_command.a_hunt()
    texts = {"shakespeare.txt": Path(TEXT).read_bytes(), "train.bin": bytes(100_000),
             "runs/naive.json": run, "runs/bucket.json": run, "runs/faults.json": run,
             "marked.json": every_command.marked(), "marks.json": every_command.marked(),
             "hunts/05_sequence_parallel.py": hunt, "FILE": hunt,
             "class/ada/04_tensor_parallel.py": every_command.an_exercise(),
             "class/ada/sheet.md": every_command.a_sheet(),
             "FOLDER/sheet.md": every_command.a_sheet()}
    for name in ("runs/saved/step-000005/rank", "runs/steady/rank"):
        texts[name] = b""
    for name in ("exercises", "autograder/submission", "runs/bug"):
        texts[f"{name}/04_tensor_parallel.py"] = every_command.an_exercise()
    for name, content in texts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    for path in CHAPTERS.glob("[0-9]*.py"):
        (made / path.name).symlink_to(path)
        (made / "runs/bug" / path.name).unlink(missing_ok=True)
        (made / "runs/bug" / path.name).symlink_to(path)
    return made


def fault_of_make(words, variables):
    """What is wrong with the words that follow `make`, or None."""
    makefile = "".join(path.read_text() for path in (ROOT / "Makefile", *ROOT.glob("*.mk")))
    for word in (*variables, *words):
        name, is_variable, _ = word.partition("=")
        known = rf"[$][({{]{name}\b|[$][(](?:if|or) [$][(]{name}\b" if is_variable else rf"^{name}:"
        if not re.search(known, makefile, re.MULTILINE) and name not in READ_BY_TESTS:
            return f"the Makefile does not know {name}"
    return None


def refuse(refused, *rest, **more):
    """In place of lab.cli.refusals.complain, which tries changes until one is accepted."""
    print(*refused.args, file=sys.stderr)
    sys.exit(2)


def fault(line, folder):
    """What is wrong with a command, or None."""
    variables, program = OURS.match(line).groups()
    words = [word.replace("/autograder", str(folder / "autograder"))
             for word in shlex.split(line, comments=True)[len(variables.split()):]]
    words = [word for word in words[1:] if word != "..."]
    if program == "make":
        return fault_of_make(words, variables.split())
    world, here, words = started(words) if program == "torchrun" else (0, 0, words)
    module = bool(words) and words[0] == "-m"
    words = words[module:]
    if words[0] in ANY or words[0] == "pytest":
        return None
    entries = tried(words[0], module)
    if not entries:
        return None if (ROOT / words[0]).exists() else "there is no such command"
    if not words[1:] and not world:
        return None                                     # it has no flag
    pictures = dict.fromkeys(plans.PICTURES, trials.accept)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world),
             "LOCAL_WORLD_SIZE": str(here), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    stops = {*STOPS, *(stop for entry in entries for stop in entry.stops_at)}
    command = dataclasses.replace(entries[0], stops_at=[*stops])
    with (mock.patch.dict("os.environ", ranks if world else {}),
          mock.patch.dict("lab.plans.PICTURES", pictures),
          mock.patch("lab.cli.refusals.complain", refuse),
          mock.patch("lab.cli.strict.least_bytes", lambda args: 0)):    # a cluster has room
        outcome = trials.attempt(command, words[1:])
    return None if outcome.status in (0, "accepted") else str(outcome)


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "CONTRIBUTING.md"])
def test_a_command_is_there_and_takes_its_flags(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    faults = {}
    for line in dict.fromkeys(commands(name)):
        if OURS.match(line):
            faults[line] = fault(line, folder)
        else:
            assert line.split()[0] in OTHERS, line
    assert not any(faults.values()), {line: found for line, found in faults.items() if found}


@pytest.mark.parametrize("line", [
    "make no-such", "make quick SPEED=2", "python -m lab.no_such --seed 1", "python 12_no.py --a",
    "torchrun --nproc_per_node=4 02_data_parallel.py --no-such", "python 10_planner.py --gpus 0",
    "torchrun --nproc_per_node=3 --standalone 04_tensor_parallel.py", "python -m lab.predict 99"])
def test_a_command_that_is_wrong_is_seen(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert fault(line, folder)
