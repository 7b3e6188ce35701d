"""lab.scaling: batches that grow or stay, pipelines asleep, the best micro-batch."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab import here, scaling, schedules
from lab.bench.runs import read_runs
from tests.conftest import TEXT, chapter, run_main

SMALL = scaling.TASK._replace(batch=8, micro_batch=2, model={
    "layers": 2, "dim": 16, "heads": 2, "kv-heads": 2, "seq": 8, "vocab": 256})  # fmt: skip
CLUSTER = here.cluster_of({"flops": 1e9, "hbm": 1e9, "all_reduce": {4: 1e-3, 4**8: 2e-3}}, 2)


# -------------------------------------------------------------------------------- the axes


def test_weak_scaling_grows_the_batch_and_strong_scaling_keeps_it(monkeypatch):
    """Each rank has as many tokens, or all together have. A step that both contain runs once."""
    runs = []

    def recorded(name, n, device, task):
        runs.append((name, n, task.batch))
        return {"world_size": n, "config": {"batch": task.batch, "seq": 8},
                "step_seconds": [9.0, 9.0, 9.0, 0.5]}

    monkeypatch.setattr(here, "recorded", recorded)
    monkeypatch.setattr(here, "calibrated", lambda n: CLUSTER)
    monkeypatch.setattr(scaling, "TASK", SMALL)
    found = [*scaling.measure_axes(["dp", "tp"], [1, 2, 4])]
    points = [point for point in found if isinstance(point, dict)]
    assert found.count(CLUSTER) == 3
    batches = {1: [2, 8], 2: [4, 8], 4: [8]}
    names = scaling.AXES["dp"], scaling.AXES["tp"]
    assert runs == [(name, n, batch) for n in batches for name in names for batch in batches[n]]
    for point in points:
        n = point["ranks"]
        batch = scaling.EACH * n if point["scaling"] == "weak" else SMALL.batch
        assert (point["tokens"], point["seconds"], point["asleep"]) == (8 * batch, 0.5, False)
        assert point["predicted"] == here.predicted_seconds(
            scaling.AXES[point["axis"]], n, CLUSTER, SMALL._replace(batch=batch))
    assert scaling.rate(points[-1]) == 64 / 4 / 0.5


def test_a_chapter_is_run_as_it_is_planned(pool, monkeypatch, tmp_path):
    chapter("02_data_parallel")  # or skip

    def on_ranks(n, name, *flags):
        *flags, file = flags
        folder = Path(file.removeprefix("--json=")).parent
        [(status, _, output), *_] = pool.call(n, 60, run_main, name[:-3],
                                              [*flags, f"--data={TEXT}"], folder)
        assert status == 0, output

    monkeypatch.setattr(here, "on_ranks", on_ranks)
    monkeypatch.setattr(here, "STEPS", 4)
    point = scaling.measure_chapter("dp", 2, SMALL, CLUSTER)
    assert (point["ranks"], point["tokens"]) == (2, 64) and point["seconds"] > 0


def test_pipelines_sleep_for_their_share_of_the_model(monkeypatch):
    """4 micro-batches, each of (0.02 + 0.04) / p s: 5 of them on 2 ranks."""
    asked = []
    monkeypatch.setattr(scaling, "asleep", lambda p, pipelines: asked.append((p, *pipelines)) or [
        2 * scaling.pipeline_seconds(p, *one) for one in pipelines])
    point = scaling.measure_pipeline(2, SMALL, (0.02, 0.04))
    assert asked == [(2, [4, 0.01, 0.02])] and point["asleep"] and point["tokens"] == 64
    assert sum(point["predicted"].values()) == pytest.approx(0.15) == point["seconds"] / 2
    assert scaling.predicted_rate(point) == pytest.approx(64 / 2 / 0.15)


# ----------------------------------------------------------------------- bubbles and micro-batches


def test_the_formula_of_a_pipeline_is_what_its_schedule_takes():
    for p, m in [(1, 3), (2, 1), (4, 3), (4, 32), (8, 7)]:
        schedule = chapter("07_pipeline_parallel").make_schedule("1f1b", p, m)
        span = schedules.simulate(schedule, F=3, B=5, W=0)
        assert scaling.pipeline_seconds(p, m, 3, 5) == max(end for _, end in span.values())


def test_forward_and_backward_sleep_for_their_own_times(ranks):
    """A busy machine may make a step longer, and nothing makes it shorter."""
    chapter("07_pipeline_parallel")  # or skip
    for found in ranks(2)(scaling.sleep_through, [[3, 0.01, 0.03], [1, 0, 0.05]]):
        assert len(found) == 2 and found[0] >= 0.16 and found[1] >= 0.1


def test_a_stage_is_timed_forward_and_backward(monkeypatch):
    """The right slice of the model, and the best of several, by a clock of our own."""
    seven, slices = chapter("07_pipeline_parallel"), []
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    class Stage(seven.Stage):
        calls = 0

        def forward(self, *given):
            self.calls += 1
            clock.now += 1 + 1 / self.calls
            slices.append([*dict(self.module.named_children())])
            return super().forward(*given)

        def backward(self, *given):
            clock.now += 3 + 1 / self.calls
            return super().backward(*given)

    monkeypatch.setattr(seven, "Stage", Stage)
    monkeypatch.setattr(scaling, "time", clock)
    for stage, own in enumerate((["embedding", "block1"], ["block2", "head"])):
        for seconds in scaling.stage_seconds(SMALL.model, 2, stage, [1, 2]).values():
            assert seconds == pytest.approx((1, 3), abs=0.1)
        assert slices[-1] == own


def test_bubbles_are_measured_with_few_and_with_many_micro_batches(monkeypatch):
    slow = lambda p, pipelines: [1.25 * scaling.pipeline_seconds(p, *one) for one in pipelines]
    monkeypatch.setattr(scaling, "asleep", slow)
    bubbles = [*scaling.measure_bubbles([2, 8])]
    assert [(bubble["ranks"], bubble["micro_batches"]) for bubble in bubbles] == [
        (2, 1), (2, 32), (8, 7), (8, 32)]
    assert [bubble["predicted"] for bubble in bubbles] == [1 / 2, 32 / 33, 7 / 14, 32 / 39]
    for bubble in bubbles:
        assert bubble["measured"] == pytest.approx(bubble["predicted"] / 1.25)
    assert " 40.0% /  50.0%" in [*scaling.lines_of_bubbles(bubbles)][3]


@pytest.mark.parametrize(("late", "lost"), [(1, None), (1.5, "28.6%")])
def test_the_best_micro_batch_is_found(monkeypatch, late, lost):
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
    *_, last = scaling.lines_of_sizes(sizes, 4)
    assert lost in last if lost else "%" not in last


# ------------------------------------------------------------------------------------ the program


def test_the_program_measures_what_it_is_asked_for(tmp_path, monkeypatch, capsys):
    check = {"name": "ms", "kind": "time", "what": "ms", "amount": "", "axis": "", "measured": 1.0,
             "expected": 1.0, "ok": False}  # fmt: skip
    points = [{"axis": "pp", "scaling": of, "ranks": 1, "tokens": 64, "seconds": 0.2,
               "predicted": {"matmul": 0.1}, "asleep": True} for of in scaling.SCALING]
    run = {"recorded": {"overlap": []}, "checks": [check]}
    monkeypatch.setattr(scaling, "measure_axes", lambda axes, worlds: iter(
        [None, *points] if (axes, worlds) == (["pp"], [1, 2, 4]) else []))
    monkeypatch.setattr(scaling, "measure_overlap", lambda n: (f"on {n} ranks\n", run))
    flags = f"--only overlap pp --ranks 4 --json={tmp_path}/a/run.json"
    assert scaling.main(shlex.split(flags)) == 1
    [run] = read_runs([tmp_path / "a/run.json"])
    assert run["recorded"].keys() == {"nproc", "axes", "overlap"} and run["world_size"] == 4
    assert run["recorded"]["axes"] == points and run["checks"] == [check]
    output = capsys.readouterr().out
    assert "on 4 ranks\n" in output and "320 /    640" in output and "asleep" in output


@pytest.mark.parametrize("flags", ["--only dq", "--ranks 3", "--json x.txt",
                                   "--asleep [[0,1,1]]", "--asleep []"])
def test_a_bad_argument_costs_one_line(capsys, monkeypatch, tmp_path, flags):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        scaling.main(shlex.split(flags))
    output = capsys.readouterr()
    assert not output.out and re.fullmatch(
        f"error: {flags.split()[0]}: .* would work\n", output.err), output.err


@pytest.mark.full
def test_the_figure_shows_what_was_measured():
    from lab.bench import scaled

    points = [{"axis": "dp", "scaling": of, "ranks": n, "tokens": 64 * n, "seconds": 0.2 * n,
               "predicted": {"matmul": 0.1 * n}, "asleep": False}
              for of in scaling.SCALING for n in (1, 2, 4)]  # fmt: skip
    run = {"chapter": "scaling", "variant": "scaling", "recorded": {"nproc": 2, "axes": points}}
    measured, predicted, _ = scaled.draw([run]).axes[0].lines
    assert [*measured.get_ydata()] == pytest.approx([320, 160, 80])
    assert [*predicted.get_ydata()] == pytest.approx([640, 320, 160])
