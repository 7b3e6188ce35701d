"""Chapter 10: held to what was published, to other chapters' formulas, and to its own search."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

import common
from lab.bench import anatomy
from lab.planner import problems, published
from tests.conftest import chapter, some

TEN = "10_planner"


@pytest.fixture
def ten():
    return chapter(TEN)


def config(model):
    """The same model, as chapters 01 to 09 train it."""
    return common.Config(model.layers, model.dim, model.heads, model.kv_heads, model.seq,
                         model.vocab, model.tie, "plain", model.gated, model.ffn)


# ------------------------------------------------------------------------------- what was published


def test_published_tables_are_predicted(ten):
    assert published.beyond(ten) == []
    for table in published.PUBLISHED:
        ours, constant = published.errors(published.rows(ten, table))
        assert sum(map(abs, ours)) < sum(map(abs, constant)) / 2


def test_constants_are_those_that_fit(ten):
    assert published.fit(ten, start=(0.8, 0.8)) == pytest.approx([ten.HBM, ten.NVLINK], abs=3e-3)


def test_every_layout_of_table_1_fits_and_none_with_half_as_much_model_parallelism(ten):
    memory = ten.CLUSTERS["a100"].memory

    def bytes_on(row, fewer_tp=1, fewer_pp=1):
        layers, dim, heads, tp, pp, v, gpus, batch, micro_batch = map(int, row.split())
        tp, pp = tp // fewer_tp, pp // fewer_pp
        if not tp or not pp:
            return math.inf
        dp = gpus // (tp * pp)
        layout = ten.Layout(dp, tp, 1, pp, v if pp > 1 else 1, sp=False, micro_batch=micro_batch,
                            recompute="full")
        needed = ten.memory(ten.gpt(layers, dim, heads), layout, ten.SOFTWARE["megatron-2021"],
                            batch // dp // micro_batch)
        return sum(needed.values())

    for row, *_ in published.rows(ten, "table 1"):
        assert bytes_on(row) < ten.ROOM * memory
        assert min(bytes_on(row, fewer_tp=2), bytes_on(row, fewer_pp=2)) > memory


def test_micro_batch_of_two_is_best_where_megatron_found_it_best(ten):
    """Figure 16: 91 billion parameters, tp 8, pp 8, 64 GPUs, a batch of 128."""
    model = ten.gpt(layers=32, dim=15360, heads=120)
    seconds = {b: sum(ten.step_seconds(model, ten.Layout(1, 8, 1, 8, sp=False, micro_batch=b,
                                                         recompute="full"),
                                       ten.CLUSTERS["a100"], ten.SOFTWARE["megatron-2021"],
                                       128).values()) for b in (1, 2, 4, 8)}
    assert min(seconds, key=seconds.get) == 2


def test_worked_problems_have_the_books_answers(ten):
    text = " ".join(problems.problems(ten))
    for answer in ("13.0 G parameters (13.0)", "130 GB (130)", "42 TB (42)", "8 TB (8)",
                   "393 TB (393)", "850 tokens of a chip (850)", "below 235 (235)",
                   "over 1333 chips (1333)", "0.31 s", "2 is best (2)", "24% of the speed",
                   "each layer is one"):
        assert answer in text


def test_best_checkpoints_keep_least():
    layers, of_input, of_layer = 36, 1.0, 4.0
    kept = {c: c * of_input + layers / c * of_layer for c in range(1, layers + 1)}
    assert problems.best_checkpoints(layers, of_input, of_layer) == min(kept, key=kept.get) == 12


# ----------------------------------------------------------------------- other chapters' formulas


def test_activations_are_korthikantis(ten):
    model, b, t = ten.gpt(4, 256, 8, seq=128), 3, 4
    s, h, a = model.seq, model.dim, model.heads
    unfused = ten.Software(flash=False, dropout=True)
    kept = lambda **layout: ten.kept_by_layer(
        model, ten.Layout(**{"micro_batch": b, "sp": False} | layout), unfused)
    core = 5 * a * s / h
    assert kept() == s * b * h * (34 + core)
    assert kept(tp=t) == s * b * h * (10 + 24 / t + core / t)
    assert kept(tp=t, sp=True) == s * b * h * (34 + core) / t
    assert kept(tp=t, sp=True, recompute="selective") == s * b * h * 34 / t
    assert kept(recompute="full") == 2 * s * b * h


def test_what_is_planned_as_a_llama_is_trained_as_one(ten):
    """So that what chapters 01 to 09 measure of tiny-llama holds the planner's Llamas, too."""
    cfg, llama_1b = common.PRESETS["llama-8b"], ten.MODELS["1b"]
    assert anatomy.as_planned(cfg) == ten.MODELS["8b"]
    assert cfg.parameters() == ten.MODELS["8b"].parameters()
    assert config(llama_1b).parameters() == llama_1b.parameters()


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
@pytest.mark.parametrize(("flash", "gated"), [(False, False), (True, False), (True, True)])
def test_activations_are_those_of_chapters_04_and_05(ten, tp, flash, gated):
    """Of an odd model: fewer kv heads than ranks, a vocabulary that does not divide. But for what
    norms keep beside their inputs (LayerNorm the mean and the deviation of each token, 2 bytes
    each); and for the output of a flash kernel, which o reads as it is where a rank has one head,
    and else a copy of it."""
    model = replace(ten.gpt(3, 48, 6, seq=30, vocab=250, tie=False), kv_heads=3, gated=gated)
    software, of_inputs = ten.Software(flash=flash, swiglu_kept=4), 2 * 2 * 3 * 30 * 48
    copy = 2 * 3 * 30 * 48 / tp if flash and tp < 6 else 0
    cfg = replace(config(model), attention="sdpa" if flash else "plain")
    statistics = 2 * anatomy.norm_bytes(cfg, 3 * 30, 2) - of_inputs
    assert gated or statistics == 2 * 2 * 2 * 3 * 30
    for sp, name in ((False, "04_tensor_parallel"), (True, "05_sequence_parallel")):
        shares = chapter(name).kept(cfg, tp)
        measured = anatomy.kept_by_modules(cfg, 3, 2, shares)[1]
        ours = ten.kept_by_layer(model, ten.Layout(tp=tp, sp=sp, micro_batch=3), software)
        assert ours + statistics / (tp if sp else 1) + copy == measured


