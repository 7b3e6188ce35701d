"""Formulas and predictions of the planner, beside numbers that the literature prints.

Each number is a text's. Published tables of whole runs are in lab/planner/published.py.
"""

import statistics
from dataclasses import replace
from functools import partial

import pytest

from lab import formats, schedules
from lab.planner import megatron, playbook, problems, published, rooflines
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)
from tests.conftest import chapter

GIB = playbook.GIB


# --------------------------------------------------- Narayanan et al. 2021, Megatron-LM on clusters


def test_megatrons_equations_are_ours(ten):
    """A schedule in simulated time; parameters with biases and positions; and FLOPs."""
    for p, m in [(1, 3), (4, 8), (8, 5)]:
        span = schedules.simulate(chapter("07_pipeline_parallel").make_schedule("1f1b", p, m))
        assert max(end for _, end in span.values()) == megatron.equation_1(4 * m, 4, p, 3)
    sizes = 1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0
    for size, (row, *_) in zip(sizes, published.rows(ten, "table 1")):
        layers, h, heads, *_, batch, _ = map(int, row.split())
        model = ten.gpt(layers, h, heads)
        s, width = model.seq, model.vocab / (16 * layers * h)
        numbers = model.parameters() + 9 * layers * h + s * h - model.norm
        assert numbers == pytest.approx(12 * layers * h**2 * (
            1 + 13 / (12 * h) + (model.vocab + s) / (12 * layers * h)), rel=1e-12)
        assert numbers / 1e9 == pytest.approx(size, abs=0.05)
        flops = ten.step_flops(model, batch, recompute="full")
        equation_3 = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + width)
        assert equation_3 == pytest.approx(flops, rel=1e-12)
        assert flops > 1.01 * ten.step_flops(model, batch)


@pytest.mark.parametrize(("table", "days"), [
    ("table 2, PTD", (84, 43, 23, 156, 80, 42)), ("table 2, ZeRO-3", (90, 74, 74, 169, 137, 140))])
def test_days_of_table_2_follow_from_its_rates_and_our_flops(ten, table, days):
    """For 300 G tokens, within the rounding of rates and of days."""
    for of_text, (row, rate, *_) in zip(days, published.rows(ten, table)):
        layers, h, heads, *_, gpus, _, _ = map(int, row.split())
        model = ten.gpt(layers, h, heads)
        flops = ten.step_flops(model, 1, recompute="full") / model.seq * 300e9
        assert flops / (gpus * rate * 1e12) / 86400 == pytest.approx(
            of_text, abs=0.5 + 0.5 * of_text / rate)


def test_curves_of_megatrons_figures_go_as_its_text_says(ten):
    """Where they are highest, whether they fall, and by how much one is above another."""
    best_at = [(8, "batch 512", 4), (13, "batch 32", 8), (13, "batch 128", 8),
               (16, "batch 128", 2)]
    for number, curve, best in best_at:
        figure = getattr(megatron, f"figure_{number}")(ten)
        assert megatron.best(figure[curve]) == best, (number, curve)
    for batch in (8, 128):  # figure 11: 3 layers on each stage
        rates = {pp: megatron.rate(ten, ten.gpt(3 * pp, 20480, 128),
                                   megatron.layout(ten, tp=8, pp=pp), batch)
                 for pp in (1, 2, 4, 8)}
        assert megatron.falls(rates) == 3, batch
    over_pp, over_tp = (megatron.instead_of_dp(ten, axis) for axis in ("pp", "tp"))
    assert [megatron.falls(curve) for curve in over_pp.values()] == [4, 4, 4]  # figure 14
    assert [megatron.falls(over_tp[f"batch {batch}"]) for batch in (128, 512)] == [4, 4]
    seven, twelve, seventeen = (getattr(megatron, f"figure_{n}")(ten) for n in (7, 12, 17))
    assert seven["one GPU"][16] / seven["one GPU"][1] == pytest.approx(1.3, rel=0.1)
    assert twelve["interleaved"][60] / twelve["1f1b"][60] - 1 == pytest.approx(0.1, rel=0.2)
    gain = seventeen["recomputed"][256] / seventeen["nothing again"][8]
    assert gain == pytest.approx(2, rel=0.1)


