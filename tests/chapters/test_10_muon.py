"""Chapter 10: Muon's bytes, FLOPs and messages, against runs of chapters 03 and 04, against
chapter 11's formulas, and by hand."""

import statistics
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.utils._pytree import tree_leaves

from lab.planner import muon, tables
from lab.planner.models import as_planned
from lab.run import formulas, meters
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)
from tests.conftest import SMALL, TEXT, chapter, run_main, sample

FLAGS = (*SMALL, f"--data={TEXT}", "--steps=2", "--dtype=float32", "--precision=bf16")
MUON = "--optimizer=muon"


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
    """On a rank of the pool: its optimizer's FLOPs, the bytes of its states without step counts,
    and {op: bytes} that it sent, in a run that passed its own checks."""
    seen, hold_traffic = {}, formulas.hold_traffic

    def note(run, answer):
        states = [t for t in tree_leaves(formulas.held(run)[2]) if getattr(t, "ndim", 0)]
        sent = Counter({op: counts["wire_bytes"] for op, counts in run.comm.total.items()})
        seen.update(flops=run.flops.optimizer, states=meters.nbytes(states), sent=sent,
                    model=run.args.model)
        return hold_traffic(run, answer)

    with mock.patch.object(formulas, "hold_traffic", note):
        status, run, output = run_main(name, [*FLAGS, *flags], folder)
    assert status == 0, output
    return SimpleNamespace(**seen)


@pytest.mark.parametrize(("world", "zero", "flags"), sample([
    (2, 2, "--batch=4 --layers=1"),
    (4, 1, "--batch=4 --block=llama --ffn=64"),
    (3, 3, "--batch=3 --dim=48 --vocab=255 --layers=3")]))
def test_zero_is_chapter_03s(ten, ranks, tmp_path, world, zero, flags):
    runs = ranks(world)(measured, "03_zero", [MUON, f"--variant=zero{zero}", *flags.split()],
                        tmp_path)
    model, layout = as_planned(runs[0].model), ten.Layout(world, zero=zero)
    planned = ten.memory(model, layout, as_muon(ten.SOFTWARE["ours"]), 1)
    assert planned["optimizer"] == pytest.approx(statistics.mean(run.states for run in runs))
    found = cost_of(ten, model, layout)
    assert found.flops == max(run.flops for run in runs)
    exchanged = statistics.mean(run.sent["all_to_all"] for run in runs)
    assert found.to_holders == pytest.approx(exchanged)
    assert found.over_tp == 0
    everything = cost_of(ten, model, layout, way="gather").flops
    assert everything == sum(run.flops for run in runs)


@pytest.mark.full
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_tp_is_chapter_04s(ten, ranks, tmp_path, kv_heads):
    """4 ranks that share kv heads, or have one each."""
    runs = ranks(4)(measured, "04_tensor_parallel",
                    [MUON, "--batch=2", "--block=llama", f"--kv-heads={kv_heads}"], tmp_path)
    model, layout = as_planned(runs[0].model), ten.Layout(tp=4)
    software = replace(as_muon(ten.SOFTWARE["ours"]), whole_tables=False)
    found = cost_of(ten, model, layout)
    for run in runs:
        assert ten.memory(model, layout, software, 1)["optimizer"] == run.states
        assert found.flops == run.flops and found.to_holders == 0
        assert found.over_tp == run.sent["all_gather"]


# ---------------------------------------------------------------------------- chapter 11's formulas


def test_work_is_shared_out_as_in_chapter_11(ten, eleven):
    for name in ("1b", "mixtral"):
        model = replace(ten.MODELS[name], layers=9)
        [own] = muon.groups([(model, 9)], ten.Layout(), as_muon(ten.Software())).values()
        shapes = [shape for x, count in own.items() for shape in count * [(x.m, x.n)]]
        for n in (1, 3, 8, 1000):
            costs = eleven.step_costs(shapes, n)
            for way in ("deal", "gather"):
                found = cost_of(ten, model, ten.Layout(n, zero=1), way=way)
                sent, flops = costs[way]
                assert found.to_holders / 2 == pytest.approx(sent), (name, n, way)
                assert found.flops == flops, (name, n, way)


def test_its_matrices_are_the_planners_weights(ten, eleven):
    for name, model in tables.models(ten).items():
        weights = Counter(model.matrices(model.experts))
        if model.experts > 1:
            weights["routers"] = model.experts * model.dim
        assert {kind: sum(m * n * count for (m, n), count in shapes.items())
                for kind, shapes in muon.matrices(model).items() if shapes} == weights, name
        for shapes in muon.matrices(model).values():
            assert all(muon.work(m, n) == eleven.work((n, m)) for m, n in shapes)


