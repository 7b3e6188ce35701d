"""lab.scaling: α and B of made-up times, and a prediction of the run that is measured."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import torch.distributed as dist

from lab import launch, scaled, scaling
from lab.chapters import chapter as ours
from lab.run.runs import read_runs
from tests.conftest import TEXT, chapter, run_main

RATES = {"flops": 5e10, "memory": 2e10, "alpha": 3e-4, "beta": 1 / 1.5e9}


# ----------------------------------------------------------------------------- the α-β model


def test_the_fit_finds_what_times_are_made_of():
    chapter("00_collectives")  # or skip
    costs = [scaling.cost(name, 8, 4**k) for name in (*scaling.KINDS, "PyTorch")
             for k in range(1, 12)]  # fmt: skip
    assert costs[0] == (7 + 3, 4 * (7 + 3)) and costs[-1] == (14, 14 * 4**11 / 8)
    times = [2e-4 * rounds + sent / 3e9 for rounds, sent in costs]
    assert scaling.fit(costs, times) == pytest.approx([2e-4, 1 / 3e9], rel=1e-9)
    noisy = [seconds * (2 if i % 2 else 0.5) for i, seconds in enumerate(times)]
    assert scaling.fit(costs, noisy) == pytest.approx([2e-4, 1 / 3e9], rel=0.3)
    falling = [2e-4 * rounds / (1 + sent / 1e6) for rounds, sent in costs]
    alpha, beta = scaling.fit(costs, falling)           # neither is below zero
    assert alpha > 1e-6 and 0 < beta < 1e-15


# ------------------------------------------------------------------------ the planner's prediction


def test_rates_make_a_cluster():
    ten, n, numbers = ours("10"), 4, 10**6
    machine = ten.Machine(scaling.cluster_of(RATES, n), ten.SOFTWARE["ours"])
    assert machine.flops == pytest.approx(5e10)
    assert machine.bandwidth == pytest.approx(1e10)     # 2 bytes for each 4 that go through
    assert 2 * machine.ring(2 * numbers, n, 1) == pytest.approx(
        2 * (n - 1) * (3e-4 + 4 * numbers / n / 1.5e9), rel=1e-6)
    alone = scaling.cluster_of(RATES | {"alpha": 0, "beta": 0}, 1)
    assert ten.Machine(alone, ten.SOFTWARE["ours"]).ring(1e9, 1, 1) == 0


def test_a_run_is_planned_as_it_runs():
    """Its flags are accepted, and its layout has as many ranks and micro-batches."""
    for axis in scaling.AXES:
        for n in scaling.WORLDS:
            file, *flags = scaling.command_of(axis, n)
            module = chapter(file.removesuffix(".py"))
            args = launch.parse(module, flags)
            module.requires(args, n)
            layout = scaling.layout_of(axis, n)
            assert layout.dp * layout.tp * layout.cp * layout.pp == n, axis
            assert scaling.BATCH % (layout.dp * layout.micro_batch) == 0, axis
            seconds = scaling.predict_seconds(axis, n, scaling.cluster_of(RATES, n))
            assert sum(seconds.values()) > 0 and (seconds.get("bubble", 0) > 0) == (
                axis == "pp" and n > 1), axis


def test_tokens_of_a_chapters_run(pool, monkeypatch, tmp_path):
    chapter("02_data_parallel")  # or skip
    model = {"layers": 2, "dim": 16, "heads": 2, "kv-heads": 2, "seq": 8, "vocab": 256}

    def run(name, *flags, world, timeout):
        *flags, file = flags
        folder = Path(file.removeprefix("--json=")).parent
        [(status, _, output), *_] = pool.call(world, 60, run_main, name[:-3],
                                              [*flags, f"--data={TEXT}"], folder)
        assert status == 0, output
        return [0], output, ""

    monkeypatch.setattr(scaling.ranks, "run", run)
    monkeypatch.setattr(scaling, "MODEL", model)
    row = scaling.measure_axis("dp", 2, scaling.cluster_of(RATES, 2))
    assert (row.what, row.unit, row.ranks, row.x) == ("dp", "tokens/s", 2, 2)
    seconds = scaling.predict_seconds("dp", 2, scaling.cluster_of(RATES, 2))
    assert row.measured > 0 and row.predicted == pytest.approx(64 / sum(seconds.values()))
    assert "%" in row.note and f"{row.predicted:,.4g}" in str(row)


# ------------------------------------------------------------------------------------- the program


def measure_rates(folder):
    """On a rank of the pool: the status, and the output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = scaling.main(["rates", f"--json={folder}/scaling.json"])
    assert not dist.is_initialized()
    return status, output.getvalue()


@pytest.fixture
def recorded(ranks, tmp_path):
    """The record of `rates`, and what is printed."""
    chapter("00_collectives")  # or skip
    (status, output), other = ranks(2)(measure_rates, tmp_path)
    assert status == 0 and other == (0, "")
    [run] = read_runs([tmp_path / "scaling.json"])
    return run, output


def test_a_table_and_a_figure_of_what_is_measured(recorded, monkeypatch, tmp_path, capsys):
    run, printed = recorded
    rates, rows = run["recorded"]["rates"], run["recorded"]["rows"]
    assert {row[0] for row in rows} == {f"all_reduce {name}" for name in
                                        ("naive", "tree", "ring", "doubling", "PyTorch")}
    assert min(rates["flops"], rates["memory"], *(row[4] for row in rows)) > 0
    assert all(row[5] == pytest.approx(1e3 * (rates["alpha"] * rounds + rates["beta"] * sent))
               for row in rows for rounds, sent in [scaling.cost(row[0].split()[1], 2, row[3])])
    assert printed.count("\n") == 6 and "all_reduce doubling" in printed

    monkeypatch.setattr(scaling, "record_of", lambda n, *words: (
        run if words[-1] == "rates" else {"step_seconds": [9.0, 9.0, 9.0, 0.5]}))
    assert scaling.main([f"--json={tmp_path}/all.json"]) == 0
    output = capsys.readouterr().out
    assert output.count("tokens/s") == len(scaling.AXES) * len(scaling.WORLDS)
    [whole] = read_runs([tmp_path / "all.json"])
    figure = scaled.draw([whole])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    panels = {title: axes.lines for title, axes in zip(titles, figure.axes) if title}
    assert {*panels} == {*scaling.AXES}   # all_reduces of 2 ranks are not shown
    measured, predicted = panels["dp"]
    assert [*measured.get_ydata()] == [8 * 128 / 0.5] * len(scaling.WORLDS)
    assert [*measured.get_xdata()] == [*predicted.get_xdata()] == [*scaling.WORLDS]
    rows = [[*row[:2], 4, *row[3:]] for row in rows]
    figure = scaled.draw([whole | {"recorded": {"rows": rows}}])
    assert len(figure.axes[0].lines) == 2 * 5 and "4 ranks" in figure.axes[0].get_title("left")


@pytest.mark.parametrize(("world", "flags", "works"), [
    (0, "rates", "torchrun"), (0, "--json x.txt", "--json scaling.json"),
    (2, "", "with rates"), (2, "rats", "rates")])
def test_a_bad_argument_costs_one_line(capsys, monkeypatch, tmp_path, world, flags, works):
    monkeypatch.chdir(tmp_path)
    if world:
        monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit, match="2"):
        scaling.main(shlex.split(flags))
    output = capsys.readouterr()
    assert not output.out and re.fullmatch(f"error: .*{works}.* would work\n", output.err), output
