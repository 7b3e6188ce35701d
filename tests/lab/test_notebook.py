"""lab/notebook.py: the notebook as a stranger runs it, without an answer and with one."""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from lab import ROOT, hunt, notebook
from lab.chapters import chapter

OF_THE_COURSE = "*.py", "lab", "kernels", "requirements.txt"  # what the notebook needs
HOLE = ('    # TODO: make the .grad of each trained parameter the sum over all ranks\n'
        '    raise NotImplementedError("02.1: Naive.finish")\n')
NOTHING_CHANGED = 'wrong = ""\nright = ""\n'
GPUS = "gpus = torch.cuda.device_count()\n"


def code_cells(repository=""):
    return ["".join(cell["source"]) for cell in notebook.notebook(repository)["cells"]
            if cell["cell_type"] == "code"]


# ----------------------------------------------------------------------------------------- the file


def test_the_committed_notebook_is_what_is_written_now():
    committed = json.loads((ROOT / "fivefold.ipynb").read_text(encoding="utf-8"))
    assert committed == notebook.notebook(""), "python -m lab.notebook writes it again"
    assert all("\n".join(code_cells()).count(one) == 1 for one in (HOLE, NOTHING_CHANGED, GPUS))


def test_it_has_no_solution():
    text = notebook.SOURCE.read_text(encoding="utf-8")
    for line in inspect.getsource(chapter("02").Naive.finish).splitlines()[1:]:
        assert line.strip() not in text


# ----------------------------------------------------------------------------------- the first cell


def test_without_an_address_and_outside_the_course_it_asks_for_one(tmp_path):
    run = subprocess.run([sys.executable, "-c", code_cells()[0]], cwd=tmp_path, text=True,
                         capture_output=True)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
    assert not [*tmp_path.iterdir()]


def test_in_a_checkout_it_installs_what_is_missing_and_leaves_torch_alone(monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT / "lab/classroom")
    started, find_spec, missing = [], importlib.util.find_spec, ["psutil", "numpy"]
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name: None if name in missing else find_spec(name))
    monkeypatch.setattr(metadata, "version", lambda name: "2.11.0+cpu")
    monkeypatch.setattr(subprocess, "run", lambda words, check: started.append(words))
    exec(code_cells("https://example.org/course")[0], {})
    assert Path.cwd() == ROOT
    [[*pip, one, other]] = started
    assert pip == [sys.executable, "-m", "pip", "install", "--quiet"]
    assert one.startswith("numpy") and other.startswith("psutil")
    monkeypatch.setattr(metadata, "version", lambda name: "2.9.1+cu128")
    with pytest.raises(SystemExit, match="2.9.*2.11"):
        exec(code_cells("https://example.org/course")[0], {})


# ---------------------------------------------------------------------------------------- executed


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The working tree, as a repository to clone."""
    folder = tmp_path_factory.mktemp("course")
    git = lambda where, *words: subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=where, check=True,
        capture_output=True, text=True).stdout
    try:
        listed = git(ROOT, "ls-files", "-zco", "--exclude-standard", "--", *OF_THE_COURSE)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "the course")
    return folder


@pytest.fixture
def executed(repository, tmp_path, monkeypatch):
    """executed(changes): what each cell prints when all of them run in an empty folder. changes:
    {a piece of a cell: what a reader writes instead}."""
    nbclient, nbformat = map(pytest.importorskip, ("nbclient", "nbformat"))
    pytest.importorskip("ipykernel")
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager

    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "empty").mkdir()

    def run(changes):
        written = nbformat.reads(notebook.text_of(str(repository)), as_version=4)
        cells = [cell for cell in written.cells if cell.cell_type == "code"]
        for old, new in changes.items():
            [cell] = [cell for cell in cells if old in cell.source]
            cell.source = cell.source.replace(old, new)
        # Where no kernel is registered, "python3" is the interpreter that runs this.
        kernel = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        nbclient.NotebookClient(written, km=kernel, timeout=600, resources={
            "metadata": {"path": tmp_path / "empty"}}).execute(cleanup_kc=True)
        return [*map(printed, cells)]

    return run


def printed(cell):
    return "".join(output.get("text") or " ".join(output.get("data", ()))
                   for output in cell.outputs).replace("\r", "")


def check_runs(bucket, naive, figure, shown):
    """What torchrun starts, and what is drawn of it."""
    for run, calls in ((bucket, "3"), (naive, "44")):
        assert "4 ranks" in run and "same as one GPU" in run and "✗" not in run
        [line] = [line for line in run.splitlines() if "all_reduce, calls" in line]
        assert line.split()[2:] == [calls, calls, "✓"]
    assert "image/png" in figure
    assert "NOT the same as one GPU" in shown and "→" in shown


@pytest.mark.full
def test_all_of_it_runs_as_it_is(executed):
    outputs = executed({})
    _, bucket, naive, figure, _, answer, _, planted, shown, read, mended, gpus = outputs
    check_runs(bucket, naive, figure, shown)
    assert "torchrun" in planted and hunt.draw("02", 6).new in read
    assert "not begun" in answer and "✗" in mended and gpus
    assert not [one for one in outputs if one is not shown and "Traceback" in one]


@pytest.mark.full
def test_with_answers_the_exercise_is_right_and_the_bug_is_mended(executed):
    """And two ranks train as they would on two GPUs."""
    solution = inspect.getsource(chapter("02").Naive.finish).partition("\n")[2]
    exhibit = hunt.draw("02", 6)
    outputs = executed({
        HOLE: textwrap.indent(textwrap.dedent(solution), "    "),
        NOTHING_CHANGED: f"wrong = {exhibit.new!r}\nright = {exhibit.old!r}\n",
        GPUS: "gpus = 2\n"})
    _, bucket, naive, figure, _, answer, _, _, shown, _, mended, gpus = outputs
    check_runs(bucket, naive, figure, shown)
    assert re.search(r"02\.1 .* ✓", answer) and "✓" in mended
    assert "2 ranks" in gpus and "same as one GPU" in gpus and "✗" not in gpus
