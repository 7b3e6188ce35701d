"""lab/tour.py: what runs, in which order, and what is left when a run doesn't end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lab import chapters, launch, tour
from lab.tour import Stop
from tests.conftest import ROOT, chapter

# ---------------------------------------------------------------------------------- what there is


def test_every_chapter_is_seen_and_02_comes_first():
    assert tour.rooms()[0] == "02" and {*tour.rooms()} == {*chapters.ROOMS} - {"kernels"}
    names = [stop.name for room in tour.rooms() for stop in tour.stops_of(room) if stop.name]
    assert len({*names}) == len(names)


def test_every_run_is_accepted_on_its_ranks():
    stops = [stop for room in tour.rooms() if room != "10" for figures in (False, True)
             for stop in tour.stops_of(room, figures)
             if "--resume" not in stop.words]
    assert len(stops) > 25
    for stop in stops:
        program, *flags = stop.words.split()
        module = chapter(program.removesuffix(".py"))
        args = launch.parse(module, flags)
        module.requires(args, max(stop.ranks, 1))


def test_a_bad_word_costs_one_line(capsys):
    for words, says in (["2"], "02"), (["--figure"], "--figure"):
        with pytest.raises(SystemExit) as leaving:
            tour.main(words)
        output = capsys.readouterr()
        assert leaving.value.code == 2 and not output.out
        [line] = output.err.splitlines()
        assert line.startswith("error: ") and says in line


def test_the_table_and_the_figures_are_of_what_is_done():
    stops = [stop for room in ("02", "00", "08", "checkpoints") for stop in tour.stops_of(room)]
    table, figures = tour.drawing(stops, Path("runs"), "out")
    assert figures[-1] == "--out=out" and "runs/02_data_parallel-naive.json" in figures
    assert {*table[2:]} - {*figures} == {"runs/03_zero-again.json", "runs/09_5d-again.json"}
    assert "runs/00_collectives.json" in figures
    assert tour.drawing(tour.stops_of("10"), Path("runs"), "out") == []


# ------------------------------------------------------------------------------------- how it goes


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, capfd):
    """A rank that waits for one that has failed is ended."""
    monkeypatch.setattr(tour, "ROOT", tmp_path)
    (tmp_path / "ill.py").write_text(
        "import os, time\nassert os.environ['RANK'] == '0'\ntime.sleep(3600)\n")
    (tmp_path / "late.py").write_text("print('this is late')\n")
    stops = [Stop(name, "a program", 1, ranks=2) for name in ("ill.py", "late.py")]
    assert tour.tour(stops, Path("runs"), "runs") == 1
    output = capfd.readouterr().out
    assert output.count("this is late") == 2 and "AssertionError" in output
    assert "ill.py" in output.splitlines()[-1]
    assert "$ torchrun --standalone --nproc_per_node=2 late.py\n" in output


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_running(tmp_path, number):
    (tmp_path / "runs").mkdir()
    (tmp_path / "done.py").write_text("")
    (tmp_path / "sleeps.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, 'asleep-' + "
        "os.environ['RANK']).touch()\ntime.sleep(3600)\n")
    lines = f"""if __name__ == "__main__":
    from pathlib import Path
    from lab import tour
    from lab.tour import Stop
    from lab.run import commands
    tour.ROOT = Path({str(tmp_path)!r})
    stops = [Stop("done.py", "", 1, name="02_done", ranks=0),
             Stop("sleeps.py", "", 1, ranks=2)]
    commands.program(lambda: tour.tour(stops, Path("runs"), "runs"))
"""
    (tmp_path / "main.py").write_text(lines)
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen([sys.executable, tmp_path / "main.py"], stdout=out, stderr=out,
                                   env=os.environ | {"PYTHONPATH": str(ROOT)})
    said, end = tmp_path / "out", time.monotonic() + 200
    while len([*tmp_path.glob("asleep-*")]) < 2:
        assert process.poll() is None and time.monotonic() < end, said.read_text()
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    process.send_signal(number)
    assert process.wait(100) == 128 + number, said.read_text()
    _, alive = psutil.wait_procs(started, timeout=100)
    assert not alive
    assert "python -m lab.pictures runs/02_done.json --out=runs" in said.read_text()
