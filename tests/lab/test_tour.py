"""lab/tour.py: what runs, in which order, what is told, and what stays when a run does not end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lab import chapters, tour
from lab.bench import ranks
from lab.bench.stop import Stop
from lab.cli import strict
from tests.conftest import ROOT, chapter

TRAIN = [stop for room in tour.rooms() if room != "10" for figures in (False, True)
         for stop in tour.stops_of(room, figures)
         if not stop.words.startswith("-m") and "--resume" not in stop.words]
PRINTS = Stop("prints.py", "a program that prints", 1, ranks=2, drawn_on=None)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """program("name.py", lines): a file in a folder where the tour runs."""
    monkeypatch.setattr(tour, "ROOT", tmp_path)

    def write(name, lines):
        (tmp_path / name).write_text(lines)
        return PRINTS._replace(words=name)

    return write


# ---------------------------------------------------------------------------------- what there is

def test_every_chapter_is_seen_and_02_comes_first():
    assert tour.rooms()[0] == "02" and {*tour.rooms()} == {*chapters.ROOMS} - {"kernels"}
    names = [stop.name for room in tour.rooms() for stop in tour.stops_of(room) if stop.name]
    assert len({*names}) == len(names)
    assert sum(stop.by_torchrun for room in tour.rooms() for stop in tour.stops_of(room)) == 1


@pytest.mark.parametrize("stop", TRAIN, ids=[f"{stop.words} on {stop.ranks}" for stop in TRAIN])
def test_a_run_is_accepted_on_its_ranks(stop):
    program, *flags = stop.words.split()
    module = chapter(program.removesuffix(".py"))
    args = strict.parse(module.__file__, "", module.VARIANTS, getattr(module, "flags", None), flags)
    module.requires(args, max(stop.ranks, 1))


def test_what_is_typed_is_what_runs():
    assert ranks.typed(["02_x.py", "--steps=3"], 4) == (
        "torchrun --standalone --nproc_per_node=4 02_x.py --steps=3")
    assert ranks.typed(["10_x.py"]) == "python 10_x.py"
    assert ranks.torchrun(["02_x.py"], 4)[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "02_x.py"]


def test_time_left_is_scaled_by_what_runs_have_taken(monkeypatch):
    progress = tour.Progress([PRINTS._replace(seconds=10)] * 10)
    now = progress.begun
    monkeypatch.setattr(tour.time, "monotonic", lambda: now)
    progress.next()
    assert 100 <= progress.left() < 110
    now += 100
    progress.at = 5
    progress.next()                                     # five have taken twice as long
    assert 95 < progress.left() < 110 and f"{progress}" == "6 of 10, about 2 minutes left"
    now += 5
    assert 90 < progress.left() < 105
    now += 1000
    assert 70 < progress.left() < 90                    # the others


@pytest.mark.parametrize(("words", "says"), [
    (["99"], "99 is no stop of the tour"), (["2"], "02 in place of 2 would work"),
    (["--figure"], "without --figure would work"), ([""], "would work")])
def test_a_bad_word_costs_one_line(capsys, words, says):
    with pytest.raises(SystemExit) as leaving:
        tour.main(words)
    output = capsys.readouterr()
    assert leaving.value.code == 2 and not output.out
    [line] = output.err.splitlines()
    assert line.startswith("error: ") and says in line


# ------------------------------------------------------------------------------------- how it goes

def test_a_run_that_fails_is_named_and_the_others_go_on(program, capfd):
    stops = [program("well.py", "print('this is well')\n"),
             program("ill.py", "import os\nprint('ill')\nassert os.environ['RANK'] == '0'\n"),
             program("late.py", "print('this is late')\n")]
    assert tour.tour(stops, Path("runs"), "runs") == 1
    output = capfd.readouterr().out
    assert output.count("this is well") == output.count("this is late") == 2
    assert "AssertionError" in output and "ill.py has failed: status 1" in output
    assert output.endswith("1 of 3 runs have failed: ill.py\n")
    assert "[2 of 3, about " in output
    assert "$ torchrun --standalone --nproc_per_node=2 well.py\nthis is well" in output


def test_a_rank_that_waits_for_one_that_has_failed_is_ended(program, capfd):
    stop = program("waits.py", "import os, time\nassert os.environ['RANK'] == '0'\n"
                               "time.sleep(60)\n")
    begin = time.monotonic()
    assert tour.tour([stop], Path("runs"), "runs") == 1
    assert time.monotonic() - begin < 45 and "waits.py has failed" in capfd.readouterr().out


def test_the_table_and_the_figures_are_of_what_is_done():
    stops = [stop for room in ("02", "00", "08", "checkpoints") for stop in tour.stops_of(room)]
    table, figures = tour.drawing(stops, Path("runs"), "out")
    assert table[:2] == ["-m", "lab.report"] and figures[:2] == ["-m", "lab.pictures"]
    assert figures[2:] == [*(f"runs/{name}.json" for name in (
        "00_collectives", "00_speed", "02_data_parallel", "02_data_parallel-naive",
        "02_data_parallel-overlap", "08_expert_parallel", "08_expert_parallel-none",
        "08_expert_parallel-loss", "08_expert_parallel-bias")), "--out=out"]
    assert {*table[2:]} - {*figures} == {"runs/03_zero-again.json", "runs/09_5d-again.json"}
    assert "runs/00_speed.json" not in table
    assert tour.drawing(tour.stops_of("10"), Path("runs"), "out") == []


@pytest.mark.parametrize(("rooms", "drawn"), [
    ("02", []), ("07", ["lab.animation"]), ("10 07", ["lab.animation", "lab.plans"])])
def test_some_figures_are_of_no_run(monkeypatch, rooms, drawn):
    told = []
    monkeypatch.setattr(tour, "tour", lambda stops, folder, out, more=(): told.append(more) or 0)
    assert tour.main([*rooms.split(), "--figures"]) == tour.main(rooms.split()) == 0
    assert [[words[1] for words in more] for more in told] == [drawn, []]


@pytest.mark.parametrize(("number", "by_torchrun"), [
    (signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.full)])
def test_nothing_is_left_running(tmp_path, number, by_torchrun):
    (tmp_path / "runs").mkdir()
    (tmp_path / "done.py").write_text("")
    (tmp_path / "sleeps.py").write_text("import time\nprint('asleep', flush=True)\n"
                                        "time.sleep(600)\n")
    lines = f"""if __name__ == "__main__":
    from pathlib import Path
    from lab import tour
    from lab.bench.stop import Stop
    from lab.cli import commands
    tour.ROOT = Path({str(tmp_path)!r})
    stops = [Stop("done.py", "", 1, name="02_done", ranks=0),
             Stop("sleeps.py", "", 1, ranks=2, by_torchrun={by_torchrun})]
    commands.program(lambda: tour.tour(stops, Path("runs"), "runs"))
"""
    (tmp_path / "main.py").write_text(lines)
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen([sys.executable, tmp_path / "main.py"], stdout=out, stderr=out,
                                   env=os.environ | {"PYTHONPATH": str(ROOT)})
    said = tmp_path / "out"
    end = time.monotonic() + 100
    while said.read_text().count("asleep\n") < 2 and time.monotonic() < end:
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 3, said.read_text()
    process.send_signal(number)
    assert process.wait(30) == 128 + number, said.read_text()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    assert "python -m lab.pictures runs/02_done.json --out=runs" in said.read_text()
