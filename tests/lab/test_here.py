"""lab.here: what is measured on this machine, next to what chapter 10 predicts."""

import json

import pytest

from lab import here
from lab.bench import anatomy
from lab.cli import strict
from tests.conftest import chapter

RATES = {"flops": 5e10, "hbm": 2e10}


def test_rates_and_a_ring_make_a_cluster():
    ten = anatomy.planner()
    alpha, bandwidth, n = 3e-4, 1.5e9, 4
    times = {size: 2 * (n - 1) * (alpha + size / n / bandwidth) for size in here.SIZES}
    cluster = here.cluster_of(json.loads(json.dumps(RATES | {"all_reduce": times})), n)
    machine = ten.Machine(cluster, ten.SOFTWARE["ours"])
    assert machine.flops == pytest.approx(5e10)
    assert machine.bandwidth == pytest.approx(1e10)     # 2 bytes for each 4 that go through
    numbers = 10**6
    assert 2 * machine.ring(2 * numbers, n, 1) == pytest.approx(
        2 * (n - 1) * (alpha + 4 * numbers / n / bandwidth), rel=1e-6)
    alone = here.cluster_of(RATES | {"all_reduce": {}}, 1)
    assert ten.Machine(alone, ten.SOFTWARE["ours"]).ring(1e9, 1, 1) == 0


def test_a_run_is_planned_as_it_runs():
    """Its flags are accepted, its model has as many parameters, and its layout as many ranks."""
    for name, n in [(name, 1 if name.startswith("01") else 4) for name in here.RUNS]:
        module = chapter(name)
        args = strict.parse(module.__file__, "", module.VARIANTS, getattr(module, "flags", None),
                            here.flags_of(name, n, "cpu"))
        module.requires(args, n)
        model, layout, software = here.planned(name, n)
        assert layout.dp * layout.tp * layout.cp * layout.pp == n, name
        assert here.TASK.batch % (layout.dp * layout.micro_batch) == 0, name
        if "experts" not in vars(args) or not args.experts:
            assert model.parameters() == args.model.parameters(), name
        seconds = here.predicted_seconds(name, n, here.cluster_of(
            RATES | {"all_reduce": {4: 1e-3, 4**8: 2e-3}}, n))
        assert sum(seconds.values()) > 0 and software.gradient_bytes == 2, name
    for n, ep in ((1, 1), (2, 2), (8, 4)):              # no rank with less than an expert
        layout = here.planned("08_expert_parallel", n)[1]
        assert (layout.dp, layout.ep) == (n, ep)


def test_a_bad_argument_costs_one_line(capsys):
    with pytest.raises(SystemExit) as leaving:
        here.main(["--ranks", "3"])
    [line] = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and "--ranks" in line