def test_megatrons_bytes_and_bandwidths(ten):
    """Sections 5.2, 5.4, 5.9 and 5.10: what fits, bisection, and a checkpoint of the trillion."""
    small, zero_3 = ten.gpt(32, 3840, 32), partial(ten.Layout, zero=3, sp=False, recompute="full")
    for axis in ("pp", "tp"):
        layout = megatron.layout(ten, dp=32, **{axis: 2})
        assert megatron.fits(ten, small, layout, 32)
    assert not megatron.fits(ten, ten.MODELS["530b"], zero_3(560, micro_batch=4), 2240)
    assert megatron.fits(ten, ten.MODELS["530b"], zero_3(1120, micro_batch=2), 2240)
    assert 6 * 8 * megatron.machine(ten).link(3072) == pytest.approx(892e9, rel=0.1)
    states = ten.memory(ten.MODELS["1t"], ten.Layout(sp=False), megatron.machine(ten).software, 1)
    assert states["weights"] + states["optimizer"] == pytest.approx(13.8e12, rel=0.1)


def test_no_other_number_of_checkpoints_keeps_less():
    """Section 3.5: c·A_in + l/c·A_all."""
    layers, of_input, of_layer = 64, 3, 48
    best = problems.best_checkpoints(layers, of_input, of_layer)
    kept = [c * of_input + layers / c * of_layer for c in range(1, 65)]
    assert kept.index(min(kept)) + 1 == best == 32
    assert problems.best_checkpoints(8, 1, 2) == 4


@pytest.mark.parametrize("dp, v", [(1, 1), (2, 4)])
def test_a_message_without_scatter_gather_is_a_whole_one(ten, dp, v):
    model, batch = ten.MODELS["gpt3"], 48
    layout = megatron.layout(ten, dp, tp=8, pp=12, v=v)
    part, whole = (megatron.seconds(ten, model, layout, batch, scattered)
                   for scattered in (True, False))
    m = batch // dp
    size, card = 2 * 2048 * 12288, 25e9 * ten.NIC
    assert whole["pp"] == pytest.approx(m * 2 * v * size / card)
    assert part["pp"] < whole["pp"] / 4
    more = {cause: whole[cause] - part[cause] for cause in part}
    assert more["bubble"] == pytest.approx(more["pp"] / m * 11 / v)
    assert {cause for cause in more if more[cause]} == {"pp", "bubble"}


# ---------------------------------------------------------------- Tazi et al. 2025, the playbook


def test_of_the_playbooks_74_runs_42_are_within_20_percent(ten):
    errors = [abs(playbook.speed(ten, name, layout) / measured - 1)
              for name, _, layout, measured, _ in playbook.runs(ten)]
    assert len(errors) == 74 and sum(error < 0.2 for error in errors) == 42
    assert statistics.median(errors) == pytest.approx(0.15, abs=0.01)


def test_speeds_over_dp_and_tp_are_planned(ten):
    """Over dp with the network as it measured. lab/texts/differences.py has the degrees that
    are further off."""
    for degree, measured in playbook.THROUGHPUT["dp"].items():
        assert playbook.speed_over(ten, "dp", degree, True) == pytest.approx(measured, rel=0.16)
    for axis in ("tp", "tp + sp"):
        for degree in (2, 4, 8, 16, *([32] if axis == "tp + sp" else [])):
            measured = playbook.THROUGHPUT[axis][degree]
            assert playbook.speed_over(ten, axis, degree) == pytest.approx(measured, rel=0.25)
    for axis, degrees in (("tp", (4, 8, 16, 32)), ("tp + sp", (2,))):
        for degree in degrees:
            assert playbook.largest_that_fits(ten, axis, degree) == pytest.approx(
                playbook.LARGEST[axis][degree], rel=0.25)
    layout = playbook.layout_over(ten, "dp", 64)
    assert playbook.gib_of_gpu(ten, "1B", layout) == pytest.approx(
        playbook.MEMORY_OF_DP, rel=0.25)
    for name, nodes, measured in (("1B", 1, 40150), ("8B", 1, 7503)):
        assert playbook.best_speed(ten, name, nodes) == pytest.approx(measured, rel=0.2)
    assert playbook.ring_bandwidth(ten, 1) == pytest.approx(
        1e9 * playbook.BANDWIDTH["all_gather"][1], rel=0.15)


