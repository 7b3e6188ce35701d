"""What the pages that compute are answered."""

import time

import pytest

from common import Refused
from lab.page import answers, plans, server, tools
from lab.planner import planning, rooflines
from tests.conftest import chapter


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
    assert told["why"] == plan.why and told["explain"]
    assert told["command"].startswith("python 10_planner.py --model=70b --cluster=h100")
    muon = answers.plan({"gpus": "8", "optimizer": "muon", "zero": "1"})
    assert "ms computing" in "".join(muon["explain"]) and "--optimizer=muon" in muon["command"]
    assert answers.choices()["optimizer"] == ten.CHOICES["optimizer"]
    few = answers.plan({"model": "7b", "gradient_bytes": "0", "master_bytes": "0"})
    assert few["memory"]["optimizer"] == 8 * ten.MODELS["7b"].parameters()
    assert few["memory"]["gradients"] == 0 and "--master-bytes=0" in few["command"]
    assert answers.choices()["bytes"]["megatron-2021"] == {
        "weight_bytes": 2, "gradient_bytes": 6, "master_bytes": 4, "moment_bytes": 8,
        "sent_bytes": 2}
    without = answers.plan({"gpus": "512", "tp": "8", "sp": "false", "flash": "false"})
    assert not without["layout"]["sp"] and "--no-sp" in without["command"]
    assert not answers.plan({"gpus": "8"})["layout"]["sp"]              # with tp alone
    refused = answers.plan({"gpus": "8", "tp": "3"})
    assert refused["memory"] is None and "not a multiple of tp" in refused["why"]
    assert not told["caveats"]
    assert "22 are within 20%" in answers.plan({"model": "mixtral"})["caveats"][0]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        answers.plan({"model": "405b", "gpus": "16384", "batch": "2048", "tp": "8", "pp": "16"})
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1


@pytest.mark.parametrize("question", [
    {"model": "8b", "gpus": "64", "batch": "256", "tp": "2"},
    {"model": "mixtral", "gpus": "64", "batch": "256", "tp": "2", "cluster": "gb200"}])
def test_the_ten_best_are_the_planners(ten, question):
    """The chapter's own search, which remembers nothing, finds the same."""
    told = answers.best(question)
    asked = planning.Question(ten, planning.arguments(ten, plans.flags_of(question)))
    fit, _ = asked.find(64, {"tp": 2})
    assert told["fits"] and told["count"] == len(fit) and len(told["plans"]) == 10
    for plan, one in zip(fit, told["plans"]):
        assert one["layout"] == vars(plan.layout)
        assert one["words"] == planning.in_words(ten, plan.layout)
        assert (one["seconds"], one["bytes"]) == (plan.total, plan.bytes)
    assert (told["why"], told["changes"], told["nearest"]) == (None, [], None)


@pytest.mark.parametrize(("question", "changes"), [
    ({"model": "405b", "gpus": "8"}, [{"gpus": "128"}]),
    ({"gpus": "8", "tp": "16"}, [{"tp": "1"}]),
    ({"model": "70b", "gpus": "64", "pp": "1", "zero": "0"}, [{"pp": "4"}, {"zero": "3"}])])
def test_what_would_fit_is_a_change_that_does(question, changes):
    told = answers.best(question)
    assert not told["fits"] and told["plans"] == [] and told["changes"] == changes
    assert "--" not in told["why"] and "would work" not in told["why"]
    nearest = plans.layout_of({"layout": told["nearest"]})
    assert answers.plan(question | nearest)["why"] in told["why"]
    assert all(answers.best(question | change)["fits"] for change in changes)


@pytest.mark.parametrize(("advice", "changes"), [
    ("it is so; --tp 8 or --zero 1 would work", [{"tp": "8"}, {"zero": "1"}]),
    ("it is so; --v 1 --no-sp without --micro-batch would work",
     [{"v": "1", "sp": "false", "micro_batch": None}]),
    ("it is so; with --tp 8, tp = 8 is; no change of a few flags was found to work", [])])
def test_changes_are_parameters(advice, changes):
    why, found = plans.offered(advice)
    assert found == changes and "--" not in why and why.startswith("it is so")


def test_searches_that_are_too_long_are_refused():
    with pytest.raises(Refused, match=r"^34,744,320 layouts are more than"):
        answers.best({"gpus": "720720", "layers": "90000", "dim": "64", "heads": "2",
                      "seq": "2000000", "experts": "4096"})
    start = time.perf_counter()
    with pytest.raises(Refused, match="took more than 0.3 s, and was stopped"):
        plans.searched(("--model=deepseek-v3", "--gpus=2048", "--batch=15360"), 0.3)
    assert time.perf_counter() - start < 3


def test_a_search_ends_when_nobody_waits_for_it():
    """Nor does it wait for its turn."""
    with pytest.raises(Refused, match="nobody waits"):
        plans.searched(("--model=qwen3-235b", "--gpus=1024", "--batch=4096"), 60, lambda: True)
    with plans.SEARCHES, plans.SEARCHES, pytest.raises(Refused, match="nobody waits"):
        plans.searched(("--model=8b",), 60, lambda: True)
    assert plans.searched(("--model=8b",), 60)["fits"]


