"""The Makefile: which Python and which torch it sets up, by commands that only note their words."""

import os
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT, sample


@pytest.fixture
def make(tmp_path):
    """make("lint", "PY=..."): status, stdout and stderr, in a folder with the Makefile, and with
    modules that print their arguments instead of working."""
    for file in ("Makefile", "setup.mk", *(path.name for path in ROOT.glob("requirements*.txt"))):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "lab").mkdir()
    for name in ("tour", "exercises", "grade"):
        (tmp_path / f"lab/{name}.py").write_text("import sys; print(*sys.argv[1:])")
    (tmp_path / "torch.py").touch()
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("MAKE") and name not in ("PY", "TORCH")}

    def run(*words, **more):
        done = subprocess.run(["make", "--no-print-directory", *words], cwd=tmp_path, text=True,
                              env=environment | {"PYTHONPATH": str(tmp_path)} | more,
                              capture_output=True, timeout=300)
        return done.returncode, done.stdout, done.stderr

    return run


def interpreter(folder, command):
    """A shell script that is called like Python."""
    path = folder / "python"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


TARGETS = ("test", "quick", "tour", "setup", "test-all", "lint", "bench", "gpu", "faults",
           "scaling", "figures", "exercises", "grade", "page", "site")


def test_no_target_goes_on_without_the_python_it_was_given(make, tmp_path):
    bare = interpreter(tmp_path, f"{sys.executable} -I -S")  # doesn't see any torch
    for target in sample(TARGETS, 2):
        for python, missing in (("/nope", "Python 3.11"), (bare, "torch")):
            status, output, errors = make(target, f"PY={python}")
            ours, makes = errors.split("\n", 1)
            assert (status, output) == (2, "") and makes.count("\n") == 1, target
            assert ours.startswith(f"make: PY={python} ") and missing in ours, target


@pytest.mark.parametrize(("words", "said"), sample([
    (["grade", "FOLDER=a class", "ONLY=04 05.2", "LEVEL=3"], "a class 04 05.2 --level=3"),
    (["tour", "ONLY=02 06"], "02 06"), (["quick"], "02 --first"),
    (["figures", "ONLY=09"], "--figures 09"), (["exercises"], "--write exercises"),
    (["exercises", "LEVEL=1", "FORCE=1"], "--write exercises --level=1 --force")]))
def test_variables_become_arguments(make, tmp_path, words, said):
    """Also with an interpreter whose path contains a space."""
    python = interpreter(tmp_path / "a folder", sys.executable)
    assert make(*words, f"PY={python}") == (0, f"{said}\n", "")


def test_pyproject_requires_what_requirements_txt_does():
    """`uv sync` and `make setup` install the same, and so do their extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, name = project["project"]["optional-dependencies"], project["project"]["name"]
    found = {"": project["project"]["dependencies"], **{f"-{key}": extras[key] for key in extras}}
    for end, listed in found.items():
        lines = (ROOT / f"requirements{end}.txt").read_text().splitlines()
        others = {f"{name}[{line[len('-r requirements-'):-len('.txt')]}]" for line in lines
                  if line.startswith("-r requirements-")}
        lines = {line.replace('"', "'") for line in lines if not line.startswith("-r")}
        assert lines | others == set(listed), end
    [index] = project["tool"]["uv"]["index"]
    assert f"CPU_INDEX := {index['url']}\n" in (ROOT / "setup.mk").read_text()


# ------------------------------------------------------------------------------ what is installed

CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.fixture
def install(tmp_path, make):
    """install("quick", "TORCH=cpu", gpus="", system="Linux"): status, the lines printed, and what
    pip, venv and uv were called with. pip fails if its words include `fails`."""
    folder, told = tmp_path / "commands", tmp_path / "told"
    folder.mkdir()

    def command(name, lines):
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)

    def run(*words, gpus=None, system="Linux", fails="nothing"):
        told.write_text("")
        tell = f'case "$*" in *pip*|*venv*) echo "$*" >> "{told}";; esac'
        command("python3", f"{tell}; mkdir -p .venv/bin; cp {folder}/inside .venv/bin/python")
        command("inside", f'{tell}; case "$*" in *"{fails}"*) exit 1;; esac')
        command("uname", f"echo {system}")
        command("uv", f'echo "uv $*" >> "{told}"')
        command("nvidia-smi", "exit 9" if gpus is None else f'printf "{gpus}"')
        command("git", "exit 1")
        status, output, errors = make(*words, PATH=f"{folder}:/usr/bin:/bin")
        return status, (output + errors).splitlines(), told.read_text().splitlines()

    return run


@pytest.mark.parametrize(("settings", "words", "build"), sample([
    ({"gpus": "GPU 0: NVIDIA H100"}, [], "cuda"), ({}, [], "cpu"),
    ({"gpus": "No devices were found"}, [], "cpu"),
    ({"gpus": "GPU 0: NVIDIA H100"}, ["TORCH=cpu"], "cpu"),
    ({}, ["TORCH=cuda"], "cuda"), ({"system": "Darwin"}, [], "pypi")]))
def test_the_machine_gets_the_torch_it_can_use(install, settings, words, build):
    """PyTorch's index is used for torch only."""
    status, _, (venv, torch, others) = install("setup", *words, **settings)
    assert status == 0 and venv.startswith("-m venv") and others.endswith("-r requirements.txt")
    assert (CPU_INDEX in torch) == (build == "cpu") and "torch>=" in torch.split()[-1]
    assert "--no-deps" in torch and CPU_INDEX not in others


@pytest.mark.full
def test_each_target_installs_what_it_needs_and_once(install, tmp_path):
    assert len(install("quick")[2]) == 3
    assert install("setup")[2] == install("setup", "TORCH=cpu")[2] == []
    assert install("grade", "ONLY=00.7 11")[2] == []
    assert [line.split()[-1] for line in install("grade")[2]] == ["requirements-kernels.txt"]
    assert [line.split()[-1] for line in install("lint")[2]] == ["requirements-test.txt"]
    venv, torch, *_ = install("setup", "TORCH=cuda")[2]
    assert venv == "-m venv --clear .venv" and CPU_INDEX not in torch


@pytest.mark.full
def test_a_set_up_that_fails_is_tried_again(install):
    for fails in (CPU_INDEX, "-r requirements.txt"):
        for _ in range(2):
            status, lines, told = install("quick", fails=fails)
            assert status == 2 and "make: " in lines[1] and told
    status, lines, _ = install("quick", "TORCH=gpu")
    assert status == 2 and len(lines) == 1 and "TORCH=gpu" in lines[0]


@pytest.mark.full
def test_an_environment_of_uv_is_filled_by_uv(install, tmp_path):
    """It has no pip. `uv sync` takes away what tests need, so each `uv run make test` asks again.
    A torch that differs from uv's setting would last until uv's next command: it is refused."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\n")
    assert install("setup")[2] == ["uv sync --inexact"] and install("setup")[2] == []
    for _ in range(2):
        assert install("setup", ".venv/ready-test")[2] == ["uv sync --inexact --extra test"]
    for value, its, other in (("", "cpu", "cuda"), ("1", "cuda", "cpu")):
        setting = f"UV_NO_SOURCES={value}"
        assert install("setup", setting, f"TORCH={its}")[::2] == (0, ["uv sync --inexact"])
        status, lines, told = install("setup", setting, f"TORCH={other}")
        assert status == 2 and not told and "UV_NO_SOURCES" in lines[0]