def test_flops_of_a_token_are_those_of_the_playbooks_mfu(ten):
    for name, speed, mfu in [("1B", 40150, 0.392), ("3B", 13312, 0.345), ("80B", 285, 0.148)]:
        assert playbook.mfu(ten, name, speed) == pytest.approx(mfu, rel=0.02)
    for name, size in (("1B", 1.34), ("3B", 3.57), ("8B", 8.86), ("80B", 80.0)):
        assert playbook.model_of(ten, name).parameters() / 1e9 == pytest.approx(size, abs=0.006)


def test_the_best_configuration_fits_and_beats_the_layouts_that_were_tried(ten):
    plan = playbook.best(ten, "8B", 16)
    assert plan.layout.dp * plan.layout.tp * plan.layout.pp == 128 and plan.layout.zero == 1
    assert plan.bytes <= ten.ROOM * 80e9 and plan.layout.recompute == "none"
    assert playbook.best(ten, "80B", 2) is None
    tried = [playbook.speed(ten, "8B", layout)
             for name, nodes, layout, *_ in playbook.runs(ten) if (name, nodes) == ("8B", 16)]
    assert playbook.best_speed(ten, "8B", 16) >= max(tried)


# Layers, dim, heads; GiB of activations with 4,096 tokens: none, selective, full; of parameters.
LLAMAS = {"1B": (16, 2048, 32, 44.2578125, 4.2578125, 0.2578125, 4.0113677978515625),
          "3B": (28, 3072, 24, 63.66796875, 11.16796875, 0.66796875, 13.331336975097656),
          "8B": (32, 4096, 32, 97.015625, 17.015625, 1.015625, 26.025909423828125),
          "70B": (80, 8192, 64, 485.03125, 85.03125, 5.03125, 244.07086181640625),
          "405B": (126, 16384, 128, 1527.8125, 267.8125, 15.8125, 1520.17822265625)}


@pytest.mark.parametrize("name", LLAMAS)
def test_activations_of_the_playbooks_plots(ten, name):
    """All are GPTs with dropout and plain attention there, and the embedding keeps a mask. Linears
    have biases, 9·h a layer, norms 4·h, and positions are a table."""
    layers, dim, heads, none, selective, full, parameters = LLAMAS[name]
    model = ten.gpt(layers, dim, heads, seq=4096, vocab=128256)
    software = ten.Software(flash=False, dropout=True)
    for recompute, gib in (("none", none), ("selective", selective), ("full", full)):
        kept = ten.kept_by_layer(model, ten.Layout(recompute=recompute), software)
        assert (layers * kept + 4096 * dim) / GIB == pytest.approx(gib, abs=1e-6)
    numbers = dim * 128256 + layers * (12 * dim**2 + 13 * dim) + 2 * dim + dim * 4096
    assert 4 * numbers / GIB == pytest.approx(parameters, abs=1e-6)
    assert model.parameters() + (9 * layers + 4096) * dim == numbers


