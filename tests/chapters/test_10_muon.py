"""Chapter 10: Muon's bytes, FLOPs and messages, held to runs of chapters 03, 04 and 09, to chapter
11's own formulas, and to a matrix by hand."""

import inspect
import itertools
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
from torch.utils._pytree import tree_leaves

from lab.bench import anatomy, formulas, meters
from lab.planner import mixtures, muon
from tests.chapters.test_10_command_line import told
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)
from tests.conftest import SMALL, TEXT, chapter, run_main

FLAGS = (*SMALL, f"--data={TEXT}", "--steps=2", "--dtype=float32", "--precision=bf16")
MUON, MODELS = "--optimizer=muon", ("8b", "70b", "gpt3", "mixtral", "deepseek-v3", "qwen3-235b")


@pytest.fixture(scope="module")
def eleven():
    return chapter("11_muon")


def as_muon(software):
    return replace(software, optimizer="muon")


def cost_of(ten, model, layout, software=None, cluster="h100", **more):
    machine = ten.Machine(ten.CLUSTERS[cluster], as_muon(software or ten.SOFTWARE["ours"]))
    layers = ten.layers_of_stage(model, -(-model.layers // layout.pp))
    return muon.cost(layers, layout, machine, **more)


# ------------------------------------------------------------------------------------ what runs do


def measured(name, flags, folder):
    """For a rank of the pool: its optimizer's FLOPs, and bytes of states but for counts of steps;
    and what it sent, {group: {op: bytes}}. Of a run whose own checks have passed."""
    seen, hold_traffic = {}, formulas.hold_traffic

    def note(run, answer):
        states = [t for t in tree_leaves(formulas.held(run)[2]) if getattr(t, "ndim", 0)]
        sent = {}
        for group, ops in run.comm.by_group.items():
            group = meters.name_of(formulas.dist.distributed_c10d._resolve_process_group(group))
            sent[group] = {op: counts["wire_bytes"] for op, counts in ops.items()}
        seen.update(flops=run.flops.optimizer, states=meters.nbytes(states), sent=sent,
                    model=run.args.model)
        return hold_traffic(run, answer)

    with mock.patch.object(formulas, "hold_traffic", note):
        status, run, output = run_main(name, [*FLAGS, *flags], folder)
    assert status == 0, output
    return SimpleNamespace(**seen)


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def sent_by(run, op, name=""):
    """Bytes on the wire by an op, on groups of that name."""
    return sum(ops.get(op, 0) for group, ops in run.sent.items() if name in group)


@pytest.mark.parametrize(("ranks_", "zero", "flags"), [
    (4, 1, "--batch=4 --block=llama --ffn=64"),
    (2, 2, "--batch=4 --layers=1"),
    (3, 3, "--batch=3 --dim=48 --vocab=255 --layers=3")])
def test_zero_is_chapter_03s(ten, ranks, tmp_path, ranks_, zero, flags):
    runs = ranks(ranks_)(measured, "03_zero", [MUON, f"--variant=zero{zero}", *flags.split()],
                         tmp_path)
    model, layout = anatomy.as_planned(runs[0].model), ten.Layout(ranks_, zero=zero)
    software = as_muon(ten.SOFTWARE["ours"])
    planned = ten.memory(model, layout, software, 1)
    assert planned["optimizer"] == pytest.approx(mean(run.states for run in runs))
    found = cost_of(ten, model, layout)
    assert found.flops == max(run.flops for run in runs)
    assert found.to_holders == pytest.approx(mean(sent_by(run, "all_to_all") for run in runs))
    assert found.over_tp == 0
    everything = cost_of(ten, model, layout, way="gather").flops
    assert everything == sum(run.flops for run in runs)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_tp_is_chapter_04s(ten, ranks, tmp_path, kv_heads):
    """Of 4 ranks, which share kv heads, or have one each."""
    runs = ranks(4)(measured, "04_tensor_parallel",
                    [MUON, "--batch=2", "--block=llama", f"--kv-heads={kv_heads}"], tmp_path)
    model, layout = anatomy.as_planned(runs[0].model), ten.Layout(tp=4)
    software = replace(as_muon(ten.SOFTWARE["ours"]), whole_tables=False)
    found = cost_of(ten, model, layout)
    for run in runs:
        assert ten.memory(model, layout, software, 1)["optimizer"] == run.states
        assert found.flops == run.flops and found.to_holders == 0
        assert found.over_tp == sent_by(run, "all_gather")


def test_dp_cp_and_tp_are_chapter_09s(ten, ranks, tmp_path):
    """Over tp it gathers activations, too: as many as with AdamW."""
    flags = "--dp=2 --cp=2 --tp=2 --zero=1 --batch=4 --layers=3".split()
    runs, others = (ranks(8)(measured, "09_5d", [*flags, f"--optimizer={name}"], tmp_path)
                    for name in ("muon", "adamw"))
    model, layout = anatomy.as_planned(runs[0].model), ten.Layout(2, 2, 2, zero=1)
    planned = [ten.memory(model, layout, software, 1)["optimizer"]
               for software in (as_muon(ten.SOFTWARE["ours"]), ten.SOFTWARE["ours"])]
    assert planned == [pytest.approx(mean(run.states for run in which)) for which in (runs, others)]
    found = cost_of(ten, model, layout)
    assert found.flops == max(run.flops for run in runs) and others[0].flops == 0
    assert found.to_holders == pytest.approx(mean(sent_by(run, "all_to_all") for run in runs))
    busiest = max(range(8), key=lambda rank: runs[rank].flops)
    assert found.over_tp == sent_by(runs[busiest], "all_gather", "tp") - sent_by(
        others[busiest], "all_gather", "tp") > 0


@pytest.mark.parametrize(("zero", "more"), [(2, "--shared-expert"), (0, "")])
def test_mixtures_are_chapter_09s(ten, ranks, tmp_path, zero, more):
    """Of 8 ranks, 4 hold the same part of attention, 2 the same experts, and all the router."""
    flags = "--dp=4 --tp=2 --ep=4 --experts=8 --batch=8 --block=llama --ffn=64".split()
    runs = ranks(8)(measured, "09_5d", [MUON, *flags, f"--zero={zero}", *more.split()], tmp_path)
    model = replace(anatomy.as_planned(runs[0].model), experts=8, top_k=2, shared=bool(more))
    layout, software = ten.Layout(4, 2, ep=4, zero=zero), as_muon(ten.SOFTWARE["ours"])
    assert ten.memory(model, layout, software, 1)["optimizer"] == pytest.approx(
        mean(run.states for run in runs))
    found = cost_of(ten, model, layout)
    kinds = [(model, model.layers)]
    own = muon.groups(kinds, layout, software)
    assert {n for n, are_copies in own} == {2, 4, 8}
    if zero:                                            # the sum of each group's, dealt out
        assert found.to_holders == pytest.approx(mean(
            sent_by(run, "all_to_all", "gradients") for run in runs))
        assert mean(run.flops for run in runs) == sum(
            count * muon.work(x.m, x.n) / n for (n, _), group in own.items()
            for x, count in group.items())
        assert max(run.flops for run in runs) <= found.flops
    else:
        assert {run.flops for run in runs} == {found.flops} and found.to_holders == 0


# ---------------------------------------------------------------------------- chapter 11's formulas


def shapes_of(own):
    """Of {Matrix: how many}."""
    return [shape for x, count in own.items() for shape in count * [(x.m, x.n)]]


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64, 1000])
@pytest.mark.parametrize("name", ["1b", "8b", "gpt3", "mixtral"])
def test_it_shares_out_as_chapter_11_does(ten, eleven, name, n):
    model = replace(ten.MODELS[name], layers=9)
    [own] = muon.groups([(model, 9)], ten.Layout(n), as_muon(ten.Software())).values()
    found = cost_of(ten, model, ten.Layout(n, zero=1))
    costs = eleven.step_costs(shapes_of(own), n)
    assert (found.to_holders / 2, found.flops) == (
        pytest.approx(costs["deal"][0]), costs["deal"][1])
    gathered = cost_of(ten, model, ten.Layout(n, zero=1), way="gather")
    assert (gathered.to_holders / 2, gathered.flops) == (
        pytest.approx(costs["gather"][0]), costs["gather"][1])


