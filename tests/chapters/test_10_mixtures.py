"""Chapter 10: mixtures of experts, against counts by hand and chapter 09."""

import itertools
import math
from dataclasses import replace

import pytest

from lab.planner.models import as_planned
from tests.chapters.test_10_planner import nine_runs, numbers_of, ten  # noqa: F401
from tests.conftest import sample

# ----------------------------------------------------------- what ranks hold, and what they send


@pytest.mark.parametrize(("pp", "cp", "tp", "ep", "shared"), sample([
    (2, 2, 1, 4, 0), (1, 2, 2, 4, 1), (1, 2, 2, 8, 0), (1, 1, 4, 2, 1), (4, 1, 2, 2, 0)], size=2))
def test_experts_are_held_and_sent_to_as_in_chapter_09(ten, nine_runs, pp, cp, tp, ep, shared):
    args, answers, e = nine_runs(pp, cp, tp, "1f1b", 1, ep, 8, bool(shared))
    model = replace(as_planned(args.model), experts=8, top_k=2, shared=shared)
    layout = ten.Layout(args.dp, tp, cp, pp, ep=ep, zero=1, micro_batch=1)
    planned = ten.parameters_of_gpu(model, layout, ten.SOFTWARE["ours"])
    planned["mlp"], (whole, n) = planned.pop("experts"), planned["norms"]
    more, same = planned.pop("shared", (0, n))          # which chapter 09 counts with the norms
    planned["norms"] = whole + more, n
    fullest = max(answers, key=lambda answer: sum(numbers_of(args, answer).values()))
    assert same == n and planned == {
        kind: (size, fullest["holders"][kind]) for kind, size in numbers_of(args, fullest).items()}

    passes = args.micro_batches * model.layers // pp
    for axis, (numbers, n, *_) in ten.messages(model, layout).items():
        sent = sum(part[1] for part in fullest["sent"].get(axis, {}).values())
        counts = 8 * 8 * passes if axis == "ep" else 0          # how many rows, to each expert
        assert sent == (2 * passes * e * numbers + counts if n > 1 else 0), axis


