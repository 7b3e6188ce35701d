"""lab/planner/playbook.py: what its docstring says of the playbook's runs, and the picture."""

import statistics

import pytest

from lab.chapters import chapter
from lab.planner import playbook
from lab.sources import playbook_figure


def errors(name, nodes):
    """[(its layout, by what share the planner is too fast)] of a model's runs on so many nodes."""
    ten = chapter("10")
    return [(layout, playbook.speed(ten, name, layout) / told - 1)
            for of, on, layout, told, _ in playbook.runs(ten) if (of, on) == (name, nodes)]


def test_of_74_runs_42_are_within_20_percent():
    sizes = sorted(abs(error) for name, nodes in playbook.RUNS for _, error in errors(name, nodes))
    assert len(sizes) == 74 and sum(size < 0.2 for size in sizes) == 42
    assert statistics.median(sizes) == pytest.approx(0.15, abs=0.01)


def test_of_13_runs_of_the_8b_on_a_node_ten_are_within_11_percent():
    sizes = sorted(abs(error) for _, error in errors("8B", 1))
    assert len(sizes) == 13 and sizes[9] < 0.11 < sizes[10]


def test_small_kernels_full_memory_and_the_network_are_what_the_planner_does_not_know():
    [small] = [error for layout, error in errors("1B", 1)
               if (layout.tp, layout.micro_batch) == (8, 1)]
    assert 1 / (1 + small) == pytest.approx(1 / 3, abs=0.05)
    [full] = [error for layout, error in errors("8B", 1) if (layout.dp, layout.pp) == (4, 2)]
    assert 1 / (1 + full) == pytest.approx(1 / 3, abs=0.05)
    assert min(error for _, error in errors("80B", 4)) > 1.3
    assert statistics.median(error for _, error in errors("3B", 8)) > 0.2
    cards = 8 * chapter("10").CLUSTERS["h100"].nic / 1e9
    assert playbook.BANDWIDTH["all_reduce"][64] / cards == pytest.approx(1 / 12, abs=0.002)


def test_with_the_bandwidths_that_it_has_measured_the_plot_over_dp_is_met():
    ten = chapter("10")
    told = playbook.THROUGHPUT["dp"]
    measured = {dp: playbook.speed_over(ten, "dp", dp, True) / told[dp] - 1 for dp in told}
    assert max(map(abs, measured.values())) < 0.16
    assert playbook.speed_over(ten, "dp", 256) / told[256] - 1 == pytest.approx(0.61, abs=0.03)
    assert playbook.speed_over(ten, "dp", 8) == playbook.speed_over(ten, "dp", 8, True)  # a node


def test_all_runs_took_more_memory_than_is_predicted():
    ten = chapter("10")
    more = [gib / playbook.gib_of_gpu(ten, name, layout)
            for name, _, layout, _, gib in playbook.runs(ten)]
    assert min(more) > 1 and statistics.median(more) > 1.4


@pytest.mark.parametrize("name, told, mfu", [
    ("1B", 40150, 0.392), ("3B", 13312, 0.345), ("80B", 285, 0.148)])
def test_flops_of_a_token_are_those_of_its_mfu(name, told, mfu):
    assert playbook.mfu(chapter("10"), name, told) == pytest.approx(mfu, rel=0.02)


def test_its_mfu_counts_an_embedding_that_is_a_matrix_of_its_own():
    ten = chapter("10")
    model = playbook.model_of(ten, "8B")
    embedding = 6 * model.vocab * model.dim * 7503 / ten.CLUSTERS["h100"].peak
    assert playbook.mfu(ten, "8B", 7503) == pytest.approx(0.428, abs=1e-3)
    assert playbook.mfu(ten, "8B", 7503) + embedding == pytest.approx(0.452, abs=1e-3)


def test_the_best_configuration_fits_and_is_of_the_layouts_that_it_tried():
    ten = chapter("10")
    plan = playbook.best(ten, "8B", 16)
    assert plan.layout.dp * plan.layout.tp * plan.layout.pp == 128 and plan.layout.zero == 1
    assert plan.bytes <= ten.ROOM * 80e9 and plan.layout.recompute == "none"
    assert playbook.best(ten, "80B", 2) is None
    tried = [playbook.speed(ten, "8B", layout)
             for name, nodes, layout, *_ in playbook.runs(ten) if (name, nodes) == ("8B", 16)]
    assert playbook.BATCH * 4096 / plan.total / 128 >= max(tried)


def test_panels_show_what_is_planned_beside_what_was_measured(monkeypatch):
    monkeypatch.setattr(playbook_figure, "NODES", (1, 4))           # of seven
    ten = chapter("10")
    panels = {axes.get_title("left").split(":")[0]: axes for axes in playbook_figure.draw().axes}
    assert len(panels) == 10
    sheet, network, measured = panels["The 1B over dp"].get_lines()
    assert [*measured.get_ydata()] == [*playbook.THROUGHPUT["dp"].values()]
    assert sheet.get_ydata()[-1] == playbook.speed_over(ten, "dp", 256) > network.get_ydata()[-1]
    [title] = [title for title in panels if title.startswith("The fastest layout")]
    words = [text.get_text() for text in panels[title].texts]
    assert len(words) == 4 * 2 and words.count("does not fit") == 1
    assert [word.split("measured: ")[1] for word in words if "measured" in word] == [
        "39%", "43%", "15%"]
    bars = panels["70B, by what is recomputed (as in its plot)"].patches
    tallest = max(bar.get_y() + bar.get_height() for bar in bars)
    assert tallest == pytest.approx(4 * 244.19586 + 1770.0625)      # GiB: none, 8,192 tokens
