"""lab/pictures.py: what is drawn of which runs, and what it says of runs that it can't draw."""

import json
from unittest import mock

import pytest

from lab import pictures
from tests.conftest import TEXT, run_main, sample
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


@pytest.mark.parametrize(("path", "value"), [
    (["recorded", "memory"], [[1, 2]]), (["config"], None), (["world_size"], "x")])
def test_a_damaged_run_is_refused_by_its_name(recorded, tmp_path, capsys, path, value):
    [run] = recorded("01_single_gpu")
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(put(run, path, value)))
    try:
        status = pictures.main([str(file), f"--out={tmp_path}"])
    except SystemExit as leaving:
        status = leaving.code
    [line] = capsys.readouterr().err.splitlines()
    assert status == 2 and line.startswith(f"error: {file}")
