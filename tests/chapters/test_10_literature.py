"""Formulas and predictions of the planner, beside numbers that the literature prints.

Those of one number each are in agreements.toml; whole runs in lab/planner/published.toml.
"""

import itertools
import statistics
import tomllib
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest

from lab import formats, schedules
from lab.planner import megatron, playbook, problems, published, rooflines, tables
from lab.texts import claims
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)
from tests.conftest import FULL, ROOT, chapter

GIB = playbook.GIB
AGREEMENTS = tomllib.loads(Path(__file__).with_name("agreements.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", ["megatron", "playbook", "scaling_book"])
def test_a_number_of_the_literature_is_ours(text):
    for row in AGREEMENTS[text]["rows"]:
        assert claims.evaluate(row["ours"]) == pytest.approx(
            row["published"], rel=row.get("within", 0), abs=row.get("by", 0)), row


def test_models_have_their_published_sizes(ten):
    for name, sizes in AGREEMENTS["parameters"].items():
        model = tables.models(ten)[name]
        found = model.parameters() / 1e9, model.parameters(model.top_k) / 1e9
        assert found == pytest.approx(sizes, rel=5e-4, abs=0.006), name
    # As in the released model, but for the 58 · 256 biases that balance its routers.
    assert ten.MODELS["deepseek-v3"].parameters() == 671_026_419_200 - 58 * 256


# --------------------------------------------------------------------------------- published tables


def test_each_column_of_a_table_is_read(ten):
    """A misspelt one would be left out."""
    known = {"model", "cluster", "gpus", "batch", "dtype", *tables.MEASURED}
    for kind in (ten.Model, ten.Layout, ten.Cluster, ten.Software):
        known |= {field.name for field in fields(kind)}
    for table in itertools.chain(*(tables.load(file)["table"] for file in tables.FILES)):
        assert {*table["columns"], *table["fixed"]} <= known, table["name"]


def test_published_tables_are_predicted(ten, monkeypatch):
    """And those of 2021 and 2022 twice as well as by a constant rate. The constants of HBM and
    NVLink are a best fit."""
    if not FULL:                                        # this takes ten fits
        monkeypatch.setattr(published, "leave_one_out", lambda ten: [0])
    assert published.tables_missed(ten) == []
    for name in published.TABLES:                       # limits are no looser than they must be
        table, runs = tables.find_table(name), tables.runs(ten, name)
        mean, largest = tables.mean_and_largest(tables.errors(runs))
        assert table["mean"] < mean + 0.05 and table["largest"] < largest + 0.1, name
        if name in published.DENSE:
            rates = [run.constant(table["constant"]) / run.published - 1 for run in runs]
            assert mean < tables.mean_and_largest(rates)[0] / 2
    assert published.fit(ten, start=(0.8, 0.8)) == pytest.approx([ten.HBM, ten.NVLINK], abs=3e-3)


def test_22_of_29_published_mixtures_are_predicted_within_20_percent(ten):
    """As the lesson and the page say, with 6 that ran slower."""
    runs = [run for name in published.MIXTURES for run in tables.runs(ten, name)]
    errors = tables.errors(runs)
    assert (sum(abs(error) <= 0.2 for error in errors), len(errors)) == (22, 29)
    assert sum(error > 0.2 for error in errors) == 6 and max(errors) < 2
    page = (ROOT / "pages/planning.md").read_text(encoding="utf-8")
    rows = [{cell.strip() for cell in line.split("|")} for line in page.splitlines()]
    for run in runs:
        numbers = {f"{run.published:.4g}", f"{run.predicted:.0f}", f"{run.error:+.0%}"}
        assert any(numbers <= row and run.words.split()[0] in row for row in rows), run


def test_of_the_playbooks_74_runs_42_are_within_20_percent(ten):
    errors = [abs(run.error) for run in playbook.all_runs(ten)]
    assert len(errors) == 74 and sum(error < 0.2 for error in errors) == 42
    assert statistics.median(errors) == pytest.approx(0.15, abs=0.01)
    over_dp = playbook.runs_over(ten, "dp")
    assert max(abs(playbook.with_its_network(run).error) for run in over_dp.values()) < 0.16
    assert over_dp[64].bytes / GIB == pytest.approx(36.66, rel=0.25)
    for name, nodes, mfu in [("1B", 1, 0.392), ("3B", 8, 0.345), ("80B", 4, 0.148)]:
        run, *_ = playbook.runs(ten, name, nodes)
        assert playbook.mfu(run, run.published) == pytest.approx(mfu, rel=0.02)


def test_the_best_configuration_fits_and_beats_the_layouts_that_were_tried(ten):
    plan = playbook.best(ten, "8B", 16)
    assert plan.layout.dp * plan.layout.tp * plan.layout.pp == 128 and plan.layout.zero == 1
    assert plan.bytes <= ten.ROOM * 80e9 and plan.layout.recompute == "none"
    assert playbook.best(ten, "80B", 2) is None
    tried = [run.predicted for run in playbook.runs(ten, "8B", 16)]
    assert playbook.best_speed(ten, "8B", 16) >= max(tried)


def test_the_layouts_of_llama_3_need_what_its_software_frees(ten):
    """All three of table 4. It sends one sum for each run of pp micro-batches, so it holds the
    gradients of a whole slice."""
    llama, h100 = ten.SOFTWARE["llama3"], ten.CLUSTERS["h100"]
    layout, model = ten.Layout(64, 8, 1, 16, 8, zero=2), ten.MODELS["405b"]
    sums, none = (ten.Plan(model, layout, h100, software, 8192, 2048)
                  for software in (llama, replace(llama, sums_runs=False)))
    slice_of_gpu = ten.layer_of_gpu(model, layout, llama)
    assert sums.memory["gradients"] == none.memory["gradients"] + 4 * slice_of_gpu
    assert none.total > 1.3 * sums.total
    fits = [[run.fits for run in tables.runs(ten, "Llama 3", **changes)]
            for changes in ({}, {"zero": 1}, {"swiglu_kept": 3})]
    assert fits == [[True] * 3, [False] * 3, [False] * 3]


# --------------------------------------------------- Narayanan et al. 2021, Megatron-LM on clusters


def test_megatrons_equations_are_ours(ten):
    """A schedule in simulated time; parameters with biases and positions; and FLOPs."""
    for p, m in [(1, 3), (4, 8), (8, 5)]:
        span = schedules.simulate(chapter("07_pipeline_parallel").make_schedule("1f1b", p, m))
        assert max(end for _, end in span.values()) == megatron.equation_1(4 * m, 4, p, 3)
    sizes = 1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0
    for size, run in zip(sizes, tables.runs(ten, "table 1")):
        model, layers, h, s = run.model, run.model.layers, run.model.dim, run.model.seq
        numbers = model.parameters() + 9 * layers * h + s * h - model.norm
        assert numbers == pytest.approx(12 * layers * h**2 * (
            1 + 13 / (12 * h) + (model.vocab + s) / (12 * layers * h)), rel=1e-12)
        assert numbers / 1e9 == pytest.approx(size, abs=0.05)
        equation_3 = 96 * run.batch * s * layers * h**2 * (
            1 + s / (6 * h) + model.vocab / (16 * layers * h))
        assert equation_3 == pytest.approx(run.flops * run.gpus, rel=1e-12)
        assert equation_3 > 1.01 * ten.step_flops(model, run.batch)


@pytest.mark.parametrize(("table", "days"), [
    ("table 2, PTD", (84, 43, 23, 156, 80, 42)), ("table 2, ZeRO-3", (90, 74, 74, 169, 137, 140))])
def test_days_of_table_2_follow_from_its_rates_and_our_flops(ten, table, days):
    """For 300 G tokens, within the rounding of rates and of days."""
    for of_text, run in zip(days, tables.runs(ten, table)):
        flops = run.flops / (run.batch * run.model.seq) * 300e9
        assert flops / (run.published * 1e12) / 86400 == pytest.approx(
            of_text, abs=0.5 + 0.5 * of_text / run.published)


def test_megatrons_bytes_and_bandwidths(ten):
    """Sections 5.4, 5.9 and 5.10: what fits, bisection, and a checkpoint of the trillion."""
    for name in ("figure 14", "figure 15"):
        assert tables.runs(ten, name, batch=32)[0].fits
    assert 6 * 8 * megatron.machine(ten).link(3072) == pytest.approx(892e9, rel=0.1)
    states = ten.memory(ten.MODELS["1t"], ten.Layout(sp=False), megatron.machine(ten).software, 1)
    assert states["weights"] + states["optimizer"] == pytest.approx(13.8e12, rel=0.1)


def test_no_other_number_of_checkpoints_keeps_less():
    """Section 3.5: c·A_in + l/c·A_all."""
    kept = [c * 3 + 64 / c * 48 for c in range(1, 65)]
    assert kept.index(min(kept)) + 1 == problems.best_checkpoints(64, 3, 48) == 32


@pytest.mark.parametrize("dp, v", [(1, 1), (2, 4)])
def test_a_message_without_scatter_gather_is_a_whole_one(ten, dp, v):
    run, *_ = tables.runs(ten, "figure 12", batch=48, v=v, dp=dp)
    part = ten.step_seconds(run.model, run.layout, run.cluster, run.software, 48)["pp"]
    more, m = megatron.longer_unscattered(run), 48 // dp
    size, card = 2 * 2048 * 12288, 25e9 * ten.NIC
    assert part + more["pp"] == pytest.approx(m * 2 * v * size / card) and part < more["pp"] / 3
    assert more["bubble"] == pytest.approx(more["pp"] / m * 11 / v)


# ---------------------------------------------------------------- Tazi et al. 2025, the playbook


@pytest.mark.parametrize("name", ["1B", "3B", "8B", "70B", "405B"])
def test_activations_of_the_playbooks_plots(ten, name):
    """All are GPTs with dropout and plain attention there, and the embedding keeps a mask. Linears
    have biases, 9·h a layer, norms 4·h, and positions are a table."""
    table = AGREEMENTS["activations"]
    row = dict(zip(table["columns"], table[name]))
    layers, dim = row["layers"], row["dim"]
    model = ten.gpt(layers, dim, row["heads"], seq=4096, vocab=128256)
    software = ten.Software(flash=False, dropout=True)
    for recompute in ("none", "selective", "full"):
        kept = ten.kept_by_layer(model, ten.Layout(recompute=recompute), software)
        assert (layers * kept + 4096 * dim) / GIB == pytest.approx(row[recompute], abs=1e-6)
    numbers = dim * 128256 + layers * (12 * dim**2 + 13 * dim) + 2 * dim + dim * 4096
    assert 4 * numbers / GIB == pytest.approx(row["parameters"], abs=1e-6)
    assert model.parameters() + (9 * layers + 4096) * dim == numbers


def test_memory_of_the_playbooks_plots_over_tp_cp_and_pp(ten):
    """GiB on the first stage: activations of GPTs, and weights."""
    software = ten.Software(flash=False, dropout=True, ring=True)
    for row in AGREEMENTS["first_stage"]["activations"]:
        like, layout = ten.MODELS[row["model"]], ten.Layout(recompute="selective", **row["layout"])
        model = ten.gpt(like.layers, like.dim, like.heads, seq=row["seq"])
        kept = ten.kept_by_layer(model, layout, software)
        alive = ten.micro_batches_alive(layout, 64)
        gib = model.layers / layout.pp * alive * kept / GIB
        assert gib == pytest.approx(row["gib"], abs=1e-6), row
    for row in AGREEMENTS["first_stage"]["weights"]:
        held = ten.parameters_of_gpu(ten.MODELS[row["model"]], ten.Layout(**row["layout"]),
                                     ten.Software())
        gib = 2 * sum(size for size, _ in held.values()) / GIB
        assert gib == pytest.approx(row["gib"], abs=0.02), row


def test_bytes_of_recipes_in_8_bits():
    for name, size in AGREEMENTS["recipes"].items():
        assert formats.bytes_of(formats.RECIPES[name]) == size, name


# -------------------------------------------------------- Austin et al. 2025, the scaling book


def test_splits_and_seconds_of_the_scaling_book(ten):
    """Of a TPU v5p, and of a layer with D 8,192."""
    chip = ten.CLUSTERS["tpu-v5p"]
    layer = rooflines.layer_of(ten, ten.MODELS["70b"])
    for ffn in (ten.MODELS["70b"].ffn, layer.weights / layer.sent):
        assert 8 < rooflines.largest_tensor_parallel(ffn, chip.peak, chip.nvlink) < 16
    seconds = rooflines.training_seconds(15e12, ten.MODELS["70b"].parameters(), 18_823, chip.peak,
                                         0.5)
    assert seconds / 86400 == pytest.approx(17, abs=0.5)
    for f, tokens, chips, split in ((32_768, 48_000, 64, (16, 4)), (32_768, 4e5, 4096, (256, 16)),
                                    (30_000, 1e6, 8192, (1024, 8))):
        times = partial(rooflines.seconds, rooflines.mlp(8192, f), tokens, peak=chip.peak,
                        links=(2 * chip.nvlink, chip.nvlink))
        assert rooflines.fastest_split(times, chips) == split


def test_the_scaling_books_table_of_what_is_sent():
    """FLOPs over B·D·F, bytes over D·F of weights and over B·D of tokens: forward, backward."""
    D, F, B = 8192, 30_000, 2_000_000
    layer = rooflines.mlp(D, F)
    assert [of / (B * D * F / 512) for of in rooflines.flops(layer, B, 64, 8)] == [4, 8]
    sent = {name: [of / scale for of in rooflines.bytes_sent(name, layer, B)]
            for name, scale in (("dp", D * F), ("zero-3", D * F), ("tp", B * D))}
    assert sent == {"dp": [0, 8], "zero-3": [4, 8], "tp": [4, 4]}
    assert rooflines.bytes_sent("tp", layer, B, width=1)[0] == 2 * B * D


def test_the_scaling_books_three_problems(ten):
    """LLaMA-2 13B on 4,096 chips."""
    of = problems.llama_2(ten)
    matrices, layers = of["model"].matrices(1), of["model"].layers
    attention = matrices["queries"] + matrices["keys"]
    found = [layers * matrices["mlp"] / 1e9, layers * attention / 1e9, of["parameters"] / 1e9]
    assert found == pytest.approx([8.5, 4.2, 13.0], abs=0.05)
    found = [of["states"] / 1e9, 16e6 * of["kept"] / 1e12, of["all hbm"] / 1e12]
    assert found == pytest.approx([130, 42, 393], abs=0.5)
    assert of["tokens"] * of["kept"] == pytest.approx(7.86e12, abs=0.005e12)
    assert of["chips"] * of["axes"] == pytest.approx(3.48e6, abs=0.005e6)
    assert (round(of["both"]), round(of["shards"]), of["split"]) == (235, 1333, (1024, 4))
    assert of["seconds"] == pytest.approx(0.3, abs=0.02)


# ------------------------------------------------------------------------------------- the others


def test_runs_of_llama_3_and_fp8(ten):
    """3.8e25 FLOPs for 15.6 T tokens (Llama Team 2024); torchtitan's FP8 is 20 to 40% faster."""
    model = ten.MODELS["405b"]
    flops = 15.6e12 * ten.step_flops(model, 1, "causal") / model.seq
    assert flops == pytest.approx(3.8e25, rel=0.05)
    seconds = [ten.Plan(ten.MODELS["8b"], ten.Layout(dp=8, zero=3, sp=False),
                        ten.CLUSTERS["h100"], replace(ten.SOFTWARE["torchtitan"], fp8=fp8), 8,
                        64).total for fp8 in (False, True)]
    assert 1.2 < seconds[0] / seconds[1] < 1.4
