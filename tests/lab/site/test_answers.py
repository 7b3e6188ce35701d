"""What the tools ask is answered as the chapters' functions do, with torch and without."""

import json
import os
import subprocess
import sys

import pytest

from lab import chapters
from lab.planner import planning, rooflines
from lab.site import answers, build, plans, roofline, tools
from tests.conftest import chapter, sample


@pytest.fixture(scope="module")
def ten():
    return chapter("10_planner")


def test_a_plan_is_the_planners(ten):
    answer = plans.plan(model="70b", cluster="h100", gpus=512, batch=1024, tp=8, zero=2,
                        micro_batch=2, software="llama3")
    plan = ten.Plan(ten.MODELS["70b"], ten.Layout(64, 8, zero=2, micro_batch=2),
                    ten.CLUSTERS["h100"], ten.SOFTWARE["llama3"], 512, 1024)
    assert answer["memory"] == plan.memory and answer["bytes"] == plan.bytes
    assert answer["seconds"] == plan.total == sum(answer["time"].values())
    assert answer["layout"] == vars(plan.layout) and answer["why"] == plan.why


def test_parameters_of_a_plan_are_the_planners_flags(ten):
    few = plans.plan(model="7b", gradient_bytes=0, master_bytes=0)
    assert few["memory"]["optimizer"] == 8 * ten.MODELS["7b"].parameters()
    assert few["memory"]["gradients"] == 0 and "--master-bytes=0" in few["command"]
    without = plans.plan(gpus=512, tp=8, sp="false")
    assert not without["layout"]["sp"] and "--no-sp" in without["command"]
    refused = plans.plan(gpus=8, tp=3)
    assert refused["memory"] is None and refused["why"]
    for asked in ({"tp": 0}, {"model": "9b"}, {"gpus": 10**40}, {"sp": "maybe"}, {"colour": 1}):
        [name] = asked
        [line] = answers.answer("plan", asked).values()
        assert name in line and "--" not in line and "\n" not in line


def test_the_ten_best_are_the_planners(ten):
    asked = {"model": "8b", "gpus": 64, "batch": 256, "tp": 2}
    answer = plans.best(**asked)
    question = planning.Question(ten, planning.arguments(ten, plans.flags_of(asked)))
    fit, _ = question.find(64, {"tp": 2})
    assert answer["fits"] and answer["count"] == len(fit) and len(answer["plans"]) == 10
    for plan, one in zip(fit, answer["plans"]):
        assert one["layout"] == vars(plan.layout)
        assert (one["seconds"], one["bytes"]) == (plan.total, plan.bytes)


@pytest.mark.parametrize(("asked", "changes"), sample([
    ({"model": "405b", "gpus": 8}, [{"gpus": "128"}]),
    ({"gpus": 8, "tp": 16}, [{"tp": "1"}]),
    ({"model": "70b", "gpus": 64, "pp": 1, "zero": 0}, [{"pp": "4"}, {"zero": "3"}])]))
def test_if_nothing_fits_each_proposed_change_does(asked, changes):
    answer = plans.best(**asked)
    assert not answer["fits"] and answer["plans"] == [] and answer["changes"] == changes
    nearest = plans.layout_of(answer["nearest"])
    assert plans.plan(**asked | nearest)["why"] in answer["why"]
    assert all(plans.best(**asked | change)["fits"] for change in changes)


@pytest.mark.parametrize("asked", [
    {"cluster": "tpu-v5p", "chips": 4096, "zero_axes": 2, "strategy": "both"},
    {"cluster": "h100", "chips": 16, "zero_axes": 1, "strategy": "tp"}])
def test_the_lines_of_a_roofline_are_the_planners(ten, asked):
    """And they cross at the number of tokens that it says."""
    answer = roofline.roofline(model="70b", tp_axes=1, **asked)
    chips, cluster = asked["chips"], ten.CLUSTERS[asked["cluster"]]
    roof = rooflines.Roof(ten, ten.MODELS["70b"], cluster, (asked["zero_axes"], 1))
    for tokens, (dp, tp), times, planned in zip(answer["tokens"], answer["splits"], answer["roof"],
                                                answer["planned"], strict=True):
        assert dp * tp == chips
        at, theirs = roof.seconds(tokens * chips, dp, tp), roof.planned(tokens * chips, dp, tp)
        assert times == pytest.approx([at["compute"], at["zero-3"], at["tp"]], rel=1e-3)
        below = theirs and [theirs["compute"], rooflines.messages(theirs)]
        assert planned == (below and pytest.approx(below, rel=1e-3))
        if answer["least"] is None or abs(tokens / answer["least"] - 1) > 1e-3:
            is_above = times[0] > max(times[1:])
            assert is_above == (answer["least"] is not None and tokens > answer["least"])
    assert (answer["least"] is None) == (asked["strategy"] == "tp")


# --------------------------------------------------------------------------- stored, or in browsers


def test_what_a_tool_asks_first_is_stored():
    """On its own page and in each lesson, so that it has an answer where no Python computes."""
    stored = [tools.written(name, asked) for module in (
        answers.pipelines, answers.roofline, answers.rings, answers.cuts, answers.memory,
        answers.collectives) for name, asked in module.examples()]
    begins = [(name, {}) for name in tools.TOOLS]
    for name in chapters.NAMES:
        begins += getattr(chapters.about(name), "PLAYS", {}).values()
    for name, more in begins:
        tool = tools.TOOLS[name]
        for question, asked in answers.first_questions(tool, tool.begins | more):
            line = tools.written(question, asked)
            assert line in stored or question in ("best", "plan"), line
            assert "error" not in answers.answer(question, asked)


ALONE = """
import os, sys
from lab.site import in_browser
print("[" + ",".join(map(in_browser.answer, sys.argv[1:])) + "]")
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
assert not [file for file in files.values() if "/site-packages/torch/" in file]
ours = [file for name, file in files.items() if name.startswith(("lab.", "common", "0", "1"))]
assert len(ours) > 20 and all(file.startswith(os.getcwd()) for file in ours), ours
"""
ASKED = [
    ("roofline", {"cluster": "h100", "model": "8b", "strategy": "both", "chips": 512,
                  "zero_axes": 1, "tp_axes": 1}),
    ("plan", {"model": "deepseek-v3", "gpus": 2048, "batch": 960, "pp": 16, "ep": 64,
              "schedule": "dualpipe", "software": "deepseek"}),
    ("plan", {"model": "foo"}),
    ("best", {"model": "mixtral", "cluster": "a100", "gpus": 64, "batch": 64, "tp": 8}),
    ("best", {"model": "405b", "gpus": 8, "batch": 512}),
    *(("schedule", {"schedule": name, "ranks": 4, "micro_batches": 8, "chunks": 2,
                    "breadth_first": "false", "F": 1, "B": 1.5, "W": 1})
      for name in answers.pipelines.names())]


def test_the_sources_alone_answer_as_they_do_here(tmp_path):
    """As a browser has them: without torch, without any package."""
    for name, data in build.sources().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert {name for name, _ in ASKED} == set(answers.IN_BROWSER)
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    lines = [tools.written(name, asked) for name, asked in ASKED]
    ran = subprocess.run([sys.executable, "-c", ALONE, *lines], cwd=tmp_path, env=alone,
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for (name, asked), found in zip(ASKED, json.loads(ran.stdout), strict=True):
        assert found == json.loads(json.dumps(answers.answer(name, asked))), asked
