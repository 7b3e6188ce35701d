"""Chapter 10: where the seconds of a step go."""

from dataclasses import replace

import pytest

from lab.planner import planning, tables
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)


def test_a_ring_leaves_a_node_through_the_cards_of_its_members(ten):
    cluster = ten.Cluster(1e12, 1, 1, 1e12, 1e9, nvlink=8e9 / ten.NVLINK, nic=1e9 / ten.NIC,
                          alpha=0, nic_alpha=0)
    machine = ten.Machine(cluster, ten.Software())
    assert machine.links(8, 1) == pytest.approx(8e9)            # all in a node
    assert machine.links(2, 4) == pytest.approx(8e9)
    assert machine.links(4, 8) == pytest.approx(1e9)            # one in each node
    assert machine.links(8, 2) == pytest.approx(4e9)            # four in each
    assert machine.links(16, 1) == pytest.approx(8e9)           # eight cards, but NVLink is slower
    one_card = ten.Machine(cluster, ten.Software(one_card=True))
    assert one_card.links(16, 1) == pytest.approx(1e9)
    assert machine.links(12, 1) == pytest.approx(4e9)           # the last node has four
    assert machine.links(9, 1) == machine.links(5, 2) == pytest.approx(1e9)
    assert machine.ring(12e9, 4, 8) == pytest.approx(9)         # 3/4 of 12 GB at 1 GB/s
    assert machine.ring(12e9, 1, 1) == 0


def test_hops_take_time_within_a_node_and_between_nodes(ten):
    cluster = replace(ten.CLUSTERS["h100"], alpha=1.0, nic_alpha=100.0)
    machine = ten.Machine(cluster, ten.Software())
    ring = lambda n, stride: machine.ring(0, n, stride)
    assert ring(8, 1) == 7 and ring(16, 1) == 2 * 100 + 13      # two of 15 hops leave a node
    assert ring(4, 8) == 300 and ring(1, 8) == 0
    assert ring(12, 1) == 2 * 100 + 9                           # to the node of four, and back
    assert machine.ring(1, 4, 1, calls=5) == pytest.approx(3 * 5)
    tp = [part["tp"] for part in ten.layer_seconds(ten.MODELS["8b"], ten.Layout(tp=4), machine)]
    assert tp == pytest.approx([4 * 3, 4 * 3], rel=0.1)         # two gathers and two scatters


# --------------------------------------------------------------------------------------- compute


@pytest.mark.parametrize("name", ["8b", "gpt3", "mixtral", "deepseek-v3", "qwen2-57b"])
def test_matmuls_of_all_ranks_are_those_whose_flops_are_counted(ten, name):
    """If memory and links take no time. deepseek-v3 brings latents, a shared expert, dense layers.
    """
    model = replace(tables.models(ten)[name], seq=1024, layers=7, heads=32)
    model = replace(model, kv_heads=min(model.kv_heads, 32))
    cluster = ten.Cluster(1e15, 1, 1, 1e40, 1e9, nvlink=1e30, nic=1e30)
    software = replace(ten.SOFTWARE["torchtitan"], flash=False)
    ep = 8 if model.experts > 1 else 1
    for layout in (ten.Layout(micro_batch=2), ten.Layout(recompute="full"),
                   ten.Layout(2, 2, 2, ep=ep)):
        seconds = ten.step_seconds(model, layout, cluster, software, 4)
        assert (seconds["matmul"] + seconds["attention"]) * 1e15 * layout.stage == pytest.approx(
            ten.step_flops(model, 4, recompute=layout.recompute))


# --------------------------------------------------------------------------------------- messages


def test_messages_hide_behind_no_more_than_there_is(ten):
    """tp's behind matmuls, forward or backward; dp's only behind the last backward."""
    model, h100, layout = ten.MODELS["8b"], ten.CLUSTERS["h100"], ten.Layout(tp=8)

    def tp(**software):
        machine = ten.Machine(h100, ten.Software(**software))
        return [part["tp"] for part in ten.layer_seconds(model, layout, machine)]

    [shown, _], [half, whole] = tp(), tp(tp_hidden=0.5)
    assert half == pytest.approx(shown / 2) and whole == pytest.approx(shown)
    dp = lambda batch: ten.step_seconds(model, ten.Layout(8), replace(h100, nvlink=2e10),
                                        ten.SOFTWARE["torchtitan"], batch)["dp"]
    assert dp(8) == dp(64) > 0
    software = ten.SOFTWARE["megatron-2024"]
    slow = ten.Machine(replace(h100, nvlink=1e9), software)
    sent = slow.ring(2 * 4 * 8192 * 4096, 8, 1, 4)
    for part in ten.layer_seconds(model, layout, slow):
        assert part["tp"] == pytest.approx(sent - part["matmul"])
    # Of ZeRO-3, forward hides its gathers, and backward all the rest.
    seconds = lambda cluster: ten.step_seconds(model, ten.Layout(8, zero=3), cluster, software, 8)
    assert seconds(ten.CLUSTERS["h100"])["dp"] == 0
    cluster = replace(ten.CLUSTERS["h100"], nvlink=40e9)
    machine = ten.Machine(cluster, software)
    forward, backward = (sum(part.values()) * 32 for part in ten.layer_seconds(
        model, ten.Layout(8, zero=3), machine))
    byte_each = machine.ring(model.parameters(), 8, 1, 32)
    assert seconds(cluster)["dp"] == pytest.approx(
        max(0, 2 * byte_each - 0.9 * forward) + max(0, 6 * byte_each - 0.9 * backward), rel=0.01)


def test_a_ring_of_keys_hides_behind_attention_and_keeps_only_its_own(ten):
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


# --------------------------------------------------------------------------------------- stages


def test_the_first_stage_keeps_most_or_the_last_one_with_its_logits(ten):
    software = ten.SOFTWARE["megatron-2024"]
    kept = lambda vocab, **layout: ten.memory(ten.gpt(8, 1024, 16, vocab=vocab), ten.Layout(
        **layout), software, 8)["activations"]
    block = ten.kept_by_layer(ten.gpt(8, 1024, 16), ten.Layout(), software)
    assert kept(1000, pp=4) == 4 * 2 * block                    # of four micro-batches
    assert kept(10**6, pp=4) == 2 * block + 8 * 2048 * 10**6
    assert kept(1000) == 8 * block + 8 * 2048 * 1000


# --------------------------------------------------------------------------------------- --explain


def test_an_explanation_agrees_with_the_plans_it_compares(ten):
    _, asked = planning.question(ten, ["--model=mixtral", "--gpus=32", "--batch=64"])
    layout = ten.Layout(8, 2, pp=2, v=4, ep=8, zero=1)
    changes = {"tp 1": {"dp": 16, "tp": 1, "sp": False}, "ep 4": {"ep": 4},
               "pp 4": {"dp": 4, "pp": 4, "v": 2}, "recompute full": {"recompute": "full"}}
    plan, *others = (ten.Plan(asked.model, replace(layout, **change), asked.cluster,
                              asked.software, 32, 64) for change in ({}, *changes.values()))
    lines = [line.strip() for line in planning.explain(asked, plan)]
    for name, other in zip(changes, others):
        share = other.total / plan.total - 1
        [line] = [line for line in lines if line.startswith(f"with {name} ")]
        assert f"{abs(share):.0%} {'more' if share > 0 else 'less'}" in line
        cause, by, *_ = line.partition("mostly ")[2].split()
        assert (by[0] == "+") == (other.seconds[cause] > plan.seconds[cause])
    assert any(line.startswith("with ep 16: experts = 8") for line in lines)
