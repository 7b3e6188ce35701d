"""Chapter 10 against other chapters' formulas, and how it searches."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

import common
from lab.planner.models import as_planned
from lab.run import anatomy
from tests.conftest import chapter, sample

TEN = "10_planner"


@pytest.fixture
def ten():
    return chapter(TEN)


def config(model):
    """The same model, as chapters 01 to 09 train it."""
    return common.Config(model.layers, model.dim, model.heads, model.kv_heads, model.seq,
                         model.vocab, model.tie, "plain", model.gated, model.ffn)


# ----------------------------------------------------------------------- other chapters' formulas


@pytest.mark.parametrize(("flash", "gated"), [(False, False), (True, False), (True, True)])
def test_activations_are_those_of_chapters_04_and_05(ten, flash, gated):
    """For an odd model, and with two differences: norms keep a mean and a deviation as well, and o
    reads a copy of a flash kernel's output, unless a rank has one head."""
    model = replace(ten.gpt(3, 48, 6, seq=30, vocab=250, tie=False), kv_heads=3, gated=gated)
    software, of_inputs = ten.Software(flash=flash, swiglu_kept=4), 2 * 2 * 3 * 30 * 48
    cfg = replace(config(model), attention="sdpa" if flash else "plain")
    statistics = 2 * anatomy.norm_bytes(cfg, 3 * 30, 2) - of_inputs
    assert gated or statistics == 2 * 2 * 2 * 3 * 30
    for tp, sp in itertools.product((1, 2, 3, 6), (False, True)):
        copy = 2 * 3 * 30 * 48 / tp if flash and tp < 6 else 0
        shares = chapter("05_sequence_parallel" if sp else "04_tensor_parallel").kept(cfg, tp)
        measured = anatomy.kept_by_modules(cfg, 3, 2, shares)[1]
        ours = ten.kept_by_layer(model, ten.Layout(tp=tp, sp=sp, micro_batch=3), software)
        assert ours + statistics / (tp if sp else 1) + copy == measured, (tp, sp)


def test_parameters_and_flops_are_chapter_01s(ten):
    one = chapter("01_single_gpu")
    for model in (ten.gpt(3, 64, 4, seq=32, vocab=256), ten.gpt(3, 64, 4, tie=False, vocab=500),
                  ten.llama(3, 64, 4, 2, 96, 500, 32)):
        cfg = config(model)
        assert model.parameters() == cfg.parameters()
        assert ten.step_flops(model, 5) == one.model_flops(cfg, 5)
        again = ten.step_flops(model, 5, recompute="full")
        assert again == one.step_flops(cfg, 5, "plain", "full")
    causal, every = ten.step_flops(model, 5, "causal"), ten.step_flops(model, 5)
    assert every - causal == 3 * model.layers * 5 * model.seq * 2 * model.seq * model.dim


def test_bubbles_and_micro_batches_in_memory_are_chapter_07s(ten):
    """Where chapter 07's formula is None, there are too few micro-batches, and it's refused."""
    seven, model = chapter("07_pipeline_parallel"), ten.gpt(16, 64, 4, seq=32, vocab=256)
    names = {"1f1b": "1f1b", "zero-bubble": "zb-h1", "dualpipe-v": "dualpipe-v"}
    for (ours, theirs), p, m in itertools.product(names.items(), (2, 4, 8), (1, 3, 4, 7, 8, 17)):
        layout = ten.Layout(pp=p, schedule=ours)
        least = {"zero-bubble": p, "dualpipe-v": 2 * p}.get(ours, 1)
        assert bool(ten.misfit(model, layout, p, m)) == (m < least)
        if m >= 2 * p:
            wait = ten.bubble(layout, F=3, B=4, W=2)
            assert wait / (m * 9) == pytest.approx(seven.bubble(theirs, p, m, 1, 3, 4, 2))
            stages = 2 if ours == "dualpipe-v" else 1
            assert ten.micro_batches_alive(layout, m) == (
                seven.most_alive(theirs, 0, p, m, stages) / stages)
    layout = ten.Layout(pp=4, v=2)
    assert ten.bubble(layout, 1, 1, 1) / (8 * 3) == seven.bubble("interleaved", 4, 8, 2)
    assert ten.micro_batches_alive(layout, 8) == seven.most_alive("interleaved", 0, 4, 8, 2) / 2
    assert [m for m in range(1, 9) if not ten.misfit(model, layout, 4, m)] == [4, 8]


AXES = [(pp, cp, tp) for pp, cp, tp in itertools.product((2, 1, 4, 8), repeat=3)
        if 8 % (pp * cp * tp) == 0]