def test_the_machines_of_a_token_are_counted_over_all_its_choices(ten):
    """Enumerated: the machines it may go to, and their experts. A limit with fewer experts than the
    token's is ignored."""
    for experts, machines, k, limit in [(8, 4, 3, 2), (8, 4, 3, 0), (6, 3, 6, 0), (8, 4, 4, 1),
                                        (9, 1, 2, 4)]:
        model = replace(ten.MODELS["mixtral"], experts=experts, top_k=k, node_limit=limit)
        own = experts // machines
        allowed = max(min(limit or machines, machines), math.ceil(k / own))
        counts = []
        for places in itertools.combinations(range(machines), allowed):
            there = [expert for expert in range(experts) if expert // own in places]
            counts += [len({expert // own for expert in chosen})
                       for chosen in itertools.combinations(there, k)]
        assert ten.machines_of_token(model, machines) == pytest.approx(sum(counts) / len(counts))
    # The lesson's numbers: 8 experts on 8 machines are 7 journeys, or 4.6, or 3.2 with a limit.
    limited = ten.MODELS["deepseek-v3"]
    journeys = [7 / 8 * ten.machines_of_token(one, 8)
                for one in (replace(limited, node_limit=0), limited)]
    assert journeys == pytest.approx([4.6, 3.2], abs=0.05)


def test_latents_are_whole_on_each_rank_and_the_rest_is_cut(ten):
    model, software = ten.MODELS["deepseek-v3"], ten.SOFTWARE["megatron-moe"]
    held = ten.parameters_of_gpu(replace(model, layers=1, dense_layers=0), ten.Layout(2, 4),
                                 software)
    assert held["latents"] == (7168 * (1536 + 512 + 64), 8)
    assert held["queries"] == ((1536 * 128 * 192 + 128 * 128 * 7168) / 4, 2)
    assert held["keys"] == (512 * 128 * 256 / 4, 2)
    plain = replace(model, q_latent=0, kv_latent=0, rope_dim=0)
    tp = lambda model: ten.messages(model, ten.Layout(tp=4))["tp"][0] / model.seq
    assert tp(plain) - tp(model) == 7168 - (1536 + 512 + 64)    # tp gathers latents instead
    numbers = ten.numbers_kept(model, 1, software)
    assert numbers["keys and values"] == 128 * (128 + 64 + 128)
    assert numbers["inputs"] == 2 * (7168 + 1536 + 512)


def test_dense_layers_come_first_and_the_last_stage_has_what_is_left(ten):
    model = replace(ten.MODELS["deepseek-v3"], layers=8)
    h100, software = ten.CLUSTERS["h100"], ten.SOFTWARE["megatron-moe"]
    dense = {pp: sum(count for kind, count in ten.layers_of_stage(model, 8 // pp)
                     if kind.experts == 1) for pp in (1, 2, 4)}
    assert dense == {1: 3, 2: 0, 4: 0}
    assert ten.layers_of_stage(model, 2, first=True) == [(model, 0), (model.dense, 2)]
    none, all_of = (replace(model, dense_layers=count) for count in (0, 8))
    of = lambda model, **more: ten.step_seconds(model, ten.Layout(8, ep=8, **more), h100, software,
                                                64)
    assert of(model, pp=4) == of(none, pp=4)
    assert of(model)["ep"] == pytest.approx(of(none)["ep"] * 5 / 8) and not of(all_of)["ep"]
    # The first stage is the fuller one if a rank has few of the experts.
    numbers = lambda ep: {kind: size for kind, (size, _) in ten.parameters_of_gpu(
        model, ten.Layout(64, pp=2, ep=ep), software).items()}
    mlp, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    assert numbers(64)["mlp"] == 3 * mlp and numbers(64)["experts"] == 4 * expert
    assert numbers(64)["shared"] == expert and "mlp" not in numbers(8)
    assert numbers(8)["shared"] == 4 * expert and numbers(8)["experts"] == 4 * 32 * expert


# ------------------------------------------------------------------------------------- the seconds


def test_rows_between_machines_travel_beside_rows_within(ten):
    """A row takes 4·h bytes there and back. In `far` only network cards take time, in `near` only
    NVLink."""
    model = replace(ten.MODELS["deepseek-v3"], node_limit=0)
    cluster = replace(ten.CLUSTERS["h100"], alpha=0, nic_alpha=0)
    layout, row = ten.Layout(64, 2, ep=64), 4 * model.dim * model.seq / 2
    rows = lambda two_hops, **rates: ten.seconds_of_rows(model, layout, ten.Machine(
        replace(cluster, **rates), ten.Software(two_hops=two_hops)))
    far, near = {"nvlink": 1e30}, {"nic": 1e30}
    card, link = 50e9 * ten.NIC, 450e9 * ten.NVLINK
    assert rows(False, **far) == pytest.approx(row * 8 * 7 / 8 / card)
    assert rows(False, **near) == pytest.approx(row * 8 * 7 / 64 / link)
    assert rows(True, **far) == pytest.approx(row * 7 / 8 * ten.machines_of_token(model, 8) / card)
    assert rows(True, **near) == pytest.approx(row * 8 * 7 / 8 / link)
    assert rows(True) == max(rows(True, **far), rows(True, **near)) < rows(False)
    inside = ten.seconds_of_rows(model, ten.Layout(8, ep=8), ten.Machine(cluster, ten.Software()))
    assert inside == pytest.approx(2 * row * 8 * 7 / 8 / link)
    assert ten.seconds_of_rows(model, ten.Layout(8), ten.Machine(cluster, ten.Software())) == 0
    waits = replace(cluster, alpha=1.0, nic_alpha=100.0, nic=1e30, nvlink=1e30)
    calls = lambda n: ten.seconds_of_rows(model, ten.Layout(n, ep=n), ten.Machine(
        waits, ten.Software()))
    assert (calls(8), calls(16)) == (2, 200)


def test_what_hides_takes_multiprocessors_and_no_more_than_the_other_micro_batch_has(ten):
    model, layout = ten.MODELS["deepseek-v3"], ten.Layout(64, ep=64)

    def seconds(cluster=ten.CLUSTERS["h800"], layout=layout, **software):
        return ten.layer_seconds(model, layout, ten.Machine(cluster, ten.Software(**software)))

    shown, hidden = seconds(), seconds(ep_hidden=0.75)
    for before, after in zip(shown, hidden):
        assert after["ep"] == pytest.approx(before["ep"] / 4)
        for cause in ("matmul", "attention"):
            assert after[cause] == pytest.approx(before[cause] * 132 / 112)
    slow = seconds(replace(ten.CLUSTERS["h800"], nic=1e9), ep_hidden=1, ep_units=0)
    alone = seconds(replace(ten.CLUSTERS["h800"], nic=1e9))
    compute = sum(part[cause] for part in slow for cause in ("matmul", "attention", "elementwise"))
    assert sum(part["ep"] for part in slow) == pytest.approx(
        sum(part["ep"] for part in alone) - compute)
    assert seconds(layout=ten.Layout(64), ep_hidden=1) == seconds(layout=ten.Layout(64))