def test_a_plan_says_nothing_of_a_terminal():
    mixture = answers.plan({"model": "mixtral", "node_limit": "2"})
    assert "node limit counts only with two hops" in mixture["caveats"][1]
    assert "--" not in str(mixture["caveats"]) and "--node-limit=2" in mixture["command"]


def test_the_highest_numbers_are_the_planners(ten):
    """Which says what is higher in words of the page."""
    for name, most in answers.choices()["most"].items():
        assert planning.arguments(ten, [f"{planning.as_flag(name)}={most}"])
        with pytest.raises(Refused, match=f"({most + 1} is no whole number from [01] to {most}|"
                                          f"invalid choice: {most + 1})"):
            plans.question({name: str(most + 1)})


def test_what_a_lesson_begins_with_is_answered_there():
    [(_, search), (_, plan)] = tools.asks_first("planner", tools.TOOLS["planner"].begins)
    shown = answers.plan(plan)
    assert shown["words"] == answers.best(search)["plans"][0]["words"] and not shown["why"]


@pytest.mark.parametrize("asked", [
    {"cluster": "tpu-v5p", "chips": "4096", "zero_axes": "2"},
    {"cluster": "h100", "chips": "512", "strategy": "zero-3", "model": "8b"},
    {"cluster": "h100", "chips": "16", "strategy": "tp"}])
def test_lines_of_a_roofline_are_the_planners(ten, asked):
    """And cross where it says."""
    told, chips = answers.roofline(asked), int(asked["chips"])
    model, axes = ten.MODELS[asked.get("model", "70b")], (int(asked.get("zero_axes", 1)), 1)
    roof = rooflines.Roof(ten, model, ten.CLUSTERS[asked["cluster"]], axes)
    assert f"{told['features']:,.0f}" == f"{model.weights(1) / (4 * model.dim):,.0f}"
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
    never = asked.get("strategy") == "tp"               # of 16 GPUs, which are two machines
    assert ("messages take longer" in told["says"]) == never == (told["least"] is None)
    assert never or f"from {told['least']:,.0f} tokens of a {told['chip']}" in told["says"]
    if asked.get("strategy") == "zero-3":
        for tokens, (compute, sent) in zip(told["tokens"], told["planned"]):
            assert (compute > sent) == (tokens > told["planned_least"])


BAD = {
    "plan?tp=x": "tp", "plan?tp=0": "tp", "plan?json=/tmp/x": "no parameter 'json'",
    "plan?help=": "no parameter 'help'", "plan?sp=maybe": "sp = 'maybe' is none of true, false",
    "plan?model=9b": "model: invalid choice: '9b'", "plan?tp=2&tp=4": "given twice",
    "plan?layers=4": "has layers, dim",
    "plan?gpus=" + "9" * 40: "gpus", "best?cluster=x": "cluster: inv", "best?%00=1": "no parameter",
    "schedule?ranks=0": "ranks = '0'", "schedule?ranks=65": "ranks", "schedule?F=nan": "F = 'nan'",
    "schedule?ranks=%C2%B2": "ranks", "schedule?F=-1": "F = '-1'", "schedule?F=1e9": "F = '1e9'",
    "schedule?schedule=torch": "schedule = 'torch'",
    "schedule?schedule=dualpipe&ranks=3": "ranks=4 would work",
    "schedule?schedule=dualpipe-v&micro_batches=3": "micro_batches=8 would work",
    "schedule?ranks=64&micro_batches=1024": "actions", "ring?ranks=17": "ranks",
    "ring?n=4": "no parameter", "ring?window=3": "window=8 would work",
    "ring?documents=257": "documents = '257'", "ring?cut=x": "cut = 'x' is none of sequence, doc",
    "ring?ranks=16&documents=16&cut=document": "32 chunks that each is cut into; documents=32 w",
    "cuts?tp=3": "heads 8 is not a multiple of tp = 3",
    "cuts?pp=8": "layers 4 is less", "cuts?ep=2": "of which there are none",
    "cuts?dp=8&tp=8&pp=2": "more than 64",
    "cuts?kv_heads=3": "kv heads", "cuts?experts=4&ep=3&dp=3": "of ep = 3",
    "cuts?dp=3&ep=2&experts=4": "dp 3 x", "cuts?experts=1": "than experts = 1",
    "cuts?cp=64": "seq 64",
    "roofline?chips=1": "chips = '1'", "roofline?model=mixtral": "model = 'mixtral' is none",
    "roofline?tokens=4": "no parameter", "roofline?strategy=dp": "none of zero-3, tp, both",
    "roofline?cluster=h100&zero_axes=2": "a switch, and no axes; zero_axes=1 would work",
    "roofline?zero_axes=2&tp_axes=2": "the 3 axes of tpu-v5p; zero_axes=1 would work",
    "roofline?tp_axes=3": "all axes of tpu-v5p; tp_axes=1 would work",
    "nothing?": "no question", "../plan?": "no question", "ring?&&": "&&", "ring?ranks": "'ranks'",
    "plan?" + "&".join(f"x{i}=1" for i in range(101)): "Max number"}


@pytest.mark.parametrize("question", BAD)
def test_a_bad_question_costs_one_line(question):
    name, _, query = question.partition("?")
    status, told = server.answer(name, query)
    assert status == 400 and list(told) == ["error"]
    assert BAD[question] in told["error"] and "\n" not in told["error"]