@pytest.mark.parametrize(("pp", "cp", "tp"), sample(AXES))
def test_states_activations_and_traffic_are_those_of_chapter_09(ten, nine_runs, pp, cp, tp):
    """On 8 ranks, of the rank with most. Chapter 09's runs are checked against its formulas."""
    schedules = ["1f1b"] + ["interleaved", "dualpipe-v"] * (pp > 1)
    for schedule, zero in itertools.product(schedules, range(3)):
        args, answers, e = nine_runs(pp, cp, tp, schedule, zero)
        model = as_planned(args.model)
        v = 2 if schedule == "interleaved" else 1
        layout = ten.Layout(args.dp, tp, cp, pp, v, zero=zero, micro_batch=args.micro_batch,
                            schedule="dualpipe-v" if schedule == "dualpipe-v" else "1f1b")
        ours, m = ten.SOFTWARE["ours"], args.micro_batches

        # How many numbers of each kind are on the fullest rank, and how many ranks share them.
        planned = ten.parameters_of_gpu(model, layout, ours)
        fullest = max(answers, key=lambda answer: sum(numbers_of(args, answer).values()))
        assert {kind: size for kind, (size, _) in planned.items()} == numbers_of(args, fullest)
        assert {kind: n for kind, (_, n) in planned.items()} == {
            kind: fullest["holders"][kind] for kind in planned}

        # What a layer keeps, and for how many micro-batches at a time.
        shares = layout.shares(model, ours)
        assert shares == {name: anatomy.share_of(fullest["kept"], name) for name in shares}
        blocks = [max(alive_blocks(answer["schedule"])) for answer in answers]
        first, last = (ten.micro_batches_alive(layout, m, stage) for stage in (0, pp - 1))
        assert blocks[0] == first * model.layers / pp and blocks[-1] == last * model.layers / pp

        # Bytes on the wire of each axis.
        passes = m * model.layers // pp
        for axis, (numbers, n, _, _) in ten.messages(model, layout).items():
            sent = sum(part[1] for part in fullest["sent"].get(axis, {}).values())
            assert sent == (2 * passes * e * numbers if n > 1 else 0), axis


def numbers_of(args, answer):
    """{kind: numbers} of a rank, by lab/run/anatomy.py."""
    held = anatomy.held_by_modules(args.model, answer["parameters"], answer["modules"])
    return {kind: sum(module.get(kind, (0, 0))[0] for module in held)
            for kind in ("queries", "keys", "mlp", "norms", "tables")}


def alive_blocks(schedule):
    """Blocks of micro-batches that a rank keeps, after each action."""
    alive, slices = 0, schedule["slices"]
    for kind, stage, _ in schedule["actions"]:
        start, end = slices[stage]
        blocks = end - start - (stage == 0) - (stage == len(slices) - 1)
        alive += blocks if kind == "F" else -blocks
        yield alive


@pytest.fixture
def nine_runs():
    """A function of axes: the arguments of a run of chapter 09, the formulas of its ranks along pp,
    and the bytes of a number."""
    nine = chapter("09_5d")

    def run(pp, cp, tp, schedule, zero, ep=1, experts=0, shared_expert=False):
        cfg = common.Config(16, 16, 8, 2, 32, 64, False, "plain", zero == 1, 48)
        args = SimpleNamespace(
            variant="hand", dtype="float32", precision="fp32", recompute="none", model=cfg,
            batch=128, micro_batch=1, pp=pp, cp=cp,
            tp=tp, ep=ep, dp=None, zero=zero, schedule=schedule, experts=experts, top_k=2,
            like=None, order="pp,dp,cp,tp", node_size=8, keep_gathered=False,
            shared_expert=shared_expert, documents=None)
        nine.requires(args, 8)
        full = nine.build(args.model)
        schedules, owners = nine.make_schedule(schedule, pp, args.micro_batches)
        slices, answers = nine.balanced(cfg.layers, len(owners)), []
        for stage in range(pp):
            parts = [full[slice(*slices[i])] for i, owner in enumerate(owners) if owner == stage]
            for block in (block for part in parts for block in part if experts and hasattr(
                    block, "mlp")):                     # all experts are chosen equally often
                rows = [args.micro_batch * 32 // (cp * tp) * 2 // ep] * ep
                block.mlp.seen = [(rows, rows)] * args.micro_batches
            answers.append(nine.formulas(args, stage * (8 // pp), 8, Parts(parts)))
        return args, answers, 4

    return run


class Parts(list):
    """A rank's stages, as a model without parameters."""

    blocks = ()

    def parameters(self):
        return []


# --------------------------------------------------------------------------------------- the search


def test_the_search_finds_what_trying_all_finds(ten):
    model, cluster = replace(ten.MODELS["8b"], seq=8192), ten.CLUSTERS["h100"]
    software, fixed = ten.SOFTWARE["torchtitan"], {"v": 1, "ep": 1}
    fit, _ = ten.search(model, cluster, software, 16, 32, fixed, most=2)
    best = math.inf
    for dp, tp, cp, pp, zero, b, again in itertools.product(
            *[(1, 2, 4, 8, 16)] * 4, (0, 1, 3), (1, 2), ("none", "full")):
        layout = ten.Layout(dp, tp, cp, pp, 1, 1, zero, tp > 1, b, again)
        if tp <= 8 and cp <= 2 and ten.misfit(model, layout, 16, 32) is None:
            needed = ten.memory(model, layout, software, 32 // dp // b)
            if sum(needed.values()) <= ten.ROOM * cluster.memory:
                best = min(best, sum(ten.step_seconds(model, layout, cluster, software,
                                                      32).values()))
    assert fit[0].total == best
    assert [plan.total for plan in fit] == sorted(plan.total for plan in fit)