def test_many_are_dealt_at_once_as_one_by_one(eleven):
    rng = random.Random(0)
    for _ in range(300):
        kinds = tuple((rng.choice((1, 2, 3, 7, 50, 1000)) * rng.randint(1, 9), rng.randint(1, 40))
                      for _ in range(rng.randint(1, 4)))
        n = rng.choice((1, 2, 3, 5, 16, 60))
        works = [flops for flops, count in kinds for _ in range(count)]
        busy = Counter(dict.fromkeys(range(n), 0))
        for flops, owner in zip(works, eleven.share_out(works, n)):
            busy[owner] += flops
        dealt = muon.share_out(kinds, n)
        assert sum(dealt.values()) == n
        loads = [sum(flops * count for (flops, _), count in zip(kinds, own))
                 for own, ranks in dealt.items() for _ in range(ranks)]
        assert sorted(loads) == sorted(busy.values()), (kinds, n)
        for i, (_, count) in enumerate(kinds):
            assert sum(own[i] * ranks for own, ranks in dealt.items()) == count
    assert len(muon.share_out(((10**30, 10**6), (1, 10**12)), 2**23)) < 5       # in no time


def test_its_matrices_are_the_planners_weights(ten, eleven):
    for name, model in mixtures.models(ten).items():
        weights = Counter(model.matrices(model.experts))
        if model.experts > 1:
            weights["routers"] = model.experts * model.dim
        assert {kind: sum(m * n * count for (m, n), count in shapes.items())
                for kind, shapes in muon.matrices(model).items() if shapes} == weights, name
        for shapes in muon.matrices(model).values():
            assert all(muon.work(m, n) == eleven.work((n, m)) for m, n in shapes)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_eight_a_number_of_a_matrix(ten, name):
    model = replace(ten.MODELS[name], tie=False)
    held = lambda optimizer, **more: ten.memory(
        model, ten.Layout(**more), replace(ten.Software(), optimizer=optimizer), 1)
    others = 2 * model.vocab * model.dim + model.norm + sum(
        kind.norms - kind.dim * (kind.experts if kind.experts > 1 else 0) for kind in
        [model] * (model.layers - model.dense_layers) + [model.dense] * model.dense_layers)
    assert held("muon")["optimizer"] == 8 * (model.parameters() - others) + 12 * others
    assert held("muon", dp=8, zero=1)["optimizer"] == held("muon")["optimizer"] / 8
    assert {**held("muon"), "optimizer": 0} == {**held("adamw"), "optimizer": 0}


