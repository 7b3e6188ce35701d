"""Chapter 10: held to what was published, to other chapters' formulas, and to its own search."""

import contextlib
import errno
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import common
from lab.bench import anatomy
from lab.cli import refusals
from lab.planner import planning, published
from tests.conftest import ROOT, chapter
from tests.support import trials

TEN = "10_planner"


@pytest.fixture
def ten():
    return chapter(TEN)


def config(model):
    """The same model, as chapters 01 to 09 train it."""
    return common.Config(model.layers, model.dim, model.heads, model.kv_heads, model.seq,
                         model.vocab, model.tie, "plain")


# ------------------------------------------------------------------------------- what was published


def test_published_tables_are_predicted():
    assert published.beyond() == []
    for table in published.GOALS:
        ours, constant = published.errors(published.rows(table))
        assert sum(map(abs, ours)) < sum(map(abs, constant)) / 2


def test_constants_are_those_that_fit(ten):
    assert published.fit(start=(0.8, 0.8)) == pytest.approx([ten.HBM, ten.NVLINK], abs=3e-3)


def test_every_layout_of_table_1_fits_and_none_with_half_as_much_model_parallelism(ten):
    memory = ten.CLUSTERS["a100"].memory

    def bytes_on(row, fewer_tp=1, fewer_pp=1):
        layers, dim, heads, tp, pp, v, gpus, batch, micro_batch = map(int, row.split())
        tp, pp = tp // fewer_tp, pp // fewer_pp
        if not tp or not pp:
            return math.inf
        dp = gpus // (tp * pp)
        layout = ten.Layout(dp, tp, 1, pp, v if pp > 1 else 1, sp=False, micro_batch=micro_batch,
                            recompute="full")
        needed = ten.memory(ten.gpt(layers, dim, heads), layout, ten.SOFTWARE["megatron-2021"],
                            batch // dp // micro_batch)
        return sum(needed.values())

    for row, *_ in published.rows("table 1"):
        assert bytes_on(row) < ten.ROOM * memory
        assert min(bytes_on(row, fewer_tp=2), bytes_on(row, fewer_pp=2)) > memory


def test_micro_batch_of_two_is_best_where_megatron_found_it_best(ten):
    """Figure 16: 91 billion parameters, tp 8, pp 8, 64 GPUs, a batch of 128."""
    model = ten.gpt(layers=32, dim=15360, heads=120)
    seconds = {b: sum(ten.step_seconds(model, ten.Layout(1, 8, 1, 8, sp=False, micro_batch=b,
                                                         recompute="full"),
                                       ten.CLUSTERS["a100"], ten.SOFTWARE["megatron-2021"],
                                       128).values()) for b in (1, 2, 4, 8)}
    assert min(seconds, key=seconds.get) == 2


def test_worked_problems_have_the_books_answers():
    text = " ".join(published.problems())
    for answer in ("13.0 G parameters (13.0)", "130 GB (130)", "42 TB (42)", "8 TB (8)",
                   "393 TB (393)", "850 tokens of a chip (850)", "below 235 (235)",
                   "over 1333 chips (1333)", "0.31 s", "2 is best (2)", "24% of the speed",
                   "each layer is one"):
        assert answer in text


def test_messages_over_compute_are_the_playbooks(ten):
    """A3, with 2 bytes a number: one layer's messages and matmuls, by the planner itself."""
    model, n, tokens = ten.Model(1, 64, 4, 4, 256, True, seq=32, vocab=1), 4, 32
    cluster = ten.Cluster(1e12, 1, 1, 1e30, 1, nvlink=1e9 / ten.NVLINK, nic=1, alpha=0)
    machine, weights = ten.Machine(cluster, ten.Software()), 16 * 64**2
    ratios = ten.sending_over_computing(tokens, n, 64, 1, 1e12, 1e9)
    forward = 2 * tokens * weights / 1e12
    assert model.weights(1) == weights
    assert ratios["zero-3"] == pytest.approx(machine.ring(2 * weights, n, 1) / forward)
    assert ratios["dp"] == pytest.approx(2 * machine.ring(2 * weights, n, 1) / (2 * forward))
    assert ratios["tp"] == pytest.approx(machine.ring(2 * tokens * 64, n, 1)
                                         / machine.matmul(tokens, 64, 64 / n))
    assert ratios["pp"] == pytest.approx(2 * tokens * 64 / 1e9 / forward)
    # As A3 has them, where a number of all but dp's is one byte.
    share, rate = (n - 1) / n, 1e12 / 1e9
    theirs = {"zero-3": share / (2 * tokens), "tp": (n - 1) / (2 * 64), "pp": 1 / (32 * 64)}
    for axis, ratio in theirs.items():
        assert ratios[axis] == pytest.approx(2 * ratio * rate), axis


def test_best_checkpoints_keep_least(ten):
    layers, of_input, of_layer = 36, 1.0, 4.0
    kept = {c: c * of_input + layers / c * of_layer for c in range(1, layers + 1)}
    assert ten.best_checkpoints(layers, of_input, of_layer) == min(kept, key=kept.get) == 12


# ----------------------------------------------------------------------- other chapters' formulas


def test_activations_are_korthikantis(ten):
    model, b, t = ten.gpt(4, 256, 8, seq=128), 3, 4
    s, h, a = model.seq, model.dim, model.heads
    unfused = ten.Software(flash=False, dropout=True)
    kept = lambda **layout: ten.kept_by_layer(
        model, ten.Layout(**{"micro_batch": b, "sp": False} | layout), unfused)
    core = 5 * a * s / h
    assert kept() == s * b * h * (34 + core)
    assert kept(tp=t) == s * b * h * (10 + 24 / t + core / t)
    assert kept(tp=t, sp=True) == s * b * h * (34 + core) / t
    assert kept(tp=t, sp=True, recompute="selective") == s * b * h * 34 / t
    assert kept(recompute="full") == 2 * s * b * h


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
@pytest.mark.parametrize("flash", [False, True])
def test_activations_are_those_of_chapters_04_and_05(ten, tp, flash):
    """Of an odd model: fewer kv heads than ranks, a vocabulary that does not divide. But for the
    mean and the deviation of each token, 2 bytes each, that two LayerNorms keep; and for the output
    of a flash kernel, which o reads as it is where a rank has one head, and else a copy of it."""
    model = replace(ten.gpt(3, 48, 6, seq=30, vocab=250, tie=False), kv_heads=3)
    software, statistics = ten.Software(flash=flash), 2 * 2 * 2 * 3 * 30
    copy = 2 * 3 * 30 * 48 / tp if flash and tp < 6 else 0
    cfg = replace(config(model), attention="sdpa" if flash else "plain")
    for sp, name in ((False, "04_tensor_parallel"), (True, "05_sequence_parallel")):
        shares = chapter(name).kept(cfg, tp)
        measured = anatomy.kept_by_modules(cfg, 3, 2, shares)[1]
        ours = ten.kept_by_layer(model, ten.Layout(tp=tp, sp=sp, micro_batch=3), software)
        assert ours + statistics / (tp if sp else 1) + copy == measured


def test_model_states_are_shared_out_as_in_chapter_03(ten):
    """2 bytes of weights, 4 of gradients and 12 of the optimizer a parameter."""
    model, n = ten.gpt(4, 64, 4, seq=32, vocab=256), 4
    numbers, layer = model.parameters(), model.weights(1)
    states = lambda **more: [size / numbers for cause, size in ten.memory(
        model, ten.Layout(n, **more), ten.Software(), 1).items() if cause != "activations"]
    held = lambda *args: ten.parameters_of_gpu(*args, ten.Software())
    assert states() == [2, 4, 12]
    assert states(zero=1) == [2, 4, 12 / n]
    assert states(zero=2) == [2, 4 / n, 12 / n]
    assert states(zero=3) == [2 / n + 4 * layer / numbers, 4 / n, 12 / n]   # two layers are whole

    mixture = replace(model, experts=8)
    parts = held(mixture, ten.Layout(n, ep=2))
    experts, holders = parts["mlp"]
    assert experts == 4 * 8 * 2 * 64 * 256 / 2 and holders == 2
    assert sum(size for size, _ in parts.values()) == mixture.parameters() - experts
    needed = ten.memory(mixture, ten.Layout(n, ep=2, zero=1), ten.Software(), 1)
    others = mixture.parameters() - 2 * experts
    assert needed["optimizer"] == 12 * (experts / 2 + others / n)
    kv_heads = held(replace(model, kv_heads=2), ten.Layout(2, tp=4))["keys"]    # tp of 4 has 2 each
    assert kv_heads == (4 * 2 * 64 * 32 / 2, 4)


def test_parameters_and_flops_are_chapter_01s(ten):
    one = chapter("01_single_gpu")
    for model in (ten.gpt(3, 64, 4, seq=32, vocab=256), ten.gpt(3, 64, 4, tie=False, vocab=500)):
        cfg = config(model)
        assert model.parameters() == cfg.parameters()
        assert ten.step_flops(model, 5) == one.model_flops(cfg, 5)
        again = ten.step_flops(model, 5, recompute="full")
        assert again == one.step_flops(cfg, 5, "plain", "full")
    causal, every = ten.step_flops(model, 5, "causal"), ten.step_flops(model, 5)
    assert every - causal == 3 * model.layers * 5 * model.seq * 2 * model.seq * model.dim


def test_the_bubble_and_what_is_alive_are_chapter_07s(ten):
    seven = chapter("07_pipeline_parallel")
    names = {"1f1b": "1f1b", "zero-bubble": "zb-h1", "dualpipe-v": "dualpipe-v"}
    for (ours, theirs), p, m in itertools.product(names.items(), (2, 4, 8), (17, 32)):
        layout = ten.Layout(pp=p, schedule=ours)
        wait = ten.bubble(layout, F=3, B=4, W=2)
        assert wait / (m * 9) == pytest.approx(seven.bubble(theirs, p, m, 1, 3, 4, 2))
        stages = 2 if ours == "dualpipe-v" else 1
        assert ten.micro_batches_alive(layout, m) == seven.most_alive(theirs, 0, p, m, 1) / stages
    layout = ten.Layout(pp=4, v=2)
    assert ten.bubble(layout, 1, 1, 1) / (8 * 3) == seven.bubble("interleaved", 4, 8, 2)
    assert ten.micro_batches_alive(layout, 8) == seven.most_alive("interleaved", 0, 4, 8, 2) / 2


def layouts_of_8():
    """The flags of chapter 09 for every product of dense axes on 8 ranks, with each ZeRO."""
    for pp, cp, tp in itertools.product((1, 2, 4, 8), repeat=3):
        if 8 % (pp * cp * tp) == 0:
            schedules = ["1f1b"] + ["interleaved", "dualpipe-v"] * (pp > 1)
            for schedule, zero in itertools.product(schedules, range(3)):
                yield pp, cp, tp, schedule, zero


@pytest.mark.parametrize(("pp", "cp", "tp"), sorted({axes[:3] for axes in layouts_of_8()}))
def test_states_activations_and_traffic_are_those_of_chapter_09(ten, nine_runs, pp, cp, tp):
    """Its formulas, to which its runs are held, of the rank that has most."""
    for schedule, zero in [axes[3:] for axes in layouts_of_8() if axes[:3] == (pp, cp, tp)]:
        args, answers, e = nine_runs(pp, cp, tp, schedule, zero)
        model = anatomy.as_planned(args.model)
        v = 2 if schedule == "interleaved" else 1
        layout = ten.Layout(args.dp, tp, cp, pp, v, zero=zero, micro_batch=args.micro_batch,
                            schedule="dualpipe-v" if schedule == "dualpipe-v" else "1f1b")
        ours, m = ten.SOFTWARE["ours"], args.micro_batches

        # What each kind of parameter has on the fullest rank, and who shares it.
        planned = ten.parameters_of_gpu(model, layout, ours)
        fullest = max(answers, key=lambda answer: sum(numbers_of(args, answer).values()))
        assert {kind: size for kind, (size, _) in planned.items()} == numbers_of(args, fullest)
        assert {kind: n for kind, (_, n) in planned.items()} == {
            kind: fullest["holders"][kind] for kind in planned}

        # What a layer keeps, and how many micro-batches of it are alive at a time.
        shares = layout.shares(model, ours)
        assert shares == {name: anatomy.share_of(fullest["kept"], name) for name in shares}
        blocks = [max(alive_blocks(answer["schedule"])) for answer in answers]
        first, last = (ten.micro_batches_alive(layout, m, stage) for stage in (0, pp - 1))
        assert blocks[0] == first * model.layers / pp and blocks[-1] == last * model.layers / pp

        # What goes over each axis, in bytes on the wire, and messages to other stages.
        passes = m * model.layers // pp
        for axis, (numbers, n, _, _) in ten.messages(model, layout).items():
            sent = sum(part[1] for part in fullest["sent"].get(axis, {}).values())
            assert sent == (2 * passes * e * numbers if n > 1 else 0), axis


def numbers_of(args, answer):
    """{kind: numbers} of a rank, by lab/bench/anatomy.py."""
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

    def run(pp, cp, tp, schedule, zero):
        cfg = common.Config(16, 16, 8, 2, 32, 64, False, "plain")
        args = SimpleNamespace(
            variant="hand", dtype="float32", model=cfg, batch=128, micro_batch=1, pp=pp, cp=cp,
            tp=tp, ep=1, dp=None, zero=zero, schedule=schedule, experts=0, top_k=2, like=None,
            order="pp,dp,cp,tp", node_size=8)
        nine.requires(args, 8)
        full = nine.build(args.model)
        schedules, owners = nine.make_schedule(schedule, pp, args.micro_batches)
        slices, answers = nine.balanced(cfg.layers, len(owners)), []
        for stage in range(pp):
            parts = [full[slice(*slices[i])] for i, owner in enumerate(owners) if owner == stage]
            answers.append(nine.formulas(args, stage * (8 // pp), 8, Parts(parts)))
        return args, answers, 4

    return run


class Parts(list):
    """A rank's stages, whose parameters no group holds."""

    def parameters(self):
        return []


def test_rooflines_are_those_of_chapters_02_and_04(ten):
    flops, bandwidth = 989e12, 450e9
    tokens = chapter("02_data_parallel").tokens_to_hide(2, 10**9, flops, bandwidth)
    assert ten.tokens_of_data_parallel(flops, bandwidth) == pytest.approx(tokens)
    ranks = chapter("04_tensor_parallel").ranks_that_pay(4096, 2, flops, bandwidth)
    assert ten.largest_tensor_parallel(4 * 4096, flops, bandwidth) == pytest.approx(ranks - 1)


# ---------------------------------------------------------------------------------------- the time


def test_a_ring_leaves_a_node_through_the_cards_of_its_members(ten):
    cluster = ten.Cluster(1e12, 1, 1, 1e12, 1e9, nvlink=8e9 / ten.NVLINK, nic=1e9 / ten.NIC,
                          alpha=0, nic_alpha=0)
    machine = ten.Machine(cluster, ten.Software())
    assert machine.links(8, 1) == pytest.approx(8e9)            # all in a node
    assert machine.links(2, 4) == pytest.approx(8e9)
    assert machine.links(4, 8) == pytest.approx(1e9)            # one in each node
    assert machine.links(8, 2) == pytest.approx(4e9)            # four in each
    assert machine.links(16, 1) == pytest.approx(8e9)           # eight cards, NVLink's at most
    one_card = ten.Machine(cluster, ten.Software(one_card=True))
    assert one_card.links(16, 1) == pytest.approx(1e9)
    assert machine.links(12, 1) == pytest.approx(4e9)           # the last node has four
    assert machine.links(9, 1) == machine.links(5, 2) == pytest.approx(1e9)
    assert machine.ring(12e9, 4, 8) == pytest.approx(9)         # 3/4 of 12 GB at 1 GB/s
    assert machine.ring(12e9, 1, 1) == 0


def test_each_cause_is_there_when_its_axis_is(ten):
    model, h100, software = ten.MODELS["8b"], ten.CLUSTERS["h100"], ten.SOFTWARE["ours"]
    seconds = lambda **layout: ten.step_seconds(model, ten.Layout(**layout), h100, software, 64)
    alone = seconds()
    assert not any(alone.get(cause, 0) for cause in ("tp", "cp", "ep", "pp", "bubble", "dp"))
    assert seconds(tp=2)["tp"] > 0 and seconds(cp=2)["cp"] > 0 and seconds(dp=2)["dp"] > 0
    assert seconds(pp=2)["pp"] > 0 and seconds(pp=2)["bubble"] > 0
    assert seconds(tp=2)["matmul"] > alone["matmul"] / 2        # thinner slices
    assert seconds(zero=3, dp=8)["dp"] > seconds(zero=1, dp=8)["dp"]    # in every micro-batch
    assert seconds(recompute="full")["matmul"] == pytest.approx(
        alone["matmul"] + 64 * model.layers * ten.layer_seconds(
            model, ten.Layout(), ten.Machine(h100, software))[0]["matmul"])


def test_zero_2_and_3_send_in_every_micro_batch(ten):
    """Bytes of a parameter: gradients (4), weights (2), each (n-1)/n times over the link."""
    model, n, m = ten.gpt(4, 64, 4, seq=32, vocab=256), 4, 8
    cluster = ten.Cluster(1e15, 1, 1, 1e15, 1e9, nvlink=1e9 / ten.NVLINK, nic=1e9, alpha=0)
    software, of_numbers = ten.Software(dp_hidden=0), (n - 1) / n * model.parameters() / 1e9
    seconds = lambda zero, **more: ten.step_seconds(
        model, ten.Layout(n, zero=zero), cluster, replace(software, **more), n * m)["dp"]
    for zero, width in enumerate((2 * 4, 4 + 2, m * 4 + 2, m * (2 + 2 + 4))):
        assert seconds(zero) == pytest.approx(width * of_numbers)
    assert seconds(3, dp_hidden=1) < seconds(3, dp_hidden=0.5) < seconds(3)
    assert seconds(1, dp_hidden=1) < seconds(1)


def test_a_ring_of_keys_hides_behind_attention_and_keeps_its_own_alone(ten):
    model, layout = ten.MODELS["8b"], ten.Layout(cp=4)
    machine = lambda nvlink, **more: ten.Machine(replace(ten.CLUSTERS["h100"], nvlink=nvlink),
                                                 ten.Software(**more))
    cp = lambda *args, **more: [part["cp"] for part in ten.layer_seconds(
        model, layout, machine(*args, **more))]
    gathered, ring = ten.Software(), ten.Software(ring=True)
    assert cp(450e9, ring=True) == [0, 0]
    (forward, backward), (gather, scatter) = cp(1e8, ring=True), cp(1e8)
    attention = [part["attention"] for part in ten.layer_seconds(model, layout, machine(1))]
    assert forward == pytest.approx(gather - attention[0])
    assert backward == pytest.approx(2 * scatter - attention[1])
    keys = lambda software: layout.shares(model, software)["keys and values"]
    assert (keys(gathered), keys(ring)) == (1, 1 / 4)


def test_the_slowest_stage_has_the_head_or_one_layer_more(ten):
    h100, software = ten.CLUSTERS["h100"], ten.SOFTWARE["ours"]
    of_layers = lambda layers, vocab=1: ten.step_seconds(
        ten.gpt(layers, 1024, 16, vocab=vocab), ten.Layout(pp=4), h100, software, 8)["matmul"]
    assert of_layers(13) == pytest.approx(of_layers(16), rel=0.01)      # 4 3 3 3, as 4 4 4 4
    with_head = of_layers(16, vocab=60000)
    assert of_layers(15, vocab=60000) < with_head                       # 4 4 4 3 and the head
    assert of_layers(13, vocab=60000) == of_layers(15, vocab=60000)


def test_the_first_stage_keeps_most_or_the_last_one_with_its_logits(ten):
    software = ten.SOFTWARE["megatron-2024"]
    kept = lambda vocab, **layout: ten.memory(ten.gpt(8, 1024, 16, vocab=vocab), ten.Layout(
        **layout), software, 8)["activations"]
    block = ten.kept_by_layer(ten.gpt(8, 1024, 16), ten.Layout(), software)
    assert kept(1000, pp=4) == 4 * 2 * block                            # of four micro-batches
    assert kept(10**6, pp=4) == 2 * block + 8 * 2048 * 10**6
    assert kept(1000) == 8 * block + 8 * 2048 * 1000


def test_the_bubble_is_that_of_stages_without_the_head(ten):
    """The first micro-batch goes through the other stages, which have none."""
    waits = lambda vocab: ten.step_seconds(
        ten.gpt(16, 1024, 16, vocab=vocab), ten.Layout(pp=4), ten.CLUSTERS["h100"],
        ten.SOFTWARE["megatron-2024"], 8)["bubble"]
    assert waits(1) == waits(128256)


def test_micro_batches_are_enough_for_their_schedule(ten):
    """What is accepted has the bubble of chapter 07's formula, which is None for too few."""
    seven, model = chapter("07_pipeline_parallel"), ten.gpt(16, 64, 4, seq=32, vocab=256)
    names = {"1f1b": "1f1b", "zero-bubble": "zb-h1", "dualpipe-v": "dualpipe-v"}
    for (ours, theirs), p, m in itertools.product(names.items(), (2, 4), range(1, 10)):
        refused = ten.misfit(model, ten.Layout(pp=p, schedule=ours), p, m)
        least = {"zero-bubble": p, "dualpipe-v": 2 * p}.get(ours, 1)
        assert bool(refused) == (m < least)
        assert refused or seven.bubble(theirs, p, m, 1) is not None
    fits = [m for m in range(1, 9) if not ten.misfit(model, ten.Layout(pp=4, v=2), 4, m)]
    assert fits == [4, 8]


def test_what_is_sent_to_experts_leaves_the_node_through_a_card_of_each_gpu(ten):
    model, h100 = ten.MODELS["mixtral"], replace(ten.CLUSTERS["h100"], alpha=0, nic_alpha=0)
    ep = lambda tp: ten.layer_seconds(model, ten.Layout(8, tp, ep=8), ten.Machine(
        h100, ten.SOFTWARE["megatron-2024"]))[0]["ep"]
    assert ep(2) / ep(1) == pytest.approx(450e9 * ten.NVLINK / (50e9 * ten.NIC))
    # Each expert's matrices are read, and each has a share of the rows.
    machine = ten.Machine(ten.Cluster(1e30, 1, 1, 1e12 / ten.HBM, 1, 1, 1), ten.Software())
    seconds = lambda experts: ten.layer_seconds(
        replace(model, experts=experts), ten.Layout(), machine)[0]["matmul"]
    assert seconds(16) - seconds(8) == pytest.approx(8 * 2 * 3 * 4096 * 14336 / 1e12)


def test_messages_hide_behind_no_more_than_there_is(ten):
    software = ten.SOFTWARE["megatron-2024"]
    slow = ten.Machine(replace(ten.CLUSTERS["h100"], nvlink=1e9), software)
    model, layout = ten.MODELS["8b"], ten.Layout(tp=8)
    sent = slow.ring(2 * 4 * 8192 * 4096, 8, 1, 4)
    for part in ten.layer_seconds(model, layout, slow):
        assert part["tp"] == pytest.approx(sent - part["matmul"])
    # ZeRO-3's gathers of forward behind forward, the others behind backward.
    quick = ten.step_seconds(model, ten.Layout(8, zero=3), ten.CLUSTERS["h100"], software, 8)
    assert quick["dp"] == 0
    cluster = replace(ten.CLUSTERS["h100"], nvlink=40e9)
    forward, backward = (sum(part.values()) * 32 for part in ten.layer_seconds(
        model, ten.Layout(8, zero=3), ten.Machine(cluster, software)))
    bytes_of = ten.Machine(cluster, software).ring(model.parameters(), 8, 1, 32)
    head = ten.step_seconds(model, ten.Layout(8, zero=3), cluster, software, 8)["dp"]
    assert head == pytest.approx(max(0, 2 * bytes_of - 0.9 * forward)
                                 + max(0, 6 * bytes_of - 0.9 * backward), rel=0.01)


def test_hops_take_time_within_a_node_and_between_nodes(ten):
    cluster = replace(ten.CLUSTERS["h100"], alpha=1.0, nic_alpha=100.0)
    ring = lambda n, stride: ten.Machine(cluster, ten.Software()).ring(0, n, stride)
    assert ring(8, 1) == 7 and ring(16, 1) == 2 * 100 + 13      # two of 15 hops leave a node
    assert ring(4, 8) == 300 and ring(1, 8) == 0
    assert ring(12, 1) == 2 * 100 + 9                           # to the node of four, and back
    at = lambda n: ten.step_seconds(ten.MODELS["8b"], ten.Layout(n, zero=3), ten.CLUSTERS["h100"],
                                    ten.SOFTWARE["torchtitan"], n)["dp"]
    assert at(4096) > at(64)                                    # a ring of more ranks has more hops


@pytest.mark.parametrize("name", ["8b", "gpt3", "mixtral"])
def test_matmuls_are_those_whose_flops_are_counted(ten, name):
    """All matmuls of a step, with a memory that takes no time: as many FLOPs as step_flops has."""
    model = replace(ten.MODELS[name], seq=1024)
    cluster = ten.Cluster(1e15, 1, 1, 1e40, 1e9, nvlink=1e30, nic=1e30)
    software = replace(ten.SOFTWARE["torchtitan"], flash=False)
    for layout in (ten.Layout(micro_batch=2), ten.Layout(recompute="full"), ten.Layout(2, 2, 2)):
        seconds = ten.step_seconds(model, layout, cluster, software, 4)
        ranks = layout.dp * layout.tp * layout.cp
        assert (seconds["matmul"] + seconds["attention"]) * 1e15 * ranks == pytest.approx(
            ten.step_flops(model, 4, recompute=layout.recompute))


def test_flash_attention_computes_half_of_the_scores_and_backward_five_products(ten):
    model, cluster = ten.MODELS["8b"], ten.CLUSTERS["h100"]
    attention = lambda **layout: [part["attention"] for part in ten.layer_seconds(
        model, ten.Layout(**layout), ten.Machine(cluster, ten.Software()))]
    product = model.seq**2 * model.dim / (cluster.peak * cluster.attention)
    assert attention() == pytest.approx([2 * product, 5 * product])
    assert attention(tp=4, cp=2, micro_batch=2) == pytest.approx([product / 2, 5 * product / 4])


def test_a_mixture_keeps_and_sends_for_each_expert_of_a_token(ten):
    model = ten.MODELS["mixtral"]
    inside = lambda top_k: ten.numbers_kept(replace(model, top_k=top_k), 64,
                                            ten.Software())["inside"]
    assert inside(2) - inside(1) == 64 * 3 * model.ffn
    numbers, ranks, _, calls = ten.messages(model, ten.Layout(8, ep=4))["ep"]
    assert (numbers, ranks, calls) == (2 * 2 * model.seq * model.dim, 4, 2)
    backward = ten.layer_seconds(model, ten.Layout(8, ep=4), ten.Machine(
        ten.CLUSTERS["h100"], ten.SOFTWARE["torchtitan"]))[1]
    assert backward["ep"] > 0
    assert backward["weights"] == pytest.approx(
        8 * model.weights(2) / (ten.CLUSTERS["h100"].hbm * ten.HBM))


def test_cp_ranks_share_gradients_and_states_as_dp_ranks_do(ten):
    model, h100 = ten.MODELS["1b"], ten.CLUSTERS["h100"]
    software = replace(ten.SOFTWARE["torchtitan"], dp_hidden=0)
    dp = lambda **layout: ten.step_seconds(model, ten.Layout(**layout), h100, software, 64)["dp"]
    assert dp(dp=2, cp=2) == pytest.approx(dp(dp=4)) and dp(cp=4) == pytest.approx(dp(dp=4))
    assert dp(dp=4, cp=16) == pytest.approx(dp(dp=64))      # over the network
    fit, _ = ten.search(replace(ten.MODELS["8b"], seq=262144), h100,
                        software, 8, 8, {"cp": 8})
    assert fit[0].layout.zero == 3 and not fit[0].why   # with dp 1, over the ranks of cp


def test_what_hides_where(ten):
    """tp's messages in forward and in backward; dp's behind the last backward alone."""
    model, h100, layout = ten.MODELS["8b"], ten.CLUSTERS["h100"], ten.Layout(tp=8)
    tp = lambda **software: [part["tp"] for part in ten.layer_seconds(
        model, layout, ten.Machine(h100, ten.Software(**software)))]
    [shown, _], [half, whole] = tp(), tp(tp_hidden=0.5)
    assert half == pytest.approx(shown / 2) and whole == pytest.approx(shown)
    dp = lambda batch: ten.step_seconds(model, ten.Layout(8), replace(h100, nvlink=2e10),
                                        ten.SOFTWARE["torchtitan"], batch)["dp"]
    assert dp(8) == dp(64) > 0


def test_links_are_slower_the_further_they_go(ten):
    for name, cluster in ten.CLUSTERS.items():
        assert cluster.nic < cluster.nvlink < cluster.hbm, name
    bits = {"a100": (600e9, 200e9), "h100": (900e9, 400e9), "b200": (1800e9, 400e9)}
    for name, (both_ways, bits_per_second) in bits.items():     # as data sheets give them
        assert ten.CLUSTERS[name].nvlink == both_ways / 2
        assert ten.CLUSTERS[name].nic == bits_per_second / 8


def test_an_explanation_agrees_with_the_plans_it_speaks_of(ten):
    model, h100, software = ten.MODELS["70b"], ten.CLUSTERS["h100"], ten.SOFTWARE["llama3"]
    plan = ten.Plan(model, ten.Layout(8, 8, pp=4, v=4, zero=1), h100, software, 256, 256)
    lines = list(ten.explain(model, h100, software, 256, 256, plan))
    told = {line.split(" it would")[0].removeprefix("  with "): line for line in lines[2:]}
    for name, dp, change in (("tp 4", 16, {"tp": 4}), ("pp 8", 4, {"pp": 8, "v": 2}),
                             ("recompute full", 8, {"recompute": "full"})):
        other = ten.Plan(model, replace(plan.layout, dp=dp, **change), h100, software, 256, 256)
        share = other.total / plan.total - 1
        assert f"take {abs(share):.0%} {'more' if share > 0 else 'less'} time" in told[name]
        cause = told[name].partition("mostly ")[2].split()[0]
        sign = told[name].partition("mostly ")[2].split()[1][0]
        assert (sign == "+") == (other.seconds[cause] > plan.seconds[cause])
    alone = ten.Plan(ten.MODELS["8b"], ten.Layout(8, zero=3), h100, software, 8, 64)
    [line] = [line for line in ten.explain(ten.MODELS["8b"], h100, software, 8, 64, alone)
              if "with tp 2" in line]
    beside = ten.Plan(ten.MODELS["8b"], ten.Layout(4, 2, zero=3), h100, software, 8, 64)
    assert f"{beside.total / alone.total - 1:.0%} more" in line  # with sequence parallelism


def test_presets_have_their_sizes(ten):
    sizes = {"1b": 1.24, "7b": 6.74, "8b": 8.03, "70b": 70.6, "405b": 405.9, "gpt3": 174.6,
             "mixtral": 46.7}
    for name, size in sizes.items():
        assert ten.MODELS[name].parameters() / 1e9 == pytest.approx(size, rel=0.01), name


def test_fp8_halves_what_is_read_and_casts_it(ten):
    machine = ten.Machine(ten.Cluster(1e12, 1, 1, 1e12 / ten.HBM, 1, 1, 1), ten.Software())
    flops, numbers = 2 * 8 * 16 * 32 / 1e12, (8 * 16 + 16 * 32) / 1e12
    assert machine.matmul(8, 16, 32) == pytest.approx(flops + 2 * numbers + 2 * 8 * 32 / 1e12)
    assert machine.matmul(8, 16, 32, fp8=True) == pytest.approx(
        flops / ten.FP8 + numbers + 2 * 8 * 32 / 1e12)
    model, layout = ten.gpt(1, 64, 4, seq=32), ten.Layout()
    elementwise = [sum(part["elementwise"] for part in ten.layer_seconds(model, layout, ten.Machine(
        machine.cluster, ten.Software(fp8=fp8)))) for fp8 in (False, True)]
    inputs, outputs = 32 * (64 + 64 + 64 + 256), 32 * (3 * 64 + 64 + 256 + 64)
    assert elementwise[1] - elementwise[0] == pytest.approx(4 * (inputs + outputs) / 1e12)


def test_a_message_costs_what_its_hops_do(ten):
    machine = ten.Machine(replace(ten.CLUSTERS["h100"], alpha=1.0), ten.Software())
    assert machine.ring(1, 4, 1, calls=5) == pytest.approx(3 * 5)
    model, layout = ten.MODELS["8b"], ten.Layout(tp=4)
    tp = [part["tp"] for part in ten.layer_seconds(model, layout, machine)]
    assert tp == pytest.approx([4 * 3, 4 * 3], rel=0.1)                 # four gathers and scatters


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


def test_the_search_keeps_to_what_is_given_and_is_quick(ten):
    begin = time.perf_counter()
    fixed = {"tp": 8, "micro_batch": 1, "recompute": "full"}
    fit, _ = ten.search(ten.MODELS["405b"], ten.CLUSTERS["h100"], ten.SOFTWARE["llama3"], 16384,
                        2048, fixed)
    assert time.perf_counter() - begin < 10
    assert fit and all(asdict(plan.layout) | fixed == asdict(plan.layout) for plan in fit)


# ------------------------------------------------------------------------------- the command line


def planner(arguments):
    return subprocess.run([sys.executable, ROOT / f"{TEN}.py", *shlex.split(arguments)],
                          capture_output=True, text=True, timeout=60)


def test_it_answers_in_a_second_without_torch(tmp_path):
    file = tmp_path / "plan.json"
    begin = time.perf_counter()
    ran = planner(f"--model 70b --gpus 512 --batch 1024 --explain --json {file}")
    assert ran.returncode == 0 and time.perf_counter() - begin < 5, ran.stderr
    plan = json.loads(file.read_text())
    assert {"seconds", "tokens_per_second_per_gpu", "tflops", "tflops_causal", "mfu", "time",
            "memory", "layout", "found"} <= plan.keys()
    assert plan["seconds"] == pytest.approx(sum(plan["time"].values()))
    parts = [size for cause, size in plan["memory"].items() if cause != "total"]
    assert plan["memory"]["total"] == pytest.approx(sum(parts))
    assert plan["tokens_per_second_per_gpu"] * 512 * plan["seconds"] == pytest.approx(1024 * 8192)
    assert math.prod(plan["layout"][axis] for axis in ("dp", "tp", "cp", "pp")) == 512
    code = ("import sys; sys.argv = ['x', '--tp', '8']; import runpy; "
            f"runpy.run_path('{ROOT / TEN}.py', run_name='__main__'); "
            "assert 'torch' not in sys.modules")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_reader_that_leaves_ends_it_without_a_word():
    command = f"{shlex.quote(sys.executable)} 10_planner.py --problems | true"
    assert not subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True).stderr
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN      # and tests go on as they were


def test_help_says_what_the_chapter_says_of_each_number():
    said = " ".join(planner("--help").stdout.split())
    for words in ("--nic NIC bytes/s of its network card", "--memory MEMORY bytes",
                  "--v V slices of the model on each stage", "attention is one kernel"):
        assert words in said


def test_any_model_and_machine_can_be_given(ten, capsys):
    planning.main(ten, shlex.split(
        "--layers 4 --dim 512 --heads 8 --kv-heads 2 --ffn 2048 --no-gated --vocab 1000 --seq 512 "
        "--untie --peak 1e14 --matmul 0.5 --hbm 1e12 --memory 1e10 --nvlink 1e11 --nic 1e10 "
        "--per-node 4 --alpha 1e-5 --gpus 4 --batch 16 --no-flash --dropout --tp-hidden 0 "
        "--dp-hidden 0.5 --gradient-bytes 2"))
    said = capsys.readouterr().out
    assert "0.0 G parameters" in said and "layouts fit" in said


@pytest.mark.parametrize(("arguments", "words"), [
    ("--tp 3", "tp x cp x pp = 3; --tp"),
    ("--dp-hidden 2", "--dp-hidden: 2 is no number from 0 to 1; --dp-hidden 0.5"),
    ("--gpus 100000 --batch 2048", "; --batch 100000 would work"),
    ("--model 405b", "needs 919 GB of a GPU"), ("--tp 16", "gpus = 8 is not a multiple of tp"),
    ("--gpus 1 --tp 2", "gpus = 1 is not a multiple"), ("--tp x", "--tp: x is no whole number"),
    ("--gpus 0", "--gpus"), ("--model 9b", "--model"), ("stray", "; without stray"),
    ("--seq 100 --cp 8", "seq = 100 is not a multiple of cp = 8"),
    ("--pp 64 --gpus 64", "layers = 32"),
    ("--heads 3 --model 8b", "dim = 4096 is not a multiple of"),
    ("--heads 3", "--layers, --dim and --heads"), ("--matmul 0", "--matmul: 0 is no number from"),
    ("--attention 0", "--attention"), ("--matmul 5", "--matmul: 5 is no number from 0.001 to 1"),
    ("--gpus 8 --batch 1 --pp 8 --v 4 --tp 1", "1 micro-batches for pp = 8, v = 4"),
    ("--kv-heads 64", "heads = 32 is not a multiple of kv-heads"), ("--top-k 2", "than experts"),
    ("--kv-heads 5", "kv-heads = 5; without --kv-heads"),
    ("--pp 2 --schedule dualpipe-v --v 2", "dualpipe-v needs pp of 2 or more"),
    ("--nic nan", "--nic"), ("--peak 1e99", "--peak"), ("--memory 80", "--memory 80e9 would"),
    ("--fp8 --cluster a100", "a100 has no matmuls in FP8; without --fp8"),
    ("--json /proc/plan.json", "--json: cannot write"), ("--layer 3", "without --layer 3"),
    ("--layers 1000000000000", "--layers"), ("--dim 99999999999", "--dim"),
    ("--gpus 720720 --layers 90000 --dim 64 --heads 2 --seq 2000000 --experts 4096",
     "34,744,320 layouts are more than")])
def test_a_bad_argument_costs_one_line(ten, arguments, words):
    status, output, line = told(ten, shlex.split(arguments))
    assert status == 2 and not output
    assert line.startswith("error: ") and words in line and line.count("\n") == 1
    assert line.endswith(" would work\n")


def told(ten, argv):
    """(status, stdout, stderr) of the planner, called in this process."""
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            status = planning.main(ten, argv)
        except SystemExit as leaving:
            status = leaving.code
    return status, said.getvalue(), errors.getvalue()


def follow(ten, argv, line):
    """Each change that a refusal names works: something fits, for sure."""
    for change in re.search("; ([^;]*) would work\n$", line)[1].split(" or "):
        status, said, errors = told(ten, refusals.changed(argv, refusals.parsed(change)))
        assert status == 0 and " may fit" not in said, (argv, line, change, errors)


@pytest.mark.parametrize("arguments", [
    "--tp 3", "--model 405b", "--pp 64 --gpus 64", "--model 70b --tp 1", "--gpus 1 --tp 2",
    "--gpus 100000 --batch 2048", "--no-sp --tp 3", "--heads 3 stray --model 9b --layer=3",
    "--model 1t --gpus 1 --memory 1e6 --batch 1",
    "--gpus 8388608 --seq 200000000 --experts 32768 --top-k 2 --v 1 --micro-batch 1 --memory 1e6"])
def test_what_a_refusal_names_works(ten, arguments):
    argv = shlex.split(arguments)
    follow(ten, argv, told(ten, argv)[2])


ODD = {"int": ["-1", "0", "1", "2", "3", "5", "8", "12", "64", "1000", "x", "1.5", "", "--",
               "65536", "9" * 20],
       "float": ["0", "1e-9", "0.3", "1", "80", "1e12", "1e30", "nan", "inf", "-1", ""]}


def drawn(rng, ten):
    """A command line of one to five flags, of which some are bad, or do not fit each other."""
    argv = []
    flags = [action for action in planning.parser(ten)._actions if action.dest not in (
        "help", "published", "problems", "json")]
    for action in rng.sample(flags, rng.choice((1, 1, 2, 2, 3, 4, 5))):
        flag = rng.choice(action.option_strings)
        if action.nargs == 0:
            argv.append(flag)
        elif action.choices:
            argv.append(f"{flag}={rng.choice([*action.choices, 'x'])}")
        else:
            kind = "int" if trials.kind_of(action) is int else "float"
            argv.append(f"{flag}={rng.choice(ODD[kind])}")
    return argv + ["stray"] * (rng.random() < 0.1)


@pytest.mark.parametrize("seed", [
    0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_every_odd_question_is_answered_or_refused_with_a_change_that_works(ten, seed):
    rng, refused = random.Random(seed), 0
    while refused < 30:
        argv, begin = drawn(rng, ten), time.process_time()
        status, said, line = told(ten, argv)
        assert time.process_time() - begin < 15, argv
        assert (status, line) == (0, "") and said or status == 2 and not said, (argv, line)
        if status == 2:
            refused += 1
            assert line.startswith("error: ") and line.count("\n") == 1, (argv, line)
            follow(ten, argv, line)


def test_the_sizes_of_a_search_are_limited(ten, monkeypatch):
    """As many layouts as are to be tried are counted before any is."""
    asked = planning.question(ten, [])[1]
    tried = []
    monkeypatch.setattr(ten, "Plan", lambda model, layout, *others: tried.append(layout)
                        or SimpleNamespace(why="", total=0, bytes=0))
    asked.find(8, {"zero": 1, "cp": 1})
    degrees = ten.degrees(asked.model, asked.cluster, asked.software, 8, {"zero": 1, "cp": 1}, 16)
    assert len(tried) == math.prod(map(len, degrees.values())) <= planning.MOST
    monkeypatch.setattr(planning, "MOST", len(tried) - 1)
    with pytest.raises(common.Refused, match="layouts are more than"):
        planning.question(ten, ["--zero=1", "--cp=1"])


PROGRAM = trials.Command([ROOT / f"{TEN}.py"], lambda: planning.program(chapter(TEN)), ["--gpus=8"],
                         writes={"--json": "plan.json"}, prints="layouts")


def test_it_keeps_its_line_and_its_status_whatever_its_streams_and_files_are(tmp_path, monkeypatch):
    """Closed, full or in ASCII; a pipe nobody reads, a folder, a full disk. Nothing is left."""
    assert trials.closed_streams(PROGRAM) == []
    assert trials.bad_places(PROGRAM) == []
    monkeypatch.chdir(tmp_path)
    assert told(chapter(TEN), ["--json=plan.json", "--tp=3"])[0] == 2 and os.listdir() == []

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    errors = io.StringIO()
    assert trials.call(PROGRAM, ["--json=plan.json"], {}, None, errors) == 1
    assert errors.getvalue() == "error: cannot write all of a file: No space left on device\n"


@pytest.mark.full
def test_each_value_of_each_flag():
    assert trials.bad_values(PROGRAM) == []


def test_a_signal_ends_it_in_a_line():
    assert trials.signals(PROGRAM) == []


def test_where_nothing_fits_for_sure_it_says_so_and_what_would():
    ran = planner("--gpus 8 --batch 8 --seq 16384 --tp 1 --cp 1 --recompute none")
    first, second, *_ = ran.stdout.splitlines()
    assert first.endswith("layouts may fit, and none does for sure")
    assert second.endswith("; --tp 2 or --cp 2 or --recompute full would work)")
