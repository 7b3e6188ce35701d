"""Files that hold no run are refused in one line; the table of runs."""

import json
import os

import pytest

from lab import pictures
from lab.run import runs
from lab.run.about import as_check
from tests.conftest import TEXT, chapter, run_main

SMALL = ("--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--batch=4")
COMMANDS = runs.main, pictures.main


@pytest.fixture(scope="module")
def a_run(pool, tmp_path_factory):
    """The JSON of a run of chapter 08, which has all that the summary reads."""
    chapter("08_expert_parallel")
    flags = (*SMALL, "--steps=3", f"--data={TEXT}")
    (_, run, output), _ = pool.call(2, 60, run_main, "08_expert_parallel", flags,
                                    tmp_path_factory.mktemp("run"))  # fmt: skip
    assert run, output
    return run


def refusal(main, file, capsys):
    """What it says of a file that holds no run, without its beginning and end."""
    with pytest.raises(SystemExit, match="2"):
        main([str(file)])
    output, errors = capsys.readouterr()
    beginning, end = f"error: {file} holds no run: ", "; what --json writes would work\n"
    assert output == "" and errors.startswith(beginning) and errors.endswith(end)
    assert errors.count("\n") == 1
    return errors.removeprefix(beginning).removesuffix(end)


def test_a_file_without_a_run_is_refused(tmp_path, capsys):
    file = tmp_path / "file.json"
    for content in (b"", b"[[]]", b'{"traceEvents": []}', b'{"chapter": "\xff"}',
                    200_000 * b'{"a":', b'{"loss": [NaN]}', b'{"loss": 1e999}', b"9" * 5000):
        file.write_bytes(content)
        for main in COMMANDS:
            refusal(main, file, capsys)


def test_what_is_no_file_is_refused(tmp_path, capsys):
    """A pipe that nobody writes to would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for name in ("missing", "pipe", "", "file/in", "x" * 300):
        for main in COMMANDS:
            refusal(main, tmp_path / name, capsys)


def test_a_key_that_is_missing_or_another_thing_is_named(a_run, tmp_path, capsys):
    assert runs.misfit(a_run) is None and runs.was_measured(a_run)
    file = tmp_path / "run.json"
    for key in runs.HAVE:
        file.write_text(json.dumps({k: value for k, value in a_run.items() if k != key}))
        assert refusal(runs.main, file, capsys) == f"it has no {key}"
        file.write_text(json.dumps(a_run | {key: 0.5}))
        assert refusal(runs.main, file, capsys).startswith(f"{key} is no ")
    for strange in ({"loss": ["x"]}, {"checks": [3]}, {"seconds": "x"}):
        file.write_text(json.dumps(a_run | strange))
        with pytest.raises(SystemExit, match="2"):
            runs.main([str(file), str(file)])
        assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------------------------------- the table


def summed_up(tmp_path, capsys, *some):
    """The lines of the summary of these runs, without the header."""
    paths = [tmp_path / f"{i}.json" for i in range(len(some))]
    for path, run in zip(paths, some):
        path.write_text(json.dumps(run))
    assert runs.main([*map(str, paths)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "chapter"
    return lines


def test_summary_of_several_runs(a_run, tmp_path, capsys):
    other = a_run | {"max_loss_diff": None, "loss": [None], "checks": a_run["checks"][:1],
                     "problems": ["step 7, rank 1: loss nan", "and more"], "first_step": 10}
    one, two = summed_up(tmp_path, capsys, a_run, other)
    largest = max(a_run["max_loss_diff"], a_run["max_grad_diff"], a_run["max_param_diff"])
    assert one.split()[:7] == ["08_expert_parallel", "dropless,", "loss", "2", "gloo",
                               f"{a_run['loss'][-1]:.4f}", f"{largest:.0e}"]
    judged = [check for check in a_run["checks"] if check["ok"] is not None]
    assert one.split()[7] == f"{len(judged)}/{len(judged)}" and one.split()[9:] == ["✓"]
    assert two.split()[1:5] == ["dropless,", "loss,", "from", "10"]  # where it went on
    assert two.split()[7:11] == ["not", "finite", "-", "1/1"]
    assert two.endswith("  ✗ step 7, rank 1: loss nan")


def test_what_lab_faults_writes_has_its_line_too(tmp_path, capsys):
    """What they have not measured is left open, and a check that failed is the verdict."""
    check = as_check(("time", "a step"), 90, 75, True)
    faults = {"chapter": "faults", "variant": "layouts", "config": {"seed": 0},
              "world_size": 4, "backend": "gloo", "recorded": {}, "loss": [3.0, 2.0],
              "checks": [check], "seconds": 101.2, "problems": [], "max_loss_diff": 0.0,
              "max_param_diff": 1e-14, "max_grad_diff": None}  # fmt: skip
    wrong = faults | {"checks": [check | {"ok": False}]}
    lines = summed_up(tmp_path, capsys, faults, wrong)
    assert [line.split() for line in lines] == [
        "faults layouts 4 gloo 2.0000 - 1/1 101 ✓".split(),
        "faults layouts 4 gloo 2.0000 - 0/1 101 ✗ a step".split()]