def test_model_states_are_shared_out_as_in_chapter_03(ten):
    """2 bytes of weights, 4 of gradients and 12 of the optimizer a parameter."""
    model, n = ten.gpt(4, 64, 4, seq=32, vocab=256), 4
    numbers, layer = model.parameters(), model.weights(1)
    states = lambda **more: [size / numbers for cause, size in ten.memory(
        model, ten.Layout(n, **more), ten.Software(), 1).items() if cause != "activations"]
    held = lambda *args: ten.parameters_of_gpu(*args, ten.Software())
    assert states() == [2, 4, 12]
    assert states(zero=1) == [2, 4, 12 / n]
    assert states(zero=2) == [2, 4 / n, 12 / n]
    assert states(zero=3) == [2 / n + 4 * layer / numbers, 4 / n, 12 / n]   # two layers are whole

    mixture = replace(model, experts=8)
    parts = held(mixture, ten.Layout(n, ep=2))
    experts, holders = parts["experts"]
    assert experts == 4 * 8 * 2 * 64 * 256 / 2 and holders == 2
    assert sum(size for size, _ in parts.values()) == mixture.parameters() - experts
    needed = ten.memory(mixture, ten.Layout(n, ep=2, zero=1), ten.Software(), 1)
    others = mixture.parameters() - 2 * experts
    assert needed["optimizer"] == 12 * (experts / 2 + others / n)
    kv_heads = held(replace(model, kv_heads=2), ten.Layout(2, tp=4))["keys"]    # tp of 4 has 2 each
    assert kv_heads == (4 * 2 * 64 * 32 / 2, 4)


def test_parameters_and_flops_are_chapter_01s(ten):
    one = chapter("01_single_gpu")
    for model in (ten.gpt(3, 64, 4, seq=32, vocab=256), ten.gpt(3, 64, 4, tie=False, vocab=500),
                  ten.llama(3, 64, 4, 2, 96, 500, 32)):
        cfg = config(model)
        assert model.parameters() == cfg.parameters()
        assert ten.step_flops(model, 5) == one.model_flops(cfg, 5)
        again = ten.step_flops(model, 5, recompute="full")
        assert again == one.step_flops(cfg, 5, "plain", "full")
    causal, every = ten.step_flops(model, 5, "causal"), ten.step_flops(model, 5)
    assert every - causal == 3 * model.layers * 5 * model.seq * 2 * model.seq * model.dim


def test_the_bubble_and_what_is_alive_are_chapter_07s(ten):
    seven = chapter("07_pipeline_parallel")
    names = {"1f1b": "1f1b", "zero-bubble": "zb-h1", "dualpipe-v": "dualpipe-v"}
    for (ours, theirs), p, m in itertools.product(names.items(), (2, 4, 8), (17, 32)):
        layout = ten.Layout(pp=p, schedule=ours)
        wait = ten.bubble(layout, F=3, B=4, W=2)
        assert wait / (m * 9) == pytest.approx(seven.bubble(theirs, p, m, 1, 3, 4, 2))
        stages = 2 if ours == "dualpipe-v" else 1
        assert ten.micro_batches_alive(layout, m) == seven.most_alive(theirs, 0, p, m, 1) / stages
    layout = ten.Layout(pp=4, v=2)
    assert ten.bubble(layout, 1, 1, 1) / (8 * 3) == seven.bubble("interleaved", 4, 8, 2)
    assert ten.micro_batches_alive(layout, 8) == seven.most_alive("interleaved", 0, 4, 8, 2) / 2


