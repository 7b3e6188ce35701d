""".github/workflows: their make targets are there, and they test what the course supports. (Linters
read the workflows in `make lint`.)"""

import re

import pytest

from tests.conftest import ROOT

WORKFLOWS = {path.stem: path for path in ROOT.glob(".github/workflows/*.yml")}


def loaded(name):
    yaml = pytest.importorskip("ruamel.yaml", reason="check-jsonschema brings it")
    return yaml.YAML(typ="safe", pure=True).load(WORKFLOWS[name].read_text())


def test_the_matrix_is_the_oldest_and_the_newest_torch():
    from packaging.requirements import Requirement

    [torch] = re.findall(r"^torch.+", (ROOT / "requirements.txt").read_text(), re.M)
    versions = loaded("test")["jobs"]["test"]["strategy"]["matrix"]["torch"]
    assert all(version in Requirement(torch).specifier for version in versions)
    assert f">={versions[0].rsplit('.', 1)[0]}" in torch


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_only_reads_and_its_commands_are_there(name):
    """But for the job that deploys the site."""
    makefile, workflow = (ROOT / "Makefile").read_text(), loaded(name)
    targets = re.findall(r"make ([a-z-]+)", WORKFLOWS[name].read_text())
    assert targets or name == "pages"
    assert all(re.search(f"^{target}:", makefile, re.M) for target in targets)
    assert all((ROOT / f"lab/{module}.py").exists()
               for module in re.findall(r"-m lab\.(\w+)", WORKFLOWS[name].read_text()))
    assert workflow["permissions"] == {"contents": "read"}
    for job, about in workflow["jobs"].items():
        assert "permissions" not in about or (name, job) == ("pages", "deploy")
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
                   for step in about["steps"] if "uses" in step)
