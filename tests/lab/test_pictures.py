"""lab/pictures.py: what is drawn of which runs, and what it says of runs that it can't draw."""

import contextlib
import json
import random
from collections import Counter
from unittest import mock

import pytest

from lab import pictures
from lab.chapters import rooms_with
from tests.conftest import FULL, TEXT, run_main, sample
from tests.lab.conftest import RUNS, SMALL, put

FIRST = "01_single_gpu", "08_expert_parallel"
FIGURES = sample([*FIRST, *sorted(RUNS.keys() - {*FIRST})], 2)


@pytest.mark.parametrize("figure", sample(FIGURES))
def test_each_figure_is_drawn_from_json(recorded, tmp_path, capsys, figure):
    for i, run in enumerate(recorded(figure)):
        (tmp_path / f"{i}.json").write_text(json.dumps(run))
    pictures.main([*map(str, tmp_path.glob("*.json")), f"--out={tmp_path}/new"])
    png = tmp_path / "new" / f"{figure}.png"
    assert png.read_bytes().startswith(b"\x89PNG") and str(png) in capsys.readouterr().out


def drawn(folder, capsys, *some):
    """What main does with these runs, in files 0.json, 1.json, ...: its status, the names of the
    figures, and the lines of its errors."""
    paths = [folder / f"{i}.json" for i in range(len(some))]
    for path, run in zip(paths, some):
        path.write_text(json.dumps(run))
    status = pictures.main([*map(str, paths), f"--out={folder}"])
    output, errors = capsys.readouterr()
    assert all(line.startswith("error: ") and line.isprintable() for line in errors.splitlines())
    return status, [line.split("/")[-1] for line in output.splitlines()], errors.splitlines()


def test_a_run_that_stopped_costs_its_own_figure_alone(pool, recorded, tmp_path, capsys):
    """It stops before the step that is metered, or after it."""
    stopped = []
    for i, figure in enumerate(FIGURES):
        name, world, variant, *more = RUNS[figure][-1]
        flags = (*SMALL, "--steps=9", f"--data={TEXT}", f"--variant={variant}", *more,
                 "--optimizer=sgd", f"--lr={(1e9, 100)[i % 2]}", "--no-verify")  # fmt: skip
        (status, run, output), *_ = pool.call(world, 60, run_main, name, flags, tmp_path)
        assert status == 1 and (len(run["loss"]) > 3) == bool(i % 2), output
        stopped.append(run)
    [memory] = recorded("01_single_gpu")
    with mock.patch("lab.pictures.draw"):
        status, figures, lines = drawn(tmp_path, capsys, *stopped, memory)
    assert status == 1 and figures == ["01_single_gpu.png"]
    for i, (line, run) in enumerate(zip(lines, stopped, strict=True)):
        assert f"{tmp_path}/{i}.json" in line and f"step {len(run['loss'])}" in line


def test_what_there_is_no_figure_of_and_what_cannot_be_written(tmp_path, capsys):
    run = {"chapter": "faults", "variant": "", "world_size": 1, "config": {}, "recorded": {},
           "checks": [], "problems": []}  # fmt: skip
    status, figures, [line] = drawn(tmp_path, capsys, run | {"chapter": "00_test\n"})
    assert (status, figures) == (1, []) and "0.json" in line and "00_test" in line
    with mock.patch("lab.pictures.draw", side_effect=OSError("No space left on device")):
        status, figures, [line] = drawn(tmp_path, capsys, run)
    assert (status, figures) == (1, []) and f"{tmp_path}/faults.png" in line and "space" in line


ODD = (..., None, 0, -1, 1, 0.5, 10**12, 1e300, 1e-300, -(10**9), "", "x", "$a$b", "\ud800\x1b[31m",
       [], {}, [[]], [None], [[[1]]], [1, 2], True, {"a": []})  # fmt: skip
READ_BY_FIGURES = {"recorded", "config", "world_size", "loss", "comm", "checks", "variant"}


def damaged(run, draw, keys):
    """The run with one random value odd or gone: that of one of these keys, or one inside it."""
    path, part = [draw.choice(sorted(run.keys() & keys))], run
    while part := part[path[-1]]:
        if not isinstance(part, (dict, list)) or len(path) > 1 and draw.random() < 0.25:
            break
        path.append(draw.choice([*part] if isinstance(part, dict) else range(len(part))))
    return put(run, path, draw.choice(ODD))


def outcome(run, folder, capsys):
    """The status for a damaged run, whose file is named in one line if it is refused."""
    file = folder / "damaged.json"
    file.write_text(json.dumps(run))
    try:
        status = pictures.main([str(file), f"--out={folder}"])
    except SystemExit as leaving:
        status = leaving.code
    output, errors = capsys.readouterr()
    assert (errors == "") == (status == 0) and (output == "") == (status != 0)
    if status:
        assert status in (1, 2) and errors.startswith(f"error: {file}") and errors.count("\n") == 1
    return status


def test_a_damaged_run_is_drawn_or_refused(recorded, tmp_path, capsys):
    """By day without rendering, and without chapter 07's bubbles, which need no run."""
    draw, seen, cases = random.Random(1), Counter(), 500 if FULL else 25
    some = [recorded(figure)[-1] for figure in FIGURES]
    with contextlib.ExitStack() as left_out:
        if not FULL:
            left_out.enter_context(mock.patch.object(rooms_with("figure")["07"], "draw_bubbles"))
            left_out.enter_context(mock.patch("lab.pictures.save"))
        for _ in range(cases):
            run = damaged(draw.choice(some), draw, READ_BY_FIGURES)
            seen[outcome(run, tmp_path, capsys)] += 1
    assert seen[0] > cases / 4 and seen[2] > cases / 10
