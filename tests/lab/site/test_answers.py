"""What the pages that compute are answered: the same that the chapters' functions give."""

import pytest

from common import Refused
from lab.planner import planning, rooflines
from lab.site import answers, plans, server, tools
from tests.conftest import chapter, sample


@pytest.fixture(scope="module")
def ten():
    return chapter("10_planner")


def test_a_plan_is_the_planners(ten):
    told = answers.plan({"model": "70b", "cluster": "h100", "gpus": "512", "batch": "1024",
                         "tp": "8", "zero": "2", "micro_batch": "2", "software": "llama3"})
    plan = ten.Plan(ten.MODELS["70b"], ten.Layout(64, 8, zero=2, micro_batch=2),
                    ten.CLUSTERS["h100"], ten.SOFTWARE["llama3"], 512, 1024)
    assert told["memory"] == plan.memory and told["bytes"] == plan.bytes
    assert told["seconds"] == plan.total == sum(told["time"].values())
    assert told["layout"]["dp"] == 64 and told["layout"]["sp"]
    assert told["why"] == plan.why


def test_parameters_of_a_plan_are_the_planners_flags(ten):
    few = answers.plan({"model": "7b", "gradient_bytes": "0", "master_bytes": "0"})
    assert few["memory"]["optimizer"] == 8 * ten.MODELS["7b"].parameters()
    assert few["memory"]["gradients"] == 0 and "--master-bytes=0" in few["command"]
    without = answers.plan({"gpus": "512", "tp": "8", "sp": "false"})
    assert not without["layout"]["sp"] and "--no-sp" in without["command"]
    refused = answers.plan({"gpus": "8", "tp": "3"})
    assert refused["memory"] is None and refused["why"]


def test_the_ten_best_are_the_planners(ten):
    """The chapter's own search, which remembers nothing, finds the same plans."""
    question = {"model": "8b", "gpus": "64", "batch": "256", "tp": "2"}
    told = answers.best(question)
    asked = planning.Question(ten, planning.arguments(ten, plans.flags_of(question)))
    fit, _ = asked.find(64, {"tp": 2})
    assert told["fits"] and told["count"] == len(fit) and len(told["plans"]) == 10
    for plan, one in zip(fit, told["plans"]):
        assert one["layout"] == vars(plan.layout)
        assert (one["seconds"], one["bytes"]) == (plan.total, plan.bytes)


@pytest.mark.parametrize(("question", "changes"), sample([
    ({"model": "405b", "gpus": "8"}, [{"gpus": "128"}]),
    ({"gpus": "8", "tp": "16"}, [{"tp": "1"}]),
    ({"model": "70b", "gpus": "64", "pp": "1", "zero": "0"}, [{"pp": "4"}, {"zero": "3"}])]))
def test_if_nothing_fits_each_proposed_change_does(question, changes):
    told = answers.best(question)
    assert not told["fits"] and told["plans"] == [] and told["changes"] == changes
    nearest = plans.layout_of({"layout": told["nearest"]})
    assert answers.plan(question | nearest)["why"] in told["why"]
    assert all(answers.best(question | change)["fits"] for change in changes)


def test_a_search_that_takes_too_long_is_refused():
    with pytest.raises(Refused, match="layouts"):
        answers.best({"gpus": "720720", "layers": "90000", "dim": "64", "heads": "2",
                      "seq": "2000000", "experts": "4096"})
    with pytest.raises(Refused, match=r"0.3 s"):
        plans.searched(("--model=deepseek-v3", "--gpus=2048", "--batch=15360"), 0.3)


def test_a_search_ends_when_nobody_waits_for_it():
    with pytest.raises(Refused, match="nobody waits"):
        plans.searched(("--model=qwen3-235b", "--gpus=1024", "--batch=4096"), 60, lambda: True)
    with plans.SEARCHES, plans.SEARCHES, pytest.raises(Refused, match="nobody waits"):
        plans.searched(("--model=8b",), 60, lambda: True)
    assert plans.searched(("--model=8b",), 60)["fits"]


def test_the_planner_begins_with_the_best_plan_of_its_search():
    [(_, search), (_, plan)] = tools.asks_first("planner", tools.TOOLS["planner"].begins)
    shown = answers.plan(plan)
    assert shown["words"] == answers.best(search)["plans"][0]["words"] and not shown["why"]


@pytest.mark.parametrize("asked", [
    {"cluster": "tpu-v5p", "chips": "4096", "zero_axes": "2"},
    {"cluster": "h100", "chips": "16", "strategy": "tp"}])
def test_the_lines_of_a_roofline_are_the_planners(ten, asked):
    """And they cross at the number of tokens that it says."""
    told, chips = answers.roofline(asked), int(asked["chips"])
    model, axes = ten.MODELS[asked.get("model", "70b")], (int(asked.get("zero_axes", 1)), 1)
    roof = rooflines.Roof(ten, model, ten.CLUSTERS[asked["cluster"]], axes)
    for tokens, (dp, tp), times, planned in zip(told["tokens"], told["splits"], told["roof"],
                                                told["planned"], strict=True):
        assert dp * tp == chips
        at, theirs = roof.seconds(tokens * chips, dp, tp), roof.planned(tokens * chips, dp, tp)
        assert times == pytest.approx([at["compute"], at["zero-3"], at["tp"]], rel=1e-3)
        below = theirs and [theirs["compute"], rooflines.messages(theirs)]
        assert planned == (below and pytest.approx(below, rel=1e-3))
        if told["least"] is None or abs(tokens / told["least"] - 1) > 1e-3:
            is_above = times[0] > max(times[1:])
            assert is_above == (told["least"] is not None and tokens > told["least"])
    assert (told["least"] is None) == (asked.get("strategy") == "tp")


BAD = {  # a question: a part of its refusal
    "plan?tp=0": "tp", "plan?json=/tmp/x": "'json'", "plan?sp=maybe": "sp = 'maybe'",
    "plan?model=9b": "'9b'", "plan?tp=2&tp=4": "twice", "plan?gpus=" + "9" * 40: "gpus",
    "schedule?F=nan": "F = 'nan'", "schedule?ranks=%C2%B2": "ranks",
    "schedule?schedule=dualpipe&ranks=3": "ranks=4 would work", "ring?window=3": "window=8",
    "cuts?tp=3": "tp = 3", "cuts?dp=8&tp=8&pp=2": "64", "roofline?chips=1": "chips = '1'",
    "memory?precision=fp8": "fp32, bf16", "collective?ranks=9": "from 2 to 8",
    "../plan?": "no question", "ring?&&": "&&", "ring?ranks": "'ranks'",
    "plan?" + "&".join(f"x{i}=1" for i in range(101)): "Max number"}


def test_a_bad_question_costs_one_line():
    for question, named in BAD.items():
        name, _, query = question.partition("?")
        status, told = server.answer(name, query)
        assert status == 400 and list(told) == ["error"], question
        assert named in told["error"] and "\n" not in told["error"], (question, told)
