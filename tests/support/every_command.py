"""Every command of the project, as tests/support/trials.py tries it.

A chapter's entry is made from its name. A command with work of its own, `python -m lab.NAME` or a
file of benchmarks/, has its lines in the table below: what it calls once nothing is refused, what
takes that place where it would take long, and what it reads and writes.
"""

import functools
import gc
import json
import types
from functools import partial
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from PIL import Image

from benchmarks import (
    draw_batch,
    draw_fp8,
    gpu,
    time_chapters,
    time_checkpoints,
    time_collectives,
    time_kernels,
    time_muon,
)
from lab import (
    animation,
    asleep,
    faults,
    formats,
    here,
    notebook,
    pictures,
    plans,
    questions,
    rehearse,
    scaling,
    schedules,
    sharding,
    speed,
    syllabus,
    tour,
    warps,
)
from lab import types as lab_types
from lab.bench import runs
from lab.classroom import bundle, exercises, grade, hunt, predict, sheets
from lab.classroom import questions as of_predictions
from lab.classroom.grading import RIGHT, Result
from lab.cli import commands
from lab.museum import __main__ as museum
from lab.page import __main__ as page
from lab.planner import planning
from tests import conftest
from tests.conftest import CHAPTERS, ROOT, SMALL, TEXT, chapter_names, training_chapters
from tests.support import trials
from tests.support.trials import Command

SHORT = *SMALL, "--steps=1", "--data=text", "--no-verify"
FILES = {"text": Path(TEXT).read_bytes}


def typed():
    """The names of all commands that are here: what a reader types."""
    lab = ROOT / "lab"
    modules = [*(path.stem for path in lab.glob("*.py") if path.stem != "__init__"),
               *(path.parent.name for path in lab.glob("*/__main__.py"))]
    files = [*CHAPTERS.glob("[0-9][0-9]_*.py"),
             *(path for path in ROOT.glob("benchmarks/*.py") if "__main__" in path.read_text())]
    return sorted([*(f"python -m lab.{name}" for name in modules),
                   *(f"python {path.name}" for path in files)])


# ------------------------------------------------------------------------------------ the chapters


def run_chapter(name):
    """As a program."""
    try:
        return conftest.main(conftest.chapter(name), None)
    finally:
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()


def of_chapter(name):
    return Command(
        (CHAPTERS / f"{name}.py",), partial(run_chapter, name), SHORT, files=FILES,
        stops_at=["common.Run.__init__"], reads={"--data": "text", "--resume": "ours"},
        writes={"--json": "run.json", "--plot": "figure.png", "--profile": "trace.json",
                "--save": "checkpoints"}, prints="per rank and step")  # fmt: skip


def without_model(name):
    return Command(
        (CHAPTERS / f"{name}.py",), partial(run_chapter, name), ["--numbers=3"],
        stops_at=["lab.bench.bench.Bench.meet"], writes={"--json": "run.json",
                                                         "--plot": "figure.png"},
        prints="each rank's tensor")  # fmt: skip


WITHOUT_MODEL = [name for name in chapter_names() if name not in training_chapters()]
ON_RANKS = [*map(of_chapter, training_chapters()), *map(without_model, WITHOUT_MODEL)]
PLANNER = Command(
    [CHAPTERS / "10_planner.py"], lambda: planning.program(conftest.chapter("10_planner")),
    ["--gpus=8"], stops_at=["lab.planner.planning.print_plans"],
    writes={"--json": "plan.json"}, prints="layouts")  # fmt: skip


@functools.cache
def a_run():
    """The JSON of one. Where CHAPTERS has no such chapter, the test is skipped here."""
    name = "02_data_parallel"
    command, _ = of_chapter(name), conftest.chapter(name)
    with trials.working_folder(command):
        status = trials.call(command, [*SHORT, "--json=run.json"], {}, None, None)
        assert status == 0
        return Path("run.json").read_bytes()


# ------------------------------------------------------------------------ in place of their work


def both_parts(folder, args, deadline):
    """Of lab.faults, without a kill."""
    print("in one layout: 240 steps ✓")
    return [{"name": "losses", "measured": 0, "expected": 0, "ok": True}] * 2, {}


def a_hunt():
    """As lab.hunt writes it."""
    return hunt.text_of(hunt.draw("06", 1), "06", 1, "easy").encode()


def an_exercise():
    """As lab.exercises writes it."""
    return exercises.with_holes("04_tensor_parallel").encode()


def a_result(*given):
    return [Result("04.7", "ranks_that_pay", RIGHT, "", 2, 0.0, share=1)]


def marked():
    """Predictions."""
    return json.dumps([{"student": "ada", "chapter": "04", "right": 4, "of": 5}]).encode()