# ---------------------------------------------------------------------------------------- by hand


def test_by_hand(ten):
    """2 layers on 4 ranks, dp 2 and tp 2: q, k, v and o of (64, 64), up and down of (64, 256)."""
    model = ten.gpt(2, 64, 4, vocab=100, seq=32)
    cluster = ten.Cluster(1e12, 1, 1, 1e40, 1e9, nvlink=1e9 / ten.NVLINK, nic=1e9, alpha=1e-3)
    square, wide = 5 * (4 * 64**3 + 2 * 64**3), 5 * (4 * 64**2 * 256 + 2 * 64**3)
    layout, layers = ten.Layout(2, 2, zero=1), [(model, 2)]
    machine = ten.Machine(cluster, as_muon(ten.Software()))
    found = muon.cost(layers, layout, machine)
    numbers = 2 * (4 * 64 * 64 + 2 * 64 * 256) / 2      # that a rank of tp holds
    assert found.flops == 4 * square + 2 * wide         # of each layer's, a rank gets half
    assert found.computing == pytest.approx(found.flops / 1e12)
    assert found.numbers == numbers / 2
    assert found.to_holders == 2 * 1 / 2 * numbers / 2 * 2
    over_tp = 1 / 2 * (4 * 64 * 64 + 2 * 64 * 256) * 2
    assert found.over_tp == over_tp
    calls = 2 + 6                                       # two all_to_alls, and a gather a matrix
    assert found.sending == pytest.approx(calls * 1e-3 + (found.to_holders + over_tp) / 1e9)
    whole = muon.cost(layers, layout, machine, "gather")
    assert whole.flops == 2 * found.flops and whole.over_tp == 2 * over_tp
    assert whole.to_holders == 1 / 2 * numbers * 2
    alone = muon.cost(layers, replace(layout, zero=0), machine)
    assert (alone.flops, alone.to_holders, alone.numbers) == (2 * found.flops, 0, numbers)