def test_memory_of_the_playbooks_plots_over_tp_cp_and_pp(ten):
    """GiB on the first stage: (model, tokens, layout), activations of GPTs with selective
    recomputation; and weights in bf16."""
    software = ten.Software(flash=False, dropout=True, ring=True)
    for name, seq, layout, gib in [
            ("8b", 16384, {}, 68), ("70b", 16384, {"tp": 8}, 42.5),
            ("70b", 16384, {"tp": 16}, 21.25), ("70b", 16384, {"tp": 8, "sp": False}, 130),
            ("70b", 16384, {"tp": 16, "sp": False}, 115),
            ("8b", 131072, {"tp": 2, "sp": False}, 352),
            ("8b", 131072, {"tp": 2, "cp": 4, "sp": False}, 88), ("8b", 4096, {"pp": 8}, 17)]:
        like, layout = ten.MODELS[name], ten.Layout(recompute="selective", **layout)
        model = ten.gpt(like.layers, like.dim, like.heads, seq=seq)
        kept = ten.kept_by_layer(model, layout, software)
        alive = ten.micro_batches_alive(layout, 64)
        assert model.layers / layout.pp * alive * kept / GIB == pytest.approx(gib, abs=1e-6)
    for name, layout, gib in [("1b", {}, 2.3018), ("8b", {}, 14.957), ("70b", {}, 131.414),
                              ("70b", {"tp": 8}, 16.4375), ("8b", {"tp": 2, "cp": 4}, 7.4785),
                              ("8b", {"pp": 8, "sp": False}, 2.6035)]:
        held = ten.parameters_of_gpu(ten.MODELS[name], ten.Layout(**layout), ten.Software())
        assert 2 * sum(size for size, _ in held.values()) / GIB == pytest.approx(gib, abs=0.02)


def test_bytes_of_recipes_in_8_bits():
    """The playbook's table of FP8."""
    for name, size in {"bf16, fp32 sums": 20, "bf16": 16, "Transformer Engine": 16,
                       "FP8-LM, O3": 9, "DeepSeek-V3": 15, "Nanotron": 10}.items():
        assert formats.bytes_of(formats.RECIPES[name]) == size, name


# -------------------------------------------------------- Austin et al. 2025, the scaling book


def test_numbers_of_the_scaling_book(ten):
    """Of a TPU v5p, and of a layer with D 8,192 and F 30,000."""
    chip, ffn = ten.CLUSTERS["tpu-v5p"], 30_000
    per_chip = partial(rooflines.tokens_of_data_parallel, chip.peak)
    assert [round(per_chip(axes * chip.nvlink)) for axes in (1, 2, 3)] == [2550, 1275, 850]
    assert rooflines.tokens_of_data_parallel(197e12, 819e9) == pytest.approx(240, abs=5)
    widest = rooflines.largest_tensor_parallel
    assert 8 < widest(ten.MODELS["70b"].ffn, chip.peak, chip.nvlink) < 16
    assert widest(49_152, chip.peak, chip.nvlink) == pytest.approx(19, abs=0.5)
    layer = rooflines.layer_of(ten, ten.MODELS["70b"])
    assert 8 < widest(layer.weights / layer.sent, chip.peak, chip.nvlink) < 16
    for f, tokens in ((32_768, 99), (ffn, 108)):
        assert rooflines.tokens_of_both(f, chip.peak, chip.nvlink) == pytest.approx(
            tokens, abs=0.5)
    assert rooflines.best_data_parallel(48_000, 64, 32_000) == pytest.approx(13.9, abs=0.05)
    seconds = rooflines.training_seconds(15e12, ten.MODELS["70b"].parameters(), 18_823, chip.peak,
                                         0.5)
    assert seconds / 86400 == pytest.approx(17, abs=0.5)
    for f, tokens, chips, split in ((32_768, 48_000, 64, (16, 4)), (32_768, 4e5, 4096, (256, 16)),
                                    (ffn, 1e6, 8192, (1024, 8))):
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
    matrices, model = of["model"].matrices(1), of["model"]
    assert model.layers * matrices["mlp"] == pytest.approx(8.5e9, abs=0.05e9)
    assert model.layers * (matrices["queries"] + matrices["keys"]) == pytest.approx(
        4.2e9, abs=0.05e9)
    assert of["parameters"] == pytest.approx(13.0e9, abs=0.05e9)
    assert of["states"] == pytest.approx(130e9, abs=0.5e9)
    assert 16e6 * of["kept"] == pytest.approx(42e12, abs=0.5e12)
    assert of["tokens"] * of["kept"] == pytest.approx(7.86e12, abs=0.005e12)
    assert of["all hbm"] == pytest.approx(393e12, abs=0.5e12)
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