def a_sheet():
    """As lab.predict writes it."""
    case, asked = of_predictions.questions("02_data_parallel", 1)
    return sheets.as_markdown(case, asked, 1, None).encode()


def chapters_on_this_machine(ranks, device):
    return [("04_tensor_parallel", ranks, "tp 4", 1.0, {"matmuls": 1.0})]


class NoServer:
    """Of lab.page, which somebody ends at once."""

    address = "http://127.0.0.1:1/"

    def serve_forever(self):
        raise KeyboardInterrupt


def on_a_rank(main):
    """A command that torchrun starts, as the first of two ranks."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with mock.patch.dict("os.environ", ranks):
        return commands.program(main)


def measure_pair(ranks, *sides, **clocked):
    """Of benchmarks/time_chapters.py."""
    return {"ms": [[1, 2, 3]] * 2, "alone": 1, "longest": [1, 1]}


def measure_saves(*what):
    """Of benchmarks/time_checkpoints.py."""
    save = {"before": [0.1], "during": [0.2], "waits": 0.1, "on disk": 0.2}
    return {"ours": [save] * 2, "theirs": [0.2] * 2, "bytes": (1, 1), "parameters": 1}


def measure_rings(args):
    """Of benchmarks/time_collectives.py."""
    calls = [[0.1, 0.1]] * (time_collectives.SETUP_CALLS + 2)
    sides = (time_collectives.RING, time_collectives.TORCH, time_collectives.MESSAGES,
             time_collectives.SUMS)
    return {"1024": dict.fromkeys(sides, calls)}


def measure_muons(*what):
    """Of benchmarks/time_muon.py."""
    return dict.fromkeys(("in bf16", "in fp32", "PyTorch's"), [1.0, 2.0])


def train_in_8_bits(steps, *run):
    """Of benchmarks/draw_fp8.py."""
    return types.SimpleNamespace(losses=[1.0] * steps)


ROWS = {
    "pointwise": {"what": "ELU", "width": 64, "chain": 1.0, "eager": 1.0, "compile": 1.0,
                  "copy": 1.0, "kernel": 1.0},
    "attention": {"what": "full", "head dim": 16, "sequence": 64, "kernel": 1.0,
                  **dict.fromkeys(time_kernels.BACKENDS, 1.0)},
    "matmuls": {"what": "matmul", "size": 64, "kernel": 1.0, "cuBLAS": 1.0, "along": 1.0,
                "down": 1.0},
    "products": {"what": "product", "size": 64, "kernel": 1.0, "scaled_mm": 1.0, "bf16": 1.0},
}  # fmt: skip


def kernels_without_a_gpu():
    """benchmarks/time_kernels.py, as if there were one."""
    with mock.patch.object(time_kernels, "DEVICE", "cpu"):
        return commands.program(time_kernels.main)


def figure_of_plans(what):
    """The rooms' figures; that of chapter 10 takes half a minute."""
    def savefig(file, **how):
        Image.new("RGB", (1, 1)).save(file, "PNG")

    figure = types.SimpleNamespace(savefig=savefig)
    return {"10": types.SimpleNamespace(draw=lambda: figure)}


# -------------------------------------------------------------------------------------- the table


def lab(name, main, legal=(), words=(), **more):
    return Command(["-m", f"lab.{name}"], partial(commands.program, main), legal, words, **more)


def benchmark(module, legal, measure, stops_at="measure", prints=None):
    """One that prints a table of what it has measured: on ranks, unless it prints before."""
    path, name = ROOT / "benchmarks" / Path(module.__file__).name, module.__name__
    return Command([path], partial(commands.program, module.main), legal, prints=prints,
                   stops_at=[f"{name}.measure", f"{name}.{stops_at}"],
                   work={f"{name}.measure": measure})


KERNELS = Command(
    [ROOT / "benchmarks/time_kernels.py"], kernels_without_a_gpu, ["--out=runs/new"],
    writes={"--out": "runs"},
    stops_at=["benchmarks.time_kernels.pointwise", "benchmarks.time_kernels.tune"],
    work={f"benchmarks.time_kernels.{name}": partial(list, [row]) for name, row in ROWS.items()},
    starts=False)
WARPS = lab(
    "warps", warps.main, stops_at=["lab.warps.report"], writes={"--plot": "warps.png"},
    starts=False,
    work={"lab.warps.of_kernels": lambda *given: [], "lab.warps.of_orders": lambda *given: [],
          "lab.warps.draw": lambda matmul: figure_of_plans("")["10"].draw()})
SPEED_ON_RANKS = Command(
    ["-m", "lab.speed"], partial(on_a_rank, speed.main), ["--device=cpu"],
    stops_at=["lab.bench.meeting.join"], writes={"--json": "run.json"}, starts=False)
