""".github/workflows: the shell lines of each job run, in a copy of the project, with stand-ins that
note what would take minutes. (Linters read the workflows in `make lint`.)"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
CONTEXT = {"github.server_url": "https://host", "github.repository": "somebody/fivefold"}


def loaded(path):
    yaml = pytest.importorskip("ruamel.yaml", reason="check-jsonschema brings it")
    return yaml.YAML(typ="safe", pure=True).load(path.read_text())


def test_the_matrix_is_the_oldest_and_the_newest_torch_and_the_nightly_tests_everything():
    from packaging.requirements import Requirement

    nightly, _, test = map(loaded, WORKFLOWS)
    [torch] = re.findall(r"^torch.+", (ROOT / "requirements.txt").read_text(), re.M)
    versions = test["jobs"]["test"]["strategy"]["matrix"]["torch"]
    allowed = Requirement(torch).specifier
    assert all(version in allowed for version in versions)
    assert f">={versions[0].rsplit('.', 1)[0]}" in torch
    assert nightly["on"]["schedule"] and "make test-all" in str(nightly["jobs"])


def test_a_workflow_may_only_read_and_its_actions_have_versions():
    """But for the job that deploys the site."""
    for path in WORKFLOWS:
        workflow = loaded(path)
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            assert "permissions" not in job or (path.stem, name) == ("pages", "deploy")
            assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
                       for step in job["steps"] if "uses" in step)


def variants(job):
    """The [(lines, environment)] of a job's steps, once for each different one of its matrix."""
    matrix, found = job.get("strategy", {}).get("matrix", {}), []
    for chosen in itertools.product(*matrix.values()):
        values = CONTEXT | {f"matrix.{key}": one for key, one in zip(matrix, chosen)}
        fill = lambda text: re.sub(r"\$\{\{ ([\w.-]+) \}\}",
                                   lambda name: values[name[1]], text)  # noqa: B023
        steps = [(fill(step["run"]), {key: fill(value) for key, value in
                                      step.get("env", {}).items() if "&&" not in value})
                 for step in job["steps"] if "run" in step]
        if steps and steps not in found:
            found.append(steps)
    return found


@pytest.mark.full
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_lines_of_each_job_run(path, tmp_path):
    """`make -n` says what it would do; pipx and apt-get are stand-ins; everything else is done."""
    def command(name, lines):
        file = tmp_path / "commands" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{lines}\n")
        file.chmod(0o755)

    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(
        ".*", "runs", "figures", "pages", "tests", "site"))
    (copy / ".venv/bin").mkdir(parents=True)
    (copy / ".venv/bin/python").symlink_to(sys.executable)
    for name in ("pipx", "sudo"):
        command(name, f'echo "{name} $@"')
    command("make", f'exec {shutil.which("make")} -n "$@"')
    path_there = f"{tmp_path}/commands:{Path(sys.executable).parent}:{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "FULL"))}
    for name, job in loaded(path)["jobs"].items():
        for steps in variants(job):
            for lines, environment in steps:
                done = subprocess.run(
                    ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", lines], cwd=copy,
                    env=clean | environment | {"PATH": path_there}, capture_output=True,
                    text=True, timeout=300)
                assert done.returncode == 0, f"{name}: {lines}\n{done.stdout}{done.stderr}"
                assert "make" not in lines or "-m " in done.stdout, done.stdout
