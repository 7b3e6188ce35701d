"""What no plan of chapter 10 may contradict."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.conftest import FULL, chapter


def ten():
    return chapter("10_planner")


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


@settings(max_examples=60 if FULL else 20)
@given(plans(), st.tuples(*[FACTORS] * 6))
def test_a_better_machine_never_slows_or_unfits_a_plan(asked, factors):
    """And each cause takes time, and each part takes bytes."""
    model, layout, cluster, *others = asked
    faster = ("nvlink", "nic", "hbm", "peak"), ("alpha", "nic_alpha")
    changes = {name: getattr(cluster, name) * factor for name, factor in zip(faster[0], factors)}
    changes |= {name: getattr(cluster, name) / factor
                for name, factor in zip(faster[1], factors[4:])}
    plan = ten().Plan(*asked)
    for name, value in [*changes.items(), (None, None)]:
        better = replace(cluster, **{name: value} if name else changes)
        there = ten().Plan(model, layout, better, *others)
        assert there.total <= plan.total * (1 + 1e-12), name
    larger = ten().Plan(model, layout, replace(cluster, memory=factors[0] * cluster.memory),
                        *others)  # fmt: skip
    assert larger.memory == plan.memory and larger.seconds == plan.seconds
    assert larger.why is None or plan.why
    assert min(plan.memory.values()) >= 0 and min(plan.seconds.values()) >= 0
    assert plan.seconds["matmul"] > 0 and plan.bytes > 0