def layouts_of_8():
    """The flags of chapter 09 for every product of dense axes on 8 ranks, with each ZeRO."""
    for pp, cp, tp in itertools.product((1, 2, 4, 8), repeat=3):
        if 8 % (pp * cp * tp) == 0:
            schedules = ["1f1b"] + ["interleaved", "dualpipe-v"] * (pp > 1)
            for schedule, zero in itertools.product(schedules, range(3)):
                yield pp, cp, tp, schedule, zero


@pytest.mark.parametrize(("pp", "cp", "tp"), some(sorted({axes[:3] for axes in layouts_of_8()})))
def test_states_activations_and_traffic_are_those_of_chapter_09(ten, nine_runs, pp, cp, tp):
    """Its formulas, to which its runs are held, of the rank that has most."""
    for schedule, zero in [axes[3:] for axes in layouts_of_8() if axes[:3] == (pp, cp, tp)]:
        args, answers, e = nine_runs(pp, cp, tp, schedule, zero)
        model = anatomy.as_planned(args.model)
        v = 2 if schedule == "interleaved" else 1
        layout = ten.Layout(args.dp, tp, cp, pp, v, zero=zero, micro_batch=args.micro_batch,
                            schedule="dualpipe-v" if schedule == "dualpipe-v" else "1f1b")
        ours, m = ten.SOFTWARE["ours"], args.micro_batches

        # What each kind of parameter has on the fullest rank, and who shares it.
        planned = ten.parameters_of_gpu(model, layout, ours)
        fullest = max(answers, key=lambda answer: sum(numbers_of(args, answer).values()))
        assert {kind: size for kind, (size, _) in planned.items()} == numbers_of(args, fullest)
        assert {kind: n for kind, (_, n) in planned.items()} == {
            kind: fullest["holders"][kind] for kind in planned}

        # What a layer keeps, and how many micro-batches of it are alive at a time.
        shares = layout.shares(model, ours)
        assert shares == {name: anatomy.share_of(fullest["kept"], name) for name in shares}
        blocks = [max(alive_blocks(answer["schedule"])) for answer in answers]
        first, last = (ten.micro_batches_alive(layout, m, stage) for stage in (0, pp - 1))
        assert blocks[0] == first * model.layers / pp and blocks[-1] == last * model.layers / pp

        # What goes over each axis, in bytes on the wire, and messages to other stages.
        passes = m * model.layers // pp
        for axis, (numbers, n, _, _) in ten.messages(model, layout).items():
            sent = sum(part[1] for part in fullest["sent"].get(axis, {}).values())
            assert sent == (2 * passes * e * numbers if n > 1 else 0), axis


def numbers_of(args, answer):
    """{kind: numbers} of a rank, by lab/bench/anatomy.py."""
    held = anatomy.held_by_modules(args.model, answer["parameters"], answer["modules"])
    return {kind: sum(module.get(kind, (0, 0))[0] for module in held)
            for kind in ("queries", "keys", "mlp", "norms", "tables")}


def alive_blocks(schedule):
    """Blocks of micro-batches that a rank keeps, after each action."""
    alive, slices = 0, schedule["slices"]
    for kind, stage, _ in schedule["actions"]:
        start, end = slices[stage]
        blocks = end - start - (stage == 0) - (stage == len(slices) - 1)
        alive += blocks if kind == "F" else -blocks
        yield alive


@pytest.fixture
def nine_runs():
    """A function of axes: the arguments of a run of chapter 09, the formulas of its ranks along pp,
    and the bytes of a number."""
    nine = chapter("09_5d")

    def run(pp, cp, tp, schedule, zero, ep=1, experts=0, shared_expert=False):
        cfg = common.Config(16, 16, 8, 2, 32, 64, False, "plain", zero == 1, 48)
        args = SimpleNamespace(
            variant="hand", dtype="float32", precision="fp32", recompute="none", model=cfg,
            batch=128, micro_batch=1, pp=pp, cp=cp,
            tp=tp, ep=ep, dp=None, zero=zero, schedule=schedule, experts=experts, top_k=2,
            like=None, order="pp,dp,cp,tp", node_size=8, keep_gathered=False,
            shared_expert=shared_expert, documents=None)
        nine.requires(args, 8)
        full = nine.build(args.model)
        schedules, owners = nine.make_schedule(schedule, pp, args.micro_batches)
        slices, answers = nine.balanced(cfg.layers, len(owners)), []
        for stage in range(pp):
            parts = [full[slice(*slices[i])] for i, owner in enumerate(owners) if owner == stage]
            for block in (block for part in parts for block in part if experts and hasattr(
                    block, "mlp")):                     # all experts are chosen alike
                rows = [args.micro_batch * 32 // (cp * tp) * 2 // ep] * ep
                block.mlp.seen = [(rows, rows)] * args.micro_batches
            answers.append(nine.formulas(args, stage * (8 // pp), 8, Parts(parts)))
        return args, answers, 4

    return run


class Parts(list):
    """A rank's stages, whose parameters no group holds."""

    blocks = ()                                         # nothing is asked of who meets whom
    def parameters(self):
        return []