ASLEEP_ON_RANKS = Command(
    ["-m", "lab.asleep"], partial(on_a_rank, asleep.main), stops_at=["lab.bench.meeting.join"],
    writes={"--json": "run.json"}, starts=False)
OTHERS = [
    lab("animation", animation.main, stops_at=["lab.animation.draw"],
        writes={"--out": "pipeline.svg"}, starts=False),
    lab("bundle", bundle.main, ["--out=bundle"], stops_at=["lab.classroom.bundle.write"],
        work={"lab.classroom.bundle.write": lambda *given, **more: None},
        writes={"--out": "bundle"}, starts=False),
    lab("exercises", exercises.main, words=["04"]),
    lab("exercises", exercises.main, ["--write=exercises"], writes={"--write": "exercises"},
        stops_at=["lab.classroom.exercises.write"],
        work={"lab.classroom.exercises.write": lambda *given: []}),
    lab("faults", faults.main, ["--kills=1"], stops_at=["lab.faults.both_parts"],
        work={"lab.faults.both_parts": both_parts}, writes={"--json": "run.json"}, prints=None),
    lab("formats", formats.main, ["--steps=1"], stops_at=["lab.formats.train"],
        work={"lab.formats.train": lambda *given, **seen: [1.0],
              "lab.formats.small_moments": lambda args: []}, writes={"--out": "formats.png"}),
    lab("grade", grade.main, ["--limit=1"], ["."], files={"04_tensor_parallel.py": an_exercise},
        stops_at=["lab.classroom.grade.grade_all"],
        work={"lab.classroom.grade.grade": lambda *given: []}, reads={"folder": "ours"},
        writes={"--csv": "grades.csv", "--json": "results.json", "--junit": "results.xml"}),
    lab("grade", grade.main, ["--predictions=marked.json", "--csv=grades.csv"], [".", "04.7"],
        files={"04_tensor_parallel.py": an_exercise, "marked.json": marked},
        stops_at=["lab.classroom.grade.grade_all"], reads={"--predictions": "ours"},
        work={"lab.classroom.grade.grade": a_result}, starts=False),
    lab("grade", grade.main, ["--similar"], ["."], reads={"folder": "ours"},
        files={"04_tensor_parallel.py": an_exercise}, stops_at=["lab.classroom.similar.report"],
        work={"lab.classroom.similar.report": lambda *given: ["nobody"]}),
    lab("here", here.main, ["--ranks=4"], stops_at=["lab.here.compare"],
        work={"lab.here.compare": chapters_on_this_machine}, writes={"--json": "here.json"}),
    lab("hunt", hunt.main, ["--seed=1"], ["06"], stops_at=["lab.classroom.hunt.write"],
        work={"lab.classroom.hunt.noticed": lambda exhibit: ""}, writes={"--out": "hunts"},
        starts=False),
    lab("hunt", hunt.main, ["--for=ada"], ["06"], stops_at=["lab.classroom.hunt.write"],
        work={"lab.classroom.hunt.noticed": lambda exhibit: ""}, writes={"--out": "hunts"},
        starts=False),
    lab("hunt", hunt.main, ["--reveal=hunt.py"], files={"hunt.py": a_hunt},
        stops_at=["lab.classroom.hunt.reveal"], reads={"--reveal": "ours"}, starts=False),
    lab("hunt", hunt.main, ["--grade=hunt.py", "--secret=monday"], files={"hunt.py": a_hunt},
        stops_at=["lab.classroom.hunt.grade"], reads={"--grade": "ours"},
        work={"lab.classroom.hunt.grade": lambda *given: (hunt.MENDED, [])}, starts=False),
    lab("museum", museum.main, words=["06"], stops_at=["lab.museum.__main__.play_all"],
        work={"lab.museum.__main__.play_all": lambda *given: []},
        writes={"--json": "museum.json", "--out": "museum.png"}),
    lab("notebook", notebook.main, ["--repository=https://example.org/course"],
        stops_at=["lab.notebook.text_of"], writes={"--out": "fivefold.ipynb"}, starts=False),
    lab("page", page.main, ["--port=0"],
        stops_at=["lab.page.__main__.listen", "lab.page.export.write"],
        work={"lab.page.__main__.listen": lambda port: NoServer(),
              "lab.page.answers.warm_up": lambda: None}),
    lab("page", page.main, ["--out=site"], stops_at=["lab.page.export.write"],
        work={"lab.page.export.write": lambda path: (1, None)}, writes={"--out": "site"},
        starts=False),
    lab("pictures", pictures.main, words=["run.json"], files={"run.json": a_run},
        stops_at=["lab.pictures.draw"], reads={"runs": "ours"}, writes={"--out": "figures"}),
    lab("plans", plans.main, words=["10_planner"], stops_at=["lab.plans.rooms_with"],
        writes={"--out": "plans"}, work={"lab.plans.rooms_with": figure_of_plans}),
    lab("predict", predict.main, ["--seed=1"], ["02"], stops_at=["lab.classroom.predict.ask"],
        work={"lab.classroom.predict.ask": lambda case, asked: 0}),
    lab("predict", predict.main, ["--for=ada", "--export=sheet.md"], ["02"],
        stops_at=["lab.classroom.sheets.write"], writes={"--export": "sheet.md"}),
    lab("predict", predict.main, ["--mark=sheet.md", "--seed=1"], ["02"], files={
        "sheet.md": a_sheet}, reads={"--mark": "ours"}, writes={"--json": "marks.json"},
        stops_at=["lab.classroom.sheets.mark"]),
    lab("questions", questions.main, ["--seed=003"], stops_at=["lab.questions.print_text"]),
    lab("rehearse", rehearse.main, ["--ranks=2", *SMALL, "--data=text"], ["02_data_parallel.py"],
        files=FILES, stops_at=["lab.bench.rehearsal.rehearse"],
        writes={"--json": "run.json", "--plot": "memory.png"}),
    lab("report", runs.main, words=["run.json"], files={"run.json": a_run}, reads={"runs": "ours"}),
    lab("scaling", scaling.main, ["--ranks=2"], stops_at=["lab.scaling.measure"],
        work={"lab.scaling.measure": lambda *given: (print("asleep ✓"), ({}, []))[1]},
        writes={"--json": "scaling.json"}),
    lab("schedules", schedules.main, ["--ranks=2"], ["1f1b"],
        stops_at=["lab.schedules.simulate"]),
    lab("schedules", schedules.main, ["--ranks=1", "--sleep=10"], ["1f1b"],
        stops_at=["lab.schedules.sleep_through"], writes={"--json": "run.json"},
        work={"lab.schedules.sleep_through": lambda *given: (0, [])}),
    lab("sharding", sharding.main, ["--mesh=X=2"], ["A[I_X, J] B[J, K]"],
        stops_at=["lab.sharding.report"]),
    lab("speed", speed.main),
    lab("types", lab_types.main, ["--ranks=2", *SMALL, "--data=text"], ["02_data_parallel.py"],
        files=FILES, stops_at=["lab.typecheck.command.check"], writes={"--json": "types.json"}),
    lab("syllabus", syllabus.main, words=["3"], stops_at=[
        "lab.syllabus.lines_of", "lab.syllabus.slides.write", "lab.syllabus.pages.write"]),
    lab("syllabus", syllabus.main, ["--slides=slides"], ["3"],
        stops_at=["lab.syllabus.slides.write"],
        work={"lab.syllabus.slides.write": lambda weeks, folder: [folder]},
        writes={"--slides": "slides"}),
    lab("syllabus", syllabus.main, ["--pages=pages"], stops_at=["lab.syllabus.pages.write"],
        work={"lab.syllabus.pages.write": lambda folder: [folder]}, writes={"--pages": "pages"},
        starts=False),
    lab("tour", tour.main, ["--first"], ["02"], stops_at=["lab.tour.tour"],
        work={"lab.tour.tour": lambda *given: print("done")}, starts=False),
    WARPS,
    SPEED_ON_RANKS,
    ASLEEP_ON_RANKS,
    benchmark(time_chapters, ["--only=01"], measure_pair, stops_at="asleep"),
    benchmark(time_checkpoints, ["--only=09"], measure_saves),
    benchmark(time_collectives, ["--calls=4"], measure_rings),
    benchmark(time_muon, ["--steps=4"], measure_muons, prints="\n"),
    Command([ROOT / "benchmarks/draw_batch.py"], partial(commands.program, draw_batch.main),
            ["--largest=64"], stops_at=["benchmarks.draw_batch.train"],
            writes={"--out": "batch.png"}, work={
                "benchmarks.draw_batch.train": lambda *given: (True, 20, [(4.0, 2.0)] * 20),
                "benchmarks.draw_batch.draw": lambda *given: 0}, starts=False),
    Command([ROOT / "benchmarks/draw_fp8.py"], partial(commands.program, draw_fp8.main),
            ["--steps=100"], stops_at=["benchmarks.draw_fp8.train"], writes={"--out": "fp8.png"},
            work={"benchmarks.draw_fp8.train": train_in_8_bits,
                  "benchmarks.draw_fp8.draw": lambda *given: 0,
                  "benchmarks.draw_fp8.input_of_down": lambda run: 0}, starts=False),
    Command([ROOT / "benchmarks/gpu.py"], partial(commands.program, gpu.main), ["--device=cpu"],
            stops_at=["benchmarks.gpu_machine.asked_another_process"], starts=False,
            work={"benchmarks.gpu_play.play_all": lambda *given: print("done")}),
    KERNELS,
]
