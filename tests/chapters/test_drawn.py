"""Chapter 07's schedules of any size, and what no plan of chapter 10 may contradict."""

import math
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lab.schedules import check_rendezvous, simulate, simulated_bubble
from tests.chapters.test_07_pipeline_parallel import SEVEN
from tests.conftest import chapter

seven, ten = (lambda: chapter(SEVEN)), (lambda: chapter("10_planner"))


# ------------------------------------------------------------------------------------ 07: schedules

@st.composite
def schedules(draw):
    """(variant, p, m, v, breadth first), larger than those that are all tried."""
    variant = draw(st.sampled_from([name for name in seven().VARIANTS if name != "torch"]))
    p, v = draw(st.integers(1, 16)), draw(st.integers(1, 6))
    m, breadth_first = draw(st.integers(1, 40)), draw(st.booleans())
    if variant == "dualpipe":
        return variant, 2 * (p // 2) or 2, 2 * p + 2 * m, 1, False
    if variant == "dualpipe-v":
        return variant, p, 2 * p + m, 1, False
    if variant != "interleaved":
        return variant, p, m, 1, False
    return variant, p, m if breadth_first else p * (1 + m // p), v, breadth_first


@settings(max_examples=15)
@given(schedules())
def test_a_schedule_does_all_once_after_what_it_needs(drawn):
    variant, p, m, v, _ = drawn
    schedule = seven().make_schedule(*drawn)
    check_rendezvous(seven().make_programs(schedule), schedule.needs)
    span = simulate(schedule)                           # {action: when it starts and ends}
    assert len(span) == sum(map(len, schedule.actions))
    there = {action.output: end for action, (_, end) in span.items() if action.kind != "W"}
    for action, (start, _) in span.items():
        assert all(there[needed] <= start for needed in schedule.needs(action))
    assert sum(len(action.kind) for action in span) == 3 * m * len(schedule.ranks) // (
        2 if variant == "dualpipe" else 1)
    formula = seven().bubble(variant, p, m, v)
    assert formula is None or math.isclose(simulated_bubble(schedule, variant), formula)


# --------------------------------------------------------------------------------- 10: the planner

POWERS = st.integers(0, 3).map(lambda k: 2**k)
FACTORS = st.floats(1, 8)


@st.composite
def plans(draw):
    """What is asked of a Plan: a model, a layout that divides, a cluster, software, GPUs, batch."""
    layout = ten().Layout(
        dp=draw(POWERS), tp=draw(POWERS), cp=draw(POWERS), pp=draw(POWERS), ep=draw(POWERS),
        v=draw(st.integers(1, 2)), zero=draw(st.integers(0, 3)), sp=draw(st.booleans()),
        micro_batch=draw(POWERS), recompute=draw(st.sampled_from(("none", "selective", "full"))),
        schedule=draw(st.sampled_from(("1f1b", "zero-bubble", "dualpipe-v"))))
    model = ten().MODELS[draw(st.sampled_from(sorted(ten().MODELS)))]
    cluster = ten().CLUSTERS[draw(st.sampled_from(sorted(ten().CLUSTERS)))]
    software = ten().SOFTWARE[draw(st.sampled_from(sorted(ten().SOFTWARE)))]
    gpus = layout.dp * layout.tp * layout.cp * layout.pp
    batch = layout.dp * layout.micro_batch * layout.pp * draw(st.integers(1, 8))
    assume(ten().misfit(model, layout, gpus, batch) is None)
    return model, layout, cluster, software, gpus, batch


@given(plans(), FACTORS)
def test_more_memory_never_unfits_a_plan(asked, factor):
    model, layout, cluster, *others = asked
    larger = replace(cluster, memory=factor * cluster.memory)
    here, there = ten().Plan(*asked), ten().Plan(model, layout, larger, *others)
    assert there.memory == here.memory and there.seconds == here.seconds
    assert there.why is None or here.why


@given(plans(), st.tuples(*[FACTORS] * 6))
def test_a_faster_machine_never_slows_a_plan(asked, factors):
    model, layout, cluster, *others = asked
    faster = ("nvlink", "nic", "hbm", "peak"), ("alpha", "nic_alpha")
    changes = {name: getattr(cluster, name) * factor for name, factor in zip(faster[0], factors)}
    changes |= {name: getattr(cluster, name) / factor
                for name, factor in zip(faster[1], factors[4:])}
    for name, value in [*changes.items(), (None, None)]:
        better = replace(cluster, **{name: value} if name else changes)
        there = ten().Plan(model, layout, better, *others)
        assert there.total <= ten().Plan(*asked).total * (1 + 1e-12), name


@given(plans())
def test_each_cause_takes_time_and_each_part_takes_bytes(asked):
    plan = ten().Plan(*asked)
    assert min(plan.memory.values()) >= 0 and min(plan.seconds.values()) >= 0
    assert plan.seconds["matmul"] > 0 and plan.bytes > 0
