"""The Makefile: which Python and which torch it sets up, with stand-ins for what takes long."""

import os
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT, sample

CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"
SET_UP = "lab/setup.mk", "lab/setup.sh", "Makefile", "requirements.txt"


@pytest.fixture
def make(tmp_path):
    """make("lint", "PY=..."): status, stdout and stderr, in a folder with the Makefile, and with
    modules that print their arguments instead of working."""
    shutil.copytree(ROOT / "lab/requirements", tmp_path / "lab/requirements")
    for file in SET_UP:
        shutil.copy(ROOT / file, tmp_path / file)
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


def test_no_target_goes_on_without_the_python_it_was_given(make, tmp_path):
    bare = interpreter(tmp_path, f"{sys.executable} -I -S")     # finds no torch
    for target, python, missing in (("test", "/nope", "Python 3.11"), ("quick", bare, "torch")):
        status, output, errors = make(target, f"PY={python}")
        assert (status, output) == (2, "")
        assert errors.startswith(f"make: PY={python} ") and missing in errors.split("\n")[0]


@pytest.mark.parametrize(("words", "arguments"), sample([
    (["grade", "FOLDER=a class", "ONLY=04 05.2", "LEVEL=3"], "a class 04 05.2 --level=3"),
    (["quick"], "02 --first"), (["figures", "ONLY=09"], "--figures 09"),
    (["exercises", "LEVEL=1", "FORCE=1"], "--write exercises --level=1 --force")]))
def test_variables_become_arguments(make, tmp_path, words, arguments):
    """Also with an interpreter whose path contains a space."""
    python = interpreter(tmp_path / "a folder", sys.executable)
    assert make(*words, f"PY={python}") == (0, f"{arguments}\n", "")


def test_uv_installs_what_make_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {ROOT / f"lab/requirements/{name}.txt": packages
              for name, packages in project["optional-dependencies"].items()}
    listed[ROOT / "requirements.txt"] = project["dependencies"]
    assert {*(ROOT / "lab/requirements").iterdir()} < listed.keys()
    for path, packages in listed.items():
        lines = path.read_text().replace('"', "'").replace("-r ../../requirements.txt\n", "")
        for name in project["optional-dependencies"]:
            lines = lines.replace(f"-r {name}.txt", f"{project['name']}[{name}]")
        assert lines.splitlines() == packages, path


# ------------------------------------------------------------------------------ what is installed


@pytest.fixture
def install(tmp_path, make):
    """install("quick", "TORCH=cpu", gpus="", system="Linux"): status, the lines printed, and what
    pip, venv and uv were called with. pip fails if its words include `fails`."""
    folder, calls = tmp_path / "commands", tmp_path / "calls"
    folder.mkdir()

    def command(name, lines):
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)

    def run(*words, gpus="", system="Linux", fails="nothing"):
        calls.write_text("")
        note = f'case "$*" in *pip*|*venv*) echo "$*" >> "{calls}";; esac'
        command("python3", f"{note}; mkdir -p .venv/bin; cp {folder}/inside .venv/bin/python")
        command("inside", f'{note}; case "$*" in *"{fails}"*) exit 1;; esac')
        command("uname", f"echo {system}")
        command("uv", f'echo "uv $*" >> "{calls}"')
        command("nvidia-smi", f'printf "{gpus}"')
        status, output, errors = make(*words, PATH=f"{folder}:/usr/bin:/bin")
        return status, (output + errors).splitlines(), calls.read_text().splitlines()

    return run


@pytest.mark.parametrize(("settings", "words", "build"), sample([
    ({"gpus": "GPU 0: NVIDIA H100"}, [], "cuda"), ({}, [], "cpu"),
    ({"gpus": "GPU 0: NVIDIA H100"}, ["TORCH=cpu"], "cpu"), ({}, ["TORCH=cuda"], "cuda"),
    ({"system": "Darwin"}, [], "pypi")], 2))
def test_the_machine_gets_the_torch_it_can_use(install, settings, words, build):
    """PyTorch's index is used for torch only."""
    status, _, (venv, torch, others) = install("setup", *words, **settings)
    assert status == 0 and venv.startswith("-m venv") and others.endswith("-r requirements.txt")
    assert (CPU_INDEX in torch) == (build == "cpu") and "torch>=" in torch.split()[-1]
    assert "--no-deps" in torch and CPU_INDEX not in others


def test_each_target_installs_what_it_needs_and_once(install):
    assert len(install("quick")[2]) == 3 and install("setup")[2] == []
    assert install("grade", "ONLY=00.7 11")[2] == []
    for target, name in ("grade", "kernels"), ("page", "site"), ("lint", "test"):
        assert [line.split()[-1] for line in install(target)[2]] == [f"lab/requirements/{name}.txt"]
    venv, torch, *_ = install("setup", "TORCH=cuda")[2]
    assert venv == "-m venv .venv" and CPU_INDEX not in torch


@pytest.mark.full
def test_a_set_up_that_fails_is_tried_again(install):
    for fails in (CPU_INDEX, "-r requirements.txt"):
        for _ in range(2):
            status, lines, calls = install("quick", fails=fails)
            assert status == 2 and "make: " in lines[1] and calls
    status, lines, _ = install("quick", "TORCH=gpu")
    assert status == 2 and "TORCH=gpu" in lines[0]


@pytest.mark.full
def test_an_environment_of_uv_is_filled_by_uv(install, tmp_path):
    """`uv sync` removes what tests need, so each `uv run make test` asks again."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\n")
    assert install("setup")[2] == ["uv sync --inexact"] and install("setup")[2] == []
    for _ in range(2):
        assert install("setup", ".venv/ready-test")[2] == ["uv sync --inexact --extra test"]
    status, lines, calls = install("setup", "TORCH=cuda")
    assert status == 2 and not calls and "UV_NO_SOURCES" in lines[0]
