"""lab.scaling: batches that grow or stay, pipelines asleep, the best micro-batch, the figure."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from lab import here, pictures, scaling, schedules
from lab.bench import drawing, scaled
from lab.bench.runs import read_runs
from tests.conftest import TEXT, chapter, run_main

SMALL = scaling.TASK._replace(batch=8, micro_batch=2, model={
    "layers": 2, "dim": 16, "heads": 2, "kv-heads": 2, "seq": 8, "vocab": 256})  # fmt: skip
CLUSTER = here.cluster_of({"flops": 1e9, "hbm": 1e9, "all_reduce": {4: 1e-3, 4**8: 2e-3}}, 2)


# -------------------------------------------------------------------------------- the axes


@pytest.fixture
def on_the_pool(pool, monkeypatch):
    """What lab.scaling starts runs on the pool, with a small model: chapters, and pipelines."""

    def on_ranks(n, *command):
        if command[0] != "-m":
            name, *flags, file = command
            folder = Path(file.removeprefix("--json=")).parent
            flags = [*flags, f"--data={TEXT}"]
            [(status, _, output), *_] = pool.call(n, 60, run_main, name[:-3], flags, folder)
            assert status == 0, output
            return ""
        assert command[:2] == ("-m", "lab.scaling")
        args = scaling.parse(command[2:])
        return json.dumps(pool.call(n, 60, scaling.sleep_through, args.asleep)[0])

    monkeypatch.setattr(here, "on_ranks", on_ranks)
    monkeypatch.setattr(here, "calibrated", lambda n: CLUSTER)
    monkeypatch.setattr(here, "STEPS", 4)
    monkeypatch.setattr(scaling, "TASK", SMALL)


def hold_batches(points):
    """In weak scaling a rank has as many tokens, in strong scaling all of them together."""
    for scaling_of in scaling.SCALING:
        mine = [point for point in points if point["scaling"] == scaling_of]
        each = [point["tokens"] / (point["ranks"] if scaling_of == "weak" else 1) for point in mine]
        assert len(mine) > 1 and len(set(each)) == 1, (scaling_of, each)


def measured(axes):
    """Its points, on one rank and on two."""
    return [found for found in scaling.measure_axes(axes, [1, 2]) if isinstance(found, dict)]


def test_chapters_are_run_on_batches_that_grow_or_stay(on_the_pool):
    chapter("02_data_parallel")  # or skip
    points = measured(["dp"])
    hold_batches(points)
    assert [(point["scaling"], point["ranks"], point["tokens"]) for point in points] == [
        ("weak", 1, 16), ("strong", 1, 64), ("weak", 2, 32), ("strong", 2, 64)]
    for point in points:
        task = scaling.task_of(point["scaling"], point["ranks"])
        assert 0 < point["seconds"] < 10 and not point["asleep"]
        assert point["predicted"] == here.predicted_seconds(
            "02_data_parallel", point["ranks"], CLUSTER, task)


@pytest.mark.parametrize("fault", ["a batch that stays in weak scaling", "one sequence less"])
def test_a_wrong_number_of_tokens_is_seen(on_the_pool, monkeypatch, fault):
    chapter("02_data_parallel")  # or skip
    flags_of = here.flags_of
    if fault.startswith("a batch"):
        monkeypatch.setattr(scaling, "task_of", lambda scaling_of, n: SMALL)
    else:
        monkeypatch.setattr(here, "flags_of", lambda name, n, device, task: flags_of(
            name, n, device, task._replace(batch=4, micro_batch=2)))
    with pytest.raises(AssertionError, match="weak"):
        hold_batches(measured(["dp"]))


def test_pipelines_sleep_for_their_share_of_the_model(on_the_pool, monkeypatch):
    """In strong scaling 4 micro-batches, of (0.02 + 0.04) / p s each: 5 of them on 2 ranks."""
    chapter("07_pipeline_parallel")  # or skip
    monkeypatch.setattr(scaling, "stage_seconds", lambda *what: {2: (0.02, 0.04)})
    points = measured(["pp"])
    hold_batches(points)
    predicted = [sum(point["predicted"].values()) for point in points]
    assert predicted == pytest.approx([0.06, 4 * 0.06, 3 * 0.03, 5 * 0.03])
    for point, seconds in zip(points, predicted, strict=True):
        assert seconds <= point["seconds"] < 1.5 * seconds and point["asleep"]
    assert scaling.rate(points[-1]) == pytest.approx(64 / 2 / points[-1]["seconds"])
    assert scaling.predicted_rate(points[-1]) == pytest.approx(64 / 2 / 0.15)


def test_a_step_that_both_scalings_have_is_measured_once(monkeypatch):
    runs = []
    monkeypatch.setattr(scaling, "measure_chapter", lambda axis, n, task, cluster: runs.append(
        (axis, n, task.batch)) or {"ranks": n})
    monkeypatch.setattr(here, "calibrated", lambda n: CLUSTER)
    clusters = [found for found in scaling.measure_axes(["tp", "cp"], [1, 2, 4, 8])
                if found is CLUSTER]  # fmt: skip
    batches = {1: [2, 8], 2: [4, 8], 4: [8], 8: [16, 8]}
    assert runs == [(axis, n, batch) for n in batches for axis in ("tp", "cp")
                    for batch in batches[n]] and len(clusters) == 4


@pytest.mark.skipif(not shutil.which("nproc"), reason="there is no nproc")
def test_cores_are_those_of_nproc():
    environment = {name: value for name, value in os.environ.items() if "OMP" not in name}
    said = subprocess.run(["nproc"], capture_output=True, text=True, env=environment)
    assert scaling.cores_here() == int(said.stdout)


# ----------------------------------------------------------------------- bubbles and micro-batches


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (4, 3), (4, 32), (8, 7)])
def test_the_formula_of_a_pipeline_is_what_its_schedule_takes(p, m):
    schedule = chapter("07_pipeline_parallel").make_schedule("1f1b", p, m)
    span = schedules.simulate(schedule, F=3, B=5, W=0)
    assert scaling.pipeline_seconds(p, m, 3, 5) == max(end for _, end in span.values())


def test_forward_and_backward_sleep_for_other_times(ranks):
    chapter("07_pipeline_parallel")  # or skip
    for found in ranks(2)(scaling.sleep_through, [[3, 0.01, 0.03], [3, 0.03, 0.01], [1, 0, 0.05]]):
        for seconds, expected in zip(found, (0.16, 0.16, 0.1), strict=True):
            assert expected <= seconds < 1.5 * expected


def test_a_stage_is_timed_forward_and_backward(monkeypatch):
    """The right slice of the model, and the best of several."""
    seven, slices = chapter("07_pipeline_parallel"), []

    class Stage(seven.Stage):
        def __init__(self, module, in_halves):
            super().__init__(module, in_halves)
            slices.append([*dict(module.named_children())])

        def forward(self, *given):
            time.sleep(0.01)
            return super().forward(*given)

        def backward(self, *given):
            time.sleep(0.03)
            return super().backward(*given)

    monkeypatch.setattr(seven, "Stage", Stage)
    monkeypatch.setattr(scaling, "STEPS", 1)
    for stages, stage in ((1, 0), (2, 0), (2, 1)):
        for forward, backward in scaling.stage_seconds(SMALL.model, stages, stage, [1, 2]).values():
            assert 0.01 < forward < 0.03 < backward < 0.06
    assert slices == [["embedding", "block1", "block2", "head"], ["embedding", "block1"],
                      ["block2", "head"]]  # fmt: skip


def test_bubbles_are_measured_with_few_and_with_many_micro_batches(monkeypatch):
    slow = lambda p, pipelines: [1.25 * scaling.pipeline_seconds(p, *one) for one in pipelines]
    monkeypatch.setattr(scaling, "asleep", slow)
    bubbles = [*scaling.measure_bubbles([2, 8])]
    assert [(bubble["ranks"], bubble["micro_batches"]) for bubble in bubbles] == [
        (2, 1), (2, 32), (8, 7), (8, 32)]
    assert [bubble["predicted"] for bubble in bubbles] == [1 / 2, 32 / 33, 7 / 14, 32 / 39]
    for bubble in bubbles:
        assert bubble["measured"] == pytest.approx(bubble["predicted"] / 1.25)
    _, *lines = scaling.lines_of_bubbles(bubbles)
    assert re.search(r"p = 8, m = 7 .* 100.0% .* 40.0% /  50.0%", lines[2])
    assert re.search(r"p = 8, m = 32 .* 21.9% .* 65.6% /  82.1%", lines[3])


@pytest.mark.parametrize(("late", "said"), [
    (1, "the best size is the one that is predicted"),
    (1.5, "the size that is predicted as the best takes 28.6% more than the best one")])
def test_the_best_micro_batch_is_found(monkeypatch, late, said):
    """A stage takes 2 + b for a micro-batch: (32/b + 3) (2 + b) is 105, 76, 66, 70 and 90. late:
    how many times as long a step of 4 takes."""
    monkeypatch.setattr(scaling, "stage_seconds", lambda model, p, stage, sizes: {
        b: (1, 1 + b) for b in sizes})
    monkeypatch.setattr(scaling, "asleep", lambda p, pipelines: [
        (late if m == 8 else 1.1) * scaling.pipeline_seconds(p, m, *times)
        for m, *times in pipelines])  # fmt: skip
    sizes = scaling.measure_sizes(4)
    assert {size["b"]: size["predicted"] for size in sizes} == {1: 105, 2: 76, 4: 66, 8: 70, 16: 90}
    assert scaling.best_size(sizes, "predicted") == 4
    *_, last = lines = [*scaling.lines_of_sizes(sizes, 4)]
    assert last.strip() == said and sum("predicted" in line for line in lines[2:-1]) == 1


# ------------------------------------------------------------------------- the program, the figure


def recorded():
    """What a whole run records; the prediction is twice as fast on 2 cores as what is measured."""
    points = [{"axis": axis, "scaling": of, "ranks": n, "tokens": 64 * n, "seconds": 0.2 * n,
               "predicted": {"matmul": 0.1 * n}, "asleep": axis == "pp"}
              for axis in ("dp", "pp") for of in scaling.SCALING for n in (1, 2, 4)]  # fmt: skip
    bubbles = [{"ranks": p, "micro_batches": m, "measured": 0.4, "predicted": m / (m + p - 1)}
               for p in (2, 4) for m in (p - 1, 32)]  # fmt: skip
    sizes = [{"b": b, "seconds": 2.0, "predicted": 1.0} for b in (1, 2)]
    overlap = [{"variant": variant, "ratio": ratio, "measured": ratio}
               for variant in ("02 naive", "03 zero1") for ratio in (0.5, 1.0)]  # fmt: skip
    curves = {variant: [[0.5, 0.4], [1.0, 0.8]] for variant in ("02 naive", "03 zero1")}
    return {"nproc": 2, "axes": points, "bubbles": bubbles, "overlap": {
        "overlap": overlap, "curves": curves},
        "sizes": {"stages": 4, "sequences": 32, "points": sizes}}  # fmt: skip


def test_the_figure_shows_what_was_measured_and_where_cores_end():
    run = {"chapter": "scaling", "variant": "scaling", "recorded": recorded()}
    panels = scaled.draw([run]).axes
    assert len(panels) == 2 * 2 + 4
    for axes, color in zip(panels[:4], 2 * [drawing.BLUE, drawing.PURPLE], strict=True):
        measured, predicted, cores = axes.lines
        assert measured.get_color() == color and predicted.get_linestyle() == "--"
        assert [*measured.get_ydata()] == pytest.approx([320, 160, 80])
        assert [*predicted.get_ydata()] == pytest.approx([640, 320, 160])
        assert cores.get_xdata() == [2, 2] and cores.get_label() == "nproc = 2"
        assert len(axes.patches) == (color == drawing.BLUE)  # where ranks share cores
    assert "asleep" in panels[1].get_title("left")
    few, _, _, many = panels[4].lines
    assert [*few.get_ydata()] == [40, 40]
    assert [*many.get_ydata()] == pytest.approx([3200 / 33, 3200 / 35])
    assert [[*line.get_ydata()] for line in panels[5].lines] == [[2000, 2000], [1000, 1000]]
    for axes, number in zip(panels[6:], ("02", "03"), strict=True):
        assert number in axes.get_title("left") and [*axes.lines[1].get_ydata()] == [500, 1000]


@pytest.mark.parametrize("part", ["axes", "bubbles", "sizes", "overlap"])
def test_the_figure_of_a_part_is_drawn(tmp_path, part, capsys):
    whole = recorded()
    run = {"chapter": "scaling", "variant": "scaling", "world_size": 4, "config": {}, "checks": [],
           "problems": [], "recorded": {"nproc": 2, part: whole[part]}}  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert pictures.main([f"{tmp_path}/run.json", f"--out={tmp_path}"]) == 0
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    del run["recorded"][part]
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert pictures.main([f"{tmp_path}/run.json", f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/run.json cannot be drawn: ")


@pytest.mark.parametrize("ok", [True, False])
def test_the_program_measures_what_it_is_asked_for(tmp_path, monkeypatch, capsys, ok):
    check = {"name": "ms", "kind": "time", "what": "ms", "amount": "", "axis": "", "measured": 1.0,
             "expected": 1.0, "ok": ok}  # fmt: skip
    points = [point for point in recorded()["axes"] if point["axis"] == "pp"]
    run = {"recorded": recorded()["overlap"], "checks": [check]}
    monkeypatch.setattr(scaling, "measure_axes", lambda axes, worlds: iter(
        [None, *points[:2]] if (axes, worlds) == (["pp"], [1, 2, 4]) else []))
    monkeypatch.setattr(scaling, "measure_overlap", lambda n: (f"on {n} ranks\n", run))
    monkeypatch.setattr(scaling, "cores_here", lambda: 2)
    flags = f"--only overlap pp --ranks 4 --json={tmp_path}/a/run.json"
    assert scaling.main(shlex.split(flags)) == int(not ok)
    [run] = read_runs([tmp_path / "a/run.json"])
    assert run["recorded"].keys() == {"nproc", "axes", "overlap"} and run["world_size"] == 4
    assert run["recorded"]["axes"] == points[:2] and run["checks"] == [check]
    output = capsys.readouterr().out
    assert "on 4 ranks\n" in output and "pp    weak       320 /    640" in output
    assert "(asleep)" in output


def test_more_ranks_than_cores_are_marked():
    assert "share cores" not in scaling.header(2, 2, None)
    assert scaling.header(4, 2, None) == "\n4 ranks\nmore than nproc = 2: they share cores"
    assert "all_reduce α" in scaling.header(2, 2, CLUSTER)


@pytest.mark.parametrize(("flags", "line"), [
    ("--only dq", "--only: invalid choice: 'dq' .*; --only dp would work"),
    ("--ranks 3", "--ranks: invalid choice: 3 .*; --ranks 2 would work"),
    ("--rank=4", "unrecognized arguments: --rank=4 .*; without --rank would work"),
    ("--json x.txt", "--json: cannot write 'x.txt'; --json runs/scaling.json would work"),
    ("--asleep [[0,1,1]]", r"--asleep: \[\[0,1,1\]\] is no JSON of .*; --asleep '.*' would work"),
    ("--asleep []", r"--asleep: \[\] is no JSON of .* would work")])
def test_a_bad_argument_costs_one_line(capsys, monkeypatch, tmp_path, flags, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        scaling.main(shlex.split(flags))
    output = capsys.readouterr()
    assert not output.out and re.fullmatch(f"error: {line}\n", output.err), output.err
