"""lab/pictures.py: what is drawn of which runs, and what is said of those that cannot be."""

import contextlib
import json
import random
import re
from collections import Counter
from unittest import mock

import pytest

from lab import pictures
from lab.bench import runs
from lab.chapters import rooms_with
from tests.conftest import TEXT, chapter, run_main
from tests.lab.conftest import RUNS, SMALL, pipeline_run, put


@pytest.mark.parametrize("figure", RUNS)
def test_each_figure_is_drawn_from_json(recorded, tmp_path, capsys, figure):
    for i, run in enumerate(recorded(figure)):
        (tmp_path / f"{i}.json").write_text(json.dumps(run))
    pictures.main([*map(str, tmp_path.glob("*.json")), f"--out={tmp_path}/new"])
    png = tmp_path / "new" / f"{figure}.png"
    assert png.read_bytes().startswith(b"\x89PNG") and str(png) in capsys.readouterr().out


def test_a_run_draws_its_own_figure(run_chapter, tmp_path):
    chapter("01_single_gpu")
    flags = (*SMALL, "--steps=3", f"--data={TEXT}", "--plot=a/memory.png")
    assert run_chapter("01_single_gpu", *flags)[0] == 0
    assert (tmp_path / "a/memory.png").read_bytes().startswith(b"\x89PNG")


def drawn(folder, capsys, *some):
    """What main comes to for these runs, of each the file 0.json, 1.json, ...: its status, the
    names of the figures, and the lines of what it says is wrong."""
    paths = [folder / f"{i}.json" for i in range(len(some))]
    for path, run in zip(paths, some):
        path.write_text(json.dumps(run))
    status = pictures.main([*map(str, paths), f"--out={folder}"])
    output, errors = capsys.readouterr()
    assert all(line.startswith("error: ") and line.isprintable() for line in errors.splitlines())
    return status, [line.split("/")[-1] for line in output.splitlines()], errors.splitlines()


def test_runs_that_stopped_cost_their_figures_alone(pool, recorded, tmp_path, capsys):
    """Of all chapters, before the step that is metered or after it. A run that was measured is
    drawn, though a later one of its variant has stopped; so is what others than chapters write."""
    stopped, said = [], []
    for i, [*_, (name, world, variant, *more)] in enumerate(RUNS.values()):
        chapter(name)
        flags = (*SMALL, "--steps=9", f"--data={TEXT}", f"--variant={variant}", *more,
                 "--optimizer=sgd", f"--lr={(1e9, 100)[i % 2]}", "--no-verify")  # fmt: skip
        (status, run, output), *_ = pool.call(world, 60, run_main, name, flags, tmp_path)
        steps = len(run["loss"])
        assert status == 1 and (steps > 3) == bool(i % 2), output
        stopped.append(run)
        said.append(f"error: {tmp_path}/{i}.json is not drawn: the run stopped before it was "
                    f"measured: step {steps}, rank 0: loss nan, gradient norm nan")
    [memory], [experts] = recorded("01_single_gpu"), recorded("08_expert_parallel")
    slept, _ = pipeline_run("1f1b", 2, 2)
    faults = {"chapter": "faults", "variant": "", "config": {}, "recorded": {}, "loss": [1.0]}
    others = [of | {"world_size": 2, "checks": [], "problems": []} for of in (slept, faults)]
    with mock.patch("lab.pictures.draw") as draw:
        assert drawn(tmp_path, capsys, *stopped) == (1, [], said)
        together = [*stopped[:1], memory, *stopped[1:], experts, *others]
        status, figures, lines = drawn(tmp_path, capsys, *together)
        read = {of: {run["file"] for run in some if run["chapter"] == of}
                for some, of, _ in (call.args for call in draw.call_args_list)}  # fmt: skip
    assert status == 1 and len(lines) == len(stopped)
    assert figures == ["01_single_gpu.png", "07_pipeline_parallel.png", "08_expert_parallel.png",
                       "faults.png"]
    files = (f"{tmp_path}/{i}.json" for i in (1, 11, 10, 12))
    assert read == {name.removesuffix(".png"): {file} for name, file in zip(figures, files)}


def test_what_no_run_of_ours_has_recorded_is_named(recorded, tmp_path, capsys):
    """Each file, with whatever else its figure was to be drawn from; the others' are drawn."""
    strange = {"01_single_gpu": {"memory": None}, "04_tensor_parallel": {"shards": []},
               "02_data_parallel": {"timeline": {"backward": [[0, 1]]}},
               "07_pipeline_parallel": {"executed": [[]]}}  # fmt: skip
    some = [recorded(figure)[-1] for figure in strange]
    some = [run | {"recorded": run["recorded"] | strange[run["chapter"]]} for run in some]
    others = recorded("02_data_parallel")[:1] + recorded("03_zero")[:1]
    status, figures, lines = drawn(tmp_path, capsys, *some, *others)
    assert status == 2 and figures == ["03_zero.png"]
    files = [" or ".join(f"{tmp_path}/{i}.json" for i in of) for of in ([0], [2, 4], [1], [3])]
    for line, file in zip(lines, files, strict=True):
        why = line.removeprefix(f"error: {file} cannot be drawn: ")
        assert re.match(r"it has no record of '|what is recorded is no run's \(", why), line