# ---------------------------------------------------------------------------------------- by hand


def test_two_layers_on_four_ranks_by_hand(ten):
    """dp 2 and tp 2: q, k, v and o of (64, 64), up and down of (64, 256)."""
    model = ten.gpt(2, 64, 4, vocab=100, seq=32)
    cluster = ten.Cluster(1e12, 1, 1, 1e40, 1e9, nvlink=1e9 / ten.NVLINK, nic=1e9, alpha=1e-3)
    square, wide = 5 * (4 * 64**3 + 2 * 64**3), 5 * (4 * 64**2 * 256 + 2 * 64**3)
    layout, layers = ten.Layout(2, 2, zero=1), [(model, 2)]
    machine = ten.Machine(cluster, as_muon(ten.Software()))
    found = muon.cost(layers, layout, machine)
    numbers = 2 * (4 * 64 * 64 + 2 * 64 * 256) / 2      # on a rank of tp
    assert found.flops == 4 * square + 2 * wide         # a rank gets half of each layer
    assert found.computing == pytest.approx(found.flops / 1e12)
    assert found.numbers == numbers / 2
    assert found.to_holders == 2 * 1 / 2 * numbers / 2 * 2
    over_tp = 1 / 2 * (4 * 64 * 64 + 2 * 64 * 256) * 2
    assert found.over_tp == over_tp
    calls = 2 + 6                                       # two all_to_alls, and a gather per matrix
    assert found.sending == pytest.approx(calls * 1e-3 + (found.to_holders + over_tp) / 1e9)
    alone = muon.cost(layers, replace(layout, zero=0), machine)
    assert (alone.flops, alone.to_holders, alone.numbers) == (2 * found.flops, 0, numbers)


def test_its_time_is_the_optimizers_and_none_of_it_hides(ten):
    h100, ours = ten.CLUSTERS["h100"], replace(ten.SOFTWARE["megatron-2024"], dp_hidden=1)
    for name, layout in (("8b", ten.Layout(8, 8, pp=4, zero=2)),
                         ("mixtral", ten.Layout(8, 2, ep=4))):
        model, machine = ten.MODELS[name], ten.Machine(h100, as_muon(ours))
        adamw, by_muon = (ten.step_seconds(model, layout, h100, software, 64 * layout.dp)
                          for software in (ours, as_muon(ours)))
        layers = ten.layers_of_stage(model, -(-model.layers // layout.pp))
        cost = muon.cost(layers, layout, machine)
        assert {**adamw, "optimizer": 0} == {**by_muon, "optimizer": 0}
        less = 4 * cost.numbers / machine.bandwidth     # 56 bytes a number, not 60
        assert by_muon["optimizer"] - adamw["optimizer"] == pytest.approx(cost.seconds - less)


def test_what_leaves_a_machine_goes_through_each_ranks_own_card(ten):
    cluster = replace(ten.CLUSTERS["h100"], nvlink=1e12 / ten.NVLINK, nic=1e9 / ten.NIC, alpha=1.0,
                      nic_alpha=9.0)
    machine = ten.Machine(cluster, ten.Software())
    exchange = lambda *args: muon.exchange(machine, 16e9, *args)
    assert exchange(8, 1) == pytest.approx(1 + 7 / 8 * 16e9 / 1e12)     # all in one machine
    assert exchange(16, 1) == pytest.approx(9 + 8 / 16 * 16)
    assert exchange(4, 8) == pytest.approx(9 + 3 / 4 * 16)              # one in each
    assert exchange(4, 4) == pytest.approx(9 + 2 / 4 * 16)
    assert exchange(2, 4) == pytest.approx(1 + 1 / 2 * 16e9 / 1e12)


def test_experts_are_whole_and_copies_of_keys_are_gathered(ten):
    """With tp 2 and ep 4, a GPU has 2 of mixtral's 8 experts, of three matrices, and half of q and
    o. With more ranks of tp than kv heads, neighbours hold the same keys."""
    software = as_muon(ten.Software())
    own = muon.groups([(ten.MODELS["mixtral"], 5)], ten.Layout(8, 2, ep=4), software)
    assert own == {
        (8, False): {(4096, 4096, 2): 5 * 2, (1024, 4096, 2): 5 * 2},
        (4, False): {(4096, 14336, 1): 5 * 2 * 3}, (16, False): {(8, 4096, 1): 5}}
    model = ten.MODELS["qwen3-235b"]                    # 4 kv heads
    groups = lambda tp: muon.groups([(model, 1)], ten.Layout(8, tp), software)
    assert (16, True) in groups(8) and not any(are_copies for _, are_copies in groups(4))