def test_its_time_is_the_optimizers_and_none_of_it_hides(ten):
    h100, ours = ten.CLUSTERS["h100"], replace(ten.SOFTWARE["megatron-2024"], dp_hidden=1)
    for name, layout in (("8b", ten.Layout(8, 2, 2, zero=1)), ("8b", ten.Layout(8, 8)),
                         ("8b", ten.Layout(8, 8, pp=4, zero=2)), ("gpt3", ten.Layout(64, zero=3)),
                         ("mixtral", ten.Layout(8, 2, ep=4, zero=1)),
                         ("deepseek-v3", ten.Layout(64, pp=8, ep=64, zero=1))):
        model, machine = ten.MODELS[name], ten.Machine(h100, as_muon(ours))
        adamw, by_muon = (ten.step_seconds(model, layout, h100, software, 64 * layout.dp)
                          for software in (ours, as_muon(ours)))
        layers = ten.layers_of_stage(model, -(-model.layers // layout.pp))
        cost = muon.cost(layers, layout, machine)
        assert {**adamw, "optimizer": 0} == {**by_muon, "optimizer": 0}
        less = 4 * cost.numbers / machine.bandwidth     # 56 bytes a number, not 60
        assert by_muon["optimizer"] - adamw["optimizer"] == pytest.approx(cost.seconds - less)
        matmuls = sum(5 * count * (machine.matmul(x.m, x.n, x.m) + machine.matmul(x.m, x.m, x.m)
                                   + machine.matmul(x.m, x.m, x.n))
                      for own in muon.groups(layers, layout, as_muon(ours)).values()
                      for x, count in own.items())
        assert cost.computing < matmuls if layout.zero else cost.computing == pytest.approx(matmuls)


def test_what_leaves_a_machine_goes_through_each_ranks_own_card(ten):
    cluster = replace(ten.CLUSTERS["h100"], nvlink=1e12 / ten.NVLINK, nic=1e9 / ten.NIC, alpha=1.0,
                      nic_alpha=9.0)
    machine = ten.Machine(cluster, ten.Software())
    exchange = lambda *args: muon.exchange(machine, 16e9, *args)
    assert exchange(8, 1) == pytest.approx(1 + 7 / 8 * 16e9 / 1e12)     # all in one
    assert exchange(16, 1) == pytest.approx(9 + 8 / 16 * 16)
    assert exchange(4, 8) == pytest.approx(9 + 3 / 4 * 16)              # one in each
    assert exchange(4, 4) == pytest.approx(9 + 2 / 4 * 16)
    assert exchange(2, 4) == pytest.approx(1 + 1 / 2 * 16e9 / 1e12)


def test_where_neighbours_hold_the_same_keys_those_are_gathered(ten):
    model = ten.MODELS["qwen3-235b"]                    # 4 kv heads
    groups = lambda tp: muon.groups([(model, 1)], ten.Layout(8, tp), as_muon(ten.Software()))
    assert (16, True) in groups(8) and not any(are_copies for _, are_copies in groups(4))
    dealt, gathered = (cost_of(ten, replace(model, kv_heads=kv_heads, experts=1),
                               ten.Layout(8, 8, zero=1)) for kv_heads in (8, 4))
    keys = 2 * 94 * muon.work(4 * 128, 4096)
    assert gathered.flops > keys and dealt.to_holders < gathered.to_holders


def test_experts_are_whole_and_shared_out(ten):
    """Of mixtral's 8, with tp 2 and ep 4, a GPU has 2, of three matrices; and q and o in halves."""
    own = muon.groups([(ten.MODELS["mixtral"], 5)], ten.Layout(8, 2, ep=4), as_muon(ten.Software()))
    assert own == {
        (8, False): {(4096, 4096, 2): 5 * 2, (1024, 4096, 2): 5 * 2},
        (4, False): {(4096, 14336, 1): 5 * 2 * 3}, (16, False): {(8, 4096, 1): 5}}


# ------------------------------------------------------------------------------- the command line


def test_the_search_takes_it_into_account(ten, tmp_path):
    """Without ZeRO, stages are worth it, since each has its own matrices."""
    usual, fixed = ten.SOFTWARE["megatron-2024"], {"zero": 0, "micro_batch": 1, "recompute": "none"}
    [adamw, *_], [best, *_] = (
        ten.search(ten.MODELS["1b"], ten.CLUSTERS["h100"], software, 64, 64, fixed)[0]
        for software in (usual, as_muon(usual)))
    assert adamw.layout.pp == 1 < best.layout.pp and best.total > adamw.total


def test_an_explanation_says_what_it_costs(ten):
    argv = "--model 8b --gpus 64 --batch 512 --dp 64 --micro-batch 1 --explain".split()
    status, said, errors = told(ten, [*argv, "--zero=3", MUON])
    assert (status, errors) == (0, "")
    [first, second] = [line for line in said.splitlines() if "computing and" in line]
    layout, machine = ten.Layout(64, zero=3), ten.Machine(
        ten.CLUSTERS["h100"], as_muon(ten.SOFTWARE["megatron-2024"]))
    plan = ten.Plan(ten.MODELS["8b"], layout, machine.cluster, machine.software, 64, 512)
    cost, gather = (cost_of(ten, ten.MODELS["8b"], layout, machine.software, way=way)
                    for way in ("deal", "gather"))
    assert first == (
        f"Muon takes {1e3 * cost.computing:,.1f} ms computing and {1e3 * cost.sending:,.1f} ms "
        f"sending, {cost.seconds / plan.total:.2%} of the step: {cost.flops / 1e12:.1f} TFLOP of "
        "Newton-Schulz on the busiest GPU.")
    assert second == (
        f"  To gather, with {gather.flops / cost.flops:.1f} times these FLOPs on each GPU, would "
        f"take {1e3 * gather.computing:,.1f} ms computing and {1e3 * gather.sending:,.1f} ms "
        "sending.")
    assert 50 < gather.flops / cost.flops <= 64
    assert "Dealt out among those who hold the same, with --zero 1" in told(
        ten, "--model 1b --gpus 8 --batch 64 --tp 1 --zero 0 --explain --optimizer muon".split())[1]
    assert "Muon" not in told(ten, [*argv, "--zero=3"])[1]


@pytest.mark.parametrize(("arguments", "words"), [
    ("--optimizer sgd", "--optimizer adamw would work"),
    ("--model 405b --optimizer muon", "--gpus"),
    ("--model 8b --optimizer muon --zero 0 --gpus 1", "--gpus")])
def test_what_does_not_fit_costs_one_line(ten, arguments, words):
    status, said, line = told(ten, arguments.split())
    assert status == 2 and not said and line.count("\n") == 1
    assert line.startswith("error: ") and words in line and line.endswith(" would work\n"), line


def test_it_needs_less_memory(ten):
    argv = "--model 1b --gpus 1 --batch 1 --seq 2048 --memory 23e9".split()
    assert "may fit, and none does for sure" in told(ten, argv)[1]
    assert "layouts fit\n" in told(ten, [*argv, MUON])[1]


# ----------------------------------------------------------------------------- deliberate faults

FAULTS = {  # of lab/planner/muon.py, or of the chapter: right, wrong, the test that guards it
    "a step is left out": ("STEPS = 5", "STEPS = 4", "by_hand"),
    "the square is left out": ("* n + 2 * m**3)", "* n)", "by_hand"),
    "updates are sent in fp32": ("WIDTH = 2", "WIDTH = 4", "by_hand"),
    "nothing comes back": ("2 * to_holders / ranks", "to_holders / ranks", "by_hand"),
    "a deal sends as a gather": ("2 * to_holders / ranks", "2 * to_holders", "by_hand"),
    "one message": ("sending = 2 * exchange(", "sending = exchange(", "by_hand"),
    "nothing is dealt": ("own, to_holders = of_busiest(own, ranks), ", "to_holders = ", "by_hand"),
    "without ZeRO it is dealt": ("if layout.zero and ranks > 1:", "if ranks > 1:", "by_hand"),
    "ranks of tp share the work": ("sum(count * work(x.m, x.n)",
                                   "sum(count // x.parts * work(x.m, x.n)", "by_hand"),
    "tp gathers nothing": ("if x.parts > 1:", "if x.parts > 2:", "by_hand"),
    "the least busy sets the pace": ("max(share_out(kinds, ranks)", "min(share_out(kinds, ranks)",
                                     "it_shares_out"),
    "in any order": ("key=lambda i: -kinds[i][0]", "key=lambda i: kinds[i][0]", "many_are_dealt"),
    "a rank gets two before another gets one": ("<= flops:\n", "<= 9 * flops:\n", "many_are_dealt"),
    "a gate is no matrix": ("3 if model.gated else 2, model.experts", "2, model.experts",
                            "its_matrices"),
    "routers are AdamW's": ('found["routers"] = ', "_ = ", "bytes_are_eight"),
    "experts are cut": ('(1, layout.ep) if kind', "(layout.tp, layout.ep) if kind", "experts_are"),
    "each rank has all experts": ("layers * count // shared", "layers * count", "experts_are"),
    "copies are dealt": (" and not are_copies", "", "where_neighbours"),
    "it moves as many bytes": ("found.seconds - spared *", "found.seconds - 0 *", "its_time"),
    "what leaves a machine is as fast": ("machine.link(cluster.per_node + 1)", "machine.link(1)",
                                         "what_leaves"),
    "the chapter keeps AdamW's states": ("software.moment_bytes / 2 * of_muon", "0 * of_muon",
                                         "bytes_are_eight"),
    "the chapter forgets its time": ('seconds["optimizer"] += muon', '_ = muon', "its_time"),
}  # fmt: skip


def faulty(name, source, right, wrong):
    assert source.count(right) == 1, "the fault has no place any more"
    module = ModuleType(name)
    sys.modules[name] = module                          # where dataclasses look their types up
    exec(compile(source.replace(right, wrong), name, "exec"), vars(module))
    return module


@pytest.mark.parametrize("fault", FAULTS)
def test_each_deliberate_fault_fails_the_test_that_guards_it(ten, eleven, fault, monkeypatch):
    right, wrong, guard = FAULTS[fault]
    sources = [Path(module.__file__).read_text(encoding="utf-8") for module in (muon, ten)]
    if right in sources[0]:
        module, own = faulty("faulty_muon", sources[0], right, wrong), ten
        monkeypatch.setattr(ten, "muon", module)
        monkeypatch.setitem(globals(), "muon", module)
    else:
        own = faulty("faulty_10", sources[1], right, wrong)
    [test] = [test for name, test in globals().items() if name.startswith(f"test_{guard}")]
    cases = itertools.product(*[[(mark.args[0], value) for value in mark.args[1]]
                                for mark in getattr(test, "pytestmark", [])])
    given, asks = {"ten": own, "eleven": eleven}, inspect.signature(test).parameters
    assert any(fails(test, {name: value for name, value in (given | dict(case)).items()
                            if name in asks}) for case in cases)


def fails(test, given):
    try:
        test(**given)
    except (AssertionError, KeyError):      # a number that is wrong, or is not there
        return True
    return False