def test_what_there_is_no_figure_of_and_what_cannot_be_written(tmp_path, capsys):
    run = {"chapter": "faults", "variant": "", "world_size": 1, "config": {}, "recorded": {},
           "checks": [], "problems": []}  # fmt: skip
    other, file = run | {"chapter": "00_test\n"}, f"{tmp_path}/0.json"
    assert drawn(tmp_path, capsys, other) == (
        1, [], [f"error: {file}: there is no figure of 00_test\\n"])
    for error in (ImportError("No module named 'matplotlib'"), OSError("No space left on device")):
        with mock.patch("lab.pictures.draw", side_effect=error):
            assert drawn(tmp_path, capsys, run) == (
                1, [], [f"error: {tmp_path}/faults.png is not written: {error}"])
    with mock.patch("lab.pictures.draw") as draw, pytest.raises(SystemExit, match="2"):
        pictures.main([file, f"--out={file}"])
    output, errors = capsys.readouterr()
    assert not draw.called and output == "" and errors.count("\n") == 1
    assert errors.startswith(f"error: --out: cannot write '{file}'")


def test_sizes_that_no_figure_shows_are_refused_at_once(recorded, tmp_path, capsys):
    """Each would fill the memory, or take hours."""
    for figure, *path in (("05_sequence_parallel", "config", "layers"),
                          ("04_tensor_parallel", "world_size"),
                          ("06_context_parallel", "world_size"),
                          ("08_expert_parallel", "world_size"),
                          ("09_5d", "recorded", "slices", -1, 1), ("09_5d", "config", "seq"),
                          ("09_5d", "recorded", "shards", 0, "mlp.up", 0, 0)):  # fmt: skip
        [*_, run] = recorded(figure)
        status, figures, [line] = drawn(tmp_path, capsys, put(run, path, 10**9))
        assert status == 2 and figures == [] and "a figure shows 1 to " in line, path


ODD = (..., None, 0, -1, 1, 0.5, 10**12, 1e300, 1e-300, -(10**9), "", "x", "$a$b", "\ud800\x1b[31m",
       [], {}, [[]], [None], [[[1]]], [1, 2], True, {"a": []})  # fmt: skip
READ_BY_FIGURES = {"recorded", "config", "world_size", "loss", "comm", "checks", "variant"}


def damaged(run, draw, keys):
    """One random place of these keys, or one within, is odd or gone."""
    path, part = [draw.choice(sorted(run.keys() & keys))], run
    while part := part[path[-1]]:
        if not isinstance(part, (dict, list)) or len(path) > 1 and draw.random() < 0.25:
            break
        path.append(draw.choice([*part] if isinstance(part, dict) else range(len(part))))
    return put(run, path, draw.choice(ODD))


def outcome(main, run, folder, capsys):
    """The status of a command for a damaged run; asserts that it is told as it should be."""
    file = folder / "damaged.json"
    file.write_text(json.dumps(run))
    try:
        status = main([str(file)] + [f"--out={folder}"] * (main is pictures.main))
    except SystemExit as leaving:
        status = leaving.code
    output, errors = capsys.readouterr()
    assert (errors == "") == (status == 0) and (output == "") == (status != 0)
    if status:
        assert status in (1, 2) and errors.startswith(f"error: {file}") and errors.count("\n") == 1
    return status


def test_a_damaged_run_is_summed_up_or_refused(recorded, tmp_path, capsys):
    draw, seen = random.Random(0), Counter()
    some = [recorded(figure)[-1] for figure in RUNS]
    for _ in range(400):
        run = draw.choice(some)
        seen[outcome(runs.main, damaged(run, draw, run.keys()), tmp_path, capsys)] += 1
    assert seen.keys() == {0, 2} and min(seen.values()) > 50


@pytest.mark.parametrize(("cases", "saves"), [
    (25, False), pytest.param(500, True, marks=pytest.mark.full)])
def test_a_damaged_run_is_drawn_or_refused(recorded, tmp_path, capsys, cases, saves):
    """Few are not rendered, and lack the bubbles of chapter 07, which are of no run."""
    draw, seen = random.Random(1), Counter()
    some = [recorded(figure)[-1] for figure in RUNS]
    with contextlib.ExitStack() as left_out:
        if not saves:
            left_out.enter_context(mock.patch.object(rooms_with("figure")["07"], "draw_bubbles"))
            left_out.enter_context(mock.patch("lab.pictures.save"))
        for _ in range(cases):
            run = damaged(draw.choice(some), draw, READ_BY_FIGURES)
            seen[outcome(pictures.main, run, tmp_path, capsys)] += 1
    assert seen[0] > cases / 4 and seen[2] > cases / 10
