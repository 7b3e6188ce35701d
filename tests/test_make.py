"""`make PY=...`: an interpreter that cannot be used costs one line, in every target. Without PY:
what .venv is set up with, and from where, by commands that only write down what they are told."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT


@pytest.fixture
def make(tmp_path):
    """make("lint", "PY=..."): status, stdout and stderr, in a folder with the Makefile, with
    commands that only say what they are called with, and with a torch to import."""
    for file in ("Makefile", *(path.name for path in ROOT.glob("requirements*.txt")), "setup.mk"):
        shutil.copy(ROOT / file, tmp_path)
    for file in ("lab/tour.py", "lab/exercises.py", "lab/grade.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("import sys; print(*sys.argv[1:], file=sys.stderr)")
    (tmp_path / "torch.py").touch()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    environment |= {"PYTHONPATH": str(tmp_path)}

    def run(*words, **more):
        done = subprocess.run(["make", "--no-print-directory", *words], cwd=tmp_path,
                              env=environment | more, capture_output=True, text=True,
                              timeout=60)
        return done.returncode, done.stdout, done.stderr

    return run


def interpreter(folder, command):
    """A shell script that is called as Python is."""
    path = folder / "python"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("target", [
    "setup", "tour", "quick", "test", "test-all", "lint", "bench", "gpu", "faults", "scaling",
    "figures", "exercises", "grade", "page", "site", "slides"])
def test_no_target_goes_on_without_the_python_it_was_given(make, tmp_path, target):
    bare = interpreter(tmp_path, f"{sys.executable} -I -S")  # sees neither our torch nor another
    for python, fault in (("/nope", "does not start a Python 3.11 or newer; PY=python3 may"),
                          (bare, "has no torch; make without PY installs it into .venv")):
        status, output, errors = make(target, f"PY={python}")
        ours, makes = errors.split("\n", 1)
        assert (status, output, ours) == (2, "", f"make: PY={python} {fault}")
        assert makes.count("***") == makes.count("\n") == 1  # make's own word


@pytest.mark.parametrize(("words", "said"), [
    (["tour"], ""), (["tour", "ONLY=02 06"], "02 06"), (["quick"], "02 --first"),
    (["figures"], "--figures"), (["figures", "ONLY=09"], "--figures 09")])
def test_the_path_of_python_may_have_a_space(make, tmp_path, words, said):
    python = interpreter(tmp_path / "a folder", sys.executable)
    assert make(*words, f"PY={python}") == (0, "", f"{said}\n")


def test_bare_make_says_what_each_target_does_and_how_long_it_takes(make):
    status, output, errors = make()
    lines = {line.split()[1]: line for line in output.splitlines() if line.startswith("  make ")}
    assert (status, errors) == (0, "") and max(map(len, lines.values())) <= 100
    for target in ("tour", "quick", "test", "scaling", "figures", "museum"):
        assert re.search(r"minute|second", lines[target]), lines[target]


def test_exercises_are_written_and_graded(make, tmp_path):
    python = f"PY={interpreter(tmp_path, sys.executable)}"
    for words, said in [(["exercises"], "--write exercises"),
                        (["exercises", "LEVEL=1", "FORCE=1"],
                         "--write exercises --level=1 --force"),
                        (["grade"], "exercises"),
                        (["grade", "FOLDER=a class", "ONLY=04 05.2", "LEVEL=3"],
                         "a class 04 05.2 --level=3")]:
        assert make(*words, python) == (0, "", f"{said}\n")


def test_three_files_are_tested_at_once_where_a_plugin_can(make, tmp_path):
    python = f"PY={interpreter(tmp_path, sys.executable)}"
    (tmp_path / "ruff.py").touch()
    (tmp_path / "pytest.py").write_text("import sys; sys.exit(' '.join(sys.argv[1:]))")
    for xdist, words in (("", " -n 3 --dist loadfile"), ("raise ImportError", "")):
        (tmp_path / "xdist.py").write_text(xdist)
        status, _, errors = make("test", python)
        assert (status, errors.splitlines()[0]) == (2, f"-q{words} --durations=25 tests")


CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.fixture
def install(tmp_path, make):
    """install("quick", "TORCH=cpu", gpus="", system="Linux"): (status, the lines that are printed,
    what pip, venv and uv were called with). pip fails for a requirement with the word in fails."""
    folder, told = tmp_path / "commands", tmp_path / "told"
    folder.mkdir()

    def command(name, lines):
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)

    def run(*words, gpus=None, system="Linux", fails="nothing"):
        told.write_text("")
        tell = f'case "$*" in *pip*) echo "$*" >> "{told}";; *venv*) echo "$*" >> "{told}";; esac'
        inside = f'{tell}; case "$*" in *"{fails}"*) exit 1;; esac'
        command("python3", f"{tell}; mkdir -p .venv/bin; cp {folder}/inside .venv/bin/python")
        command("inside", inside)
        command("uname", f"echo {system}")
        command("uv", f'echo "uv $*" >> "{told}"')
        command("nvidia-smi", "exit 9" if gpus is None else f'printf "{gpus}"')
        status, output, errors = make(*words, PATH=f"{folder}:/usr/bin:/bin")
        return status, (output + errors).splitlines(), told.read_text().splitlines()

    return run


@pytest.mark.parametrize(("settings", "words", "build", "size"), [
    ({}, [], "cpu", "240 MB"),
    ({"gpus": "No devices were found"}, [], "cpu", "240 MB"),
    ({"gpus": "GPU 0: NVIDIA H100"}, [], "cuda", "2.8 GB"),
    ({"gpus": "GPU 0: NVIDIA H100"}, ["TORCH=cpu"], "cpu", "240 MB"),
    ({}, ["TORCH=cuda"], "cuda", "2.8 GB"),
    ({"system": "Darwin"}, [], "pypi", "160 MB")])
def test_torch_is_what_the_machine_can_use(install, settings, words, build, size):
    """Its index holds for torch alone, so that nothing else waits where it cannot be reached."""
    status, lines, told = install("setup", *words, **settings)
    venv, torch, others = told
    assert status == 0 and venv.startswith("-m venv") and others.endswith("-r requirements.txt")
    assert (CPU_INDEX in torch) == (build == "cpu") and "torch>=" in torch.split()[-1]
    assert "--no-deps" in torch and CPU_INDEX not in others
    assert lines[0].startswith("setting up .venv") and size in lines[0].split("(")[0]


def test_what_is_set_up_stays_until_another_torch_is_wanted(install):
    assert install("setup")[2] and install("setup")[2] == install("setup", "TORCH=cpu")[2] == []
    [venv, torch, _] = install("setup", "TORCH=cuda")[2]
    assert venv == "-m venv --clear .venv" and CPU_INDEX not in torch
    assert install("setup")[2] == []


def test_the_first_figure_fetches_no_tests_and_no_kernels(install, tmp_path):
    assert len(install("quick")[2]) == 3
    assert install("grade", "ONLY=00.7 11")[2] == []
    [kernels] = install("grade")[2]
    assert kernels.endswith("-r requirements-kernels.txt")
    [tests] = install("lint")[2]
    assert tests.endswith("-r requirements-test.txt")


def test_a_set_up_that_fails_is_no_set_up(install):
    for fails, said in ((CPU_INDEX, "make: pip got no torch (cpu); TORCH="),
                        ("-r requirements.txt", "make: ***")):
        for _ in range(2):
            status, lines, told = install("quick", fails=fails)
            assert status == 2 and lines[1].startswith(said) and told


def test_a_torch_that_there_is_not(make):
    status, output, errors = make("quick", "TORCH=gpu")
    assert (status, output, errors.count("\n")) == (2, "", 1)
    assert "TORCH=gpu is no build of torch; TORCH=cpu is, and TORCH=cuda" in errors


@pytest.fixture
def of_uv(tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\n")


def test_an_environment_of_uv_is_filled_by_uv(install, of_uv, tmp_path):
    """It has no pip. `uv sync` takes away what tests need: each `uv run make test` brings it."""
    assert install("setup")[2] == ["uv sync --inexact"] and install("setup")[2] == []
    for _ in range(2):
        assert install("setup", ".venv/ready-test")[2] == ["uv sync --inexact --extra test"]
    (tmp_path / ".venv/pyodide-0.29.5.tgz").touch()
    assert "uv pip install --quiet --python .venv playwright" in install("test-page")[2]


def test_uv_takes_no_torch_from_make(install, of_uv):
    """It would stay until the next command of uv."""
    for value, its, other in (("", "cpu", "cuda"), ("1", "cuda", "cpu")):
        setting = f"UV_NO_SOURCES={value}"
        assert install("setup", setting, f"TORCH={its}")[::2] == (0, ["uv sync --inexact"])
        status, lines, told = install("setup", setting, f"TORCH={other}")
        assert status == 2 and not told and "export UV_NO_SOURCES=1 (cuda)" in lines[0]


def test_pyproject_requires_what_requirements_say():
    """`uv sync` and `make setup` install the same, and so do their extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, name = project["project"]["optional-dependencies"], project["project"]["name"]
    found = {"": project["project"]["dependencies"], **{f"-{key}": extras[key] for key in extras}}
    assert found.keys() == {path.stem[len("requirements"):] for path in
                            ROOT.glob("requirements*.txt")}
    for end, listed in found.items():
        lines = (ROOT / f"requirements{end}.txt").read_text().splitlines()
        others = {f"{name}[{line[len('-r requirements-'):-len('.txt')]}]" for line in lines
                  if line.startswith("-r requirements-")}
        lines = {line.replace('"', "'") for line in lines if not line.startswith("-r")}
        assert lines | others == set(listed), end
    sources, [index] = project["tool"]["uv"]["sources"]["torch"], project["tool"]["uv"]["index"]
    assert [one["index"] for one in sources] == [index["name"]] and index["explicit"]
    assert f"CPU_INDEX := {index['url']}\n" in (ROOT / "setup.mk").read_text()
