"""Chapter 01's timeline, its kernels, and its report."""

import importlib
import json
import math
import statistics

import pytest
import torch
from torch import nn

import common
from common import Config, gpt, loss_sum
from lab.bench import anatomy
from lab.bench import formulas as instruments
from lab.cli.words import printable
from tests.chapters.test_01_single_gpu import (
    FLAGS,
    ONE,
    ONE_SETTING,
    SMALL,
    formulas,
    one,  # noqa: F401  (fixtures)
    plain_forward,
)
from tests.conftest import chapter, needs_triton


def state_formula(one, cfg, *flags):
    """Bytes of parameters, gradients and optimizer states, and of gradients at the most."""
    args, answer = formulas(one, cfg, *flags)
    return list(anatomy.state_bytes(args, answer, 4).values()), answer["most gradients"]


# ------------------------------------------------------------------------------- 5. the timeline


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16-fp32grad", 2)])
def test_memory_over_the_first_steps(one, run_chapter, tmp_path, precision, width):
    """What the lesson draws: gradients come and go, states come once, activations peak."""
    flags = "--layers=2", "--batch=4", "--steps=4", "--no-verify", f"--precision={precision}"
    assert run_chapter(ONE, *ONE_SETTING, *flags, "--json=run.json")[0] == 0
    memory = json.loads((tmp_path / "run.json").read_text())["recorded"]["memory"]
    seconds, parameters, gradients, states, others = memory
    formula, most = state_formula(one, SMALL, f"--precision={precision}")
    kept = anatomy.activation_bytes(SMALL, 4, width, {})
    adamw = 8 * SMALL.parameters() + 4 * anatomy.tensors(SMALL)

    begins = [i for i in range(1, len(seconds)) if gradients[i] == 0 < gradients[i - 1]]
    assert len(begins) == 2 and seconds == sorted(seconds)  # of three steps
    assert set(parameters) == {formula[0]} and max(gradients) == most
    for begin, end in zip([0, *begins], [*begins, len(seconds)]):
        assert gradients[begin] == 0 and gradients[end - 1] == formula[1]
        assert kept < max(others[begin:end]) < (1.5 if precision == "fp32" else 2) * kept
        assert others[end - 1] < 0.02 * kept  # all activations are gone again
    assert states[0] == formula[2] - adamw
    assert set(states[begins[0] :]) == {formula[2]}


def test_trace_and_sample_are_written(run_chapter, tmp_path):
    status, output, _ = run_chapter(ONE, *FLAGS, "--steps=3", "--profile=b/trace.json")
    assert status == 0
    events = json.loads((tmp_path / "b/trace.json").read_text())["traceEvents"]
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {event["name"] for event in events}
    written = output.split("what it writes by now:\n")[1].splitlines()
    assert sum(map(len, written[:-1])) > 25 and "same as one GPU" in written[-1]  # verdict is last


def written_by(one, model, prompt, length):
    seq = len(model[1].attn.rope.positions)
    return instruments.sample(plain_forward(one, model), prompt, seq, length=length)


def test_the_sample_follows_the_model(one):
    model = gpt(SMALL)
    for p in model.parameters():
        p.data.zero_()
    model.embedding.weight.data[:, 0] = 1
    model.head.norm.weight.data.fill_(1)
    model.head.out.weight.data[ord("a"), 0] = 1000.0  # nothing but "a" is likely
    assert bytes(written_by(one, model, b"xy", 30)) == b"xy" + 30 * b"a"
    assert printable([65, 10, 27, 7, 200, 9, 50000, 126]) == "A\n·····~"


def test_the_sample_reads_what_it_has_written(one):
    """A model that counts: after more than seq tokens it still goes on from the last one."""
    model = gpt(Config(1, 32, 4, 2, 8, 32))
    for p in model.parameters():
        p.data.zero_()
    model.head.norm.weight.data.fill_(1)
    model.embedding.weight.data.copy_(torch.eye(32))
    model.head.out.weight.data.copy_(1000 * torch.eye(32).roll(1, 0))
    assert written_by(one, model, [3, 4, 5], 20) == list(range(3, 26))


def test_the_sample_has_its_temperature(one):
    """Of two tokens, odds of 3^0.7 to 1 become 3 to 1 at temperature 0.7."""
    model = gpt(Config(1, 32, 4, 2, 8, 2))
    for p in model.parameters():
        p.data.zero_()
    model.embedding.weight.data[:, 0] = 1.0
    model.head.norm.weight.data.fill_(1)
    at_head = nn.functional.layer_norm(model.embedding.weight[0], (32,))[0]
    model.head.out.weight.data[0, 0] = 0.7 * math.log(3) / at_head.item()
    written = written_by(one, model, [0], 800)[1:]
    assert written.count(0) / 800 == pytest.approx(0.75, abs=0.05)


def test_no_sample_without_numbers(run_chapter, tmp_path):
    """A run that diverged, a vocabulary below 256, tokens that are no bytes: all end well."""
    diverges = "--steps=6", "--optimizer=sgd", "--lr=1e9", "--no-verify", "--json=run.json"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *diverges)
    assert status == 1 and "what it writes" not in output
    assert json.loads((tmp_path / "run.json").read_text())["loss"][-1] is None
    overflows = "--steps=1", "--optimizer=sgd", "--lr=2e9"  # at the end, not before
    assert "same as one GPU" in run_chapter(ONE, *ONE_SETTING, *overflows)[1]
    (tmp_path / "low.txt").write_bytes(bytes(range(100)) * 3)
    flags = (*ONE_SETTING, "--steps=1", "--data=low.txt", "--vocab=100")
    assert "what it writes" in run_chapter(ONE, *flags)[1]
    (tmp_path / "text.bin").write_bytes(bytes(1000))
    flags = (*ONE_SETTING, "--steps=1", "--data=text.bin")
    assert "what it writes" not in run_chapter(ONE, *flags)[1]


@pytest.mark.parametrize("works", [True, False])
def test_compile_where_it_works(run_chapter, monkeypatch, works):
    """With a stand-in for the compiler, which takes long: what happens around it is tested."""
    calls = []

    def compile(function):
        def fast(tokens):
            calls.append(torch._C._len_torch_dispatch_stack())
            if not works:
                raise RuntimeError("no C++ compiler\nmore lines")
            return function(tokens)

        return fast

    monkeypatch.setattr(torch, "compile", compile)
    status, output, _ = run_chapter(ONE, *ONE_SETTING, "--steps=5", "--compile")
    assert status == 0 and calls == (
        [0] * 3 if works else [0]
    )  # a trial, the steps after the third
    refusal = "  --compile does not work here, so eager it is: no C++ compiler\n"
    assert output.count(refusal) == (0 if works else 1)


# ------------------------------------------------------------------------------- our kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes the kernels")
def test_without_a_gpu_the_kernels_are_pytorchs(run_chapter, monkeypatch):
    importlib.import_module("kernels.model")  # and all others: to be interpreted, for other tests
    monkeypatch.delenv("TRITON_INTERPRET")
    fits = "--kernels", "--dim=32", "--heads=2"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *fits, "--steps=1")
    assert status == 0 and output.count("  --kernels: no GPU, or no Triton, for them here; ") == 1
    status, _, errors = run_chapter(ONE, *FLAGS, "--kernels", "--dtype=float64")
    assert status == 2 and errors.startswith("error: --kernels compute in float32")
    status, _, errors = run_chapter(ONE, *FLAGS, "--kernels", "--dim=64", "--heads=8")
    assert status == 2 and "not 64 in 8 heads of 8; --dim 128 --heads 4 would" in errors


def test_a_run_with_our_kernels(run_chapter, monkeypatch):
    """From end to end, on a GPU or in Triton's interpreter (where what they keep must be what the
    formula says): they train as one GPU does without them."""
    needs_triton()
    monkeypatch.setattr(chapter(ONE), "CORES", dict(chapter(ONE).CORES))
    monkeypatch.setattr(instruments, "sample", lambda *args: [65])
    fits = "--kernels", "--dim=32", "--heads=2", "--kv-heads=1", "--batch=2"
    for block, more in (("gpt", ()), ("llama", ("--ffn=44", "--recompute=every"))):
        status, output, _ = run_chapter(ONE, *FLAGS, *fits, f"--block={block}", *more, "--steps=1")
        assert status == 0 and "triton attention" in output, output
        assert "no GPU" not in output.split("\n", 1)[1] and "computed: triton" not in output
        assert ("kept per micro-batch: triton, " + ("every 1" if more else "none")) in output


def test_flops_of_our_kernels_are_two_matmuls_more_than_a_fused_cores(one):
    """test_kernels.py counts the matmuls of the kernels: 7 backward, where others have 5."""
    cfg = Config(layers=3, dim=32, heads=2, kv_heads=1, seq=16, vocab=64)
    sdpa, triton = (one.step_flops(cfg, 5, core, "none") for core in ("sdpa", "triton"))
    assert triton - sdpa == 3 * 2 * (2 * 5 * 16 * 16 * 32)


def test_the_model_with_our_kernels(one, monkeypatch):
    needs_triton()
    monkeypatch.setattr(one, "CORES", dict(one.CORES))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = Config(layers=1, dim=32, heads=2, kv_heads=1, seq=16, vocab=64)
    plain, fused = gpt(cfg, device=device), gpt(cfg, device=device)
    kernels, calls = importlib.import_module("kernels.model"), []
    layer_norm = kernels.layer_norm
    counted = lambda *args, **more: calls.append(1) or layer_norm(*args, **more)
    monkeypatch.setattr(kernels, "layer_norm", counted)
    one.CORES["triton"] = kernels.use_kernels(fused)
    tokens = torch.arange(32, device=device).view(2, 16)
    for model, core in ((plain, "plain"), (fused, "triton")):
        loss_sum(plain_forward(one, model, core)(tokens), tokens).backward()
    assert len(calls) == 3  # two in the block, and the last
    names = [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in fused.named_parameters()]
    for p, q in zip(plain.parameters(), fused.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------- the report


def test_the_report_is_of_this_run(run_chapter, tmp_path, monkeypatch):
    """A preset other than tiny reports the combination that ran; every printed number is right."""
    module, cores = chapter(ONE), []
    sample = lambda forward, *args: [cores.append(forward.args[0][1].attn.core) or 65]
    monkeypatch.setattr(instruments, "sample", sample)
    flags = ("--preset=gpt2", "--vocab=256", "--verify", "--steps=24", "--micro-batch=2")
    chosen = ("--attention=sdpa", "--recompute=full", "--json=run.json")
    status, output, _ = run_chapter(ONE, *FLAGS, *flags, *chosen)
    run = json.loads((tmp_path / "run.json").read_text())
    assert status == 0 and cores == [common.CORES["sdpa"]]
    names = [check["name"] for check in run["checks"] if ":" in check["name"]]
    combination = "sdpa, full"
    assert names == [
        f"kept per micro-batch: {combination}",
        f"computed: {combination}",
        f"computed: {combination}, early stop",
    ]
    cfg = Config(1, 32, 4, 2, 16, 256, tie=True)
    full = [module.step_flops(cfg, 8, "plain", "full", stop) for stop in (False, True)]
    ratios = [f / module.model_flops(cfg, 8) for f in full]
    assert f"takes {ratios[0]:.2f} times the FLOPs, {ratios[1]:.2f} times where" in output
    n = module.rule_of_thumb(cfg, 8) / module.model_flops(cfg, 8)
    assert f"6·N·tokens is {n:.2f} of the FLOPs: N leaves out attention's scores" in output
    speed = 8 * 16 / statistics.median(run["step_seconds"][3:])
    assert f"  {speed:,.0f} tokens/s" in output
    assert f"last 20 steps: {statistics.mean(run['loss'][-20:]):.3f} nats" in output
    few = run_chapter(ONE, *FLAGS, "--kv-heads=4", "--steps=3", "--no-verify")[1]
    assert "that GQA shares" in output and "that GQA shares" not in few
    assert few.count("kept per micro-batch") == 6 and cores[1] == common.plain_attention
    assert "tokens/s" not in few and "N has the embedding, which multiplies nothing, and" in few


@pytest.mark.parametrize(("formula", "wrong"), [
    ("WIDTHS", {"bf16": (2, 2, 2)}),
    ("KEPT", {"none": {"inside": 0.5}}),
    ("step_flops", lambda *args, **more: 1e6),
])  # fmt: skip
def test_a_wrong_formula_is_reported(run_chapter, monkeypatch, formula, wrong):
    monkeypatch.setattr(chapter(ONE), formula, wrong)
    flags = "--steps=1", "--no-verify", "--precision=bf16"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *flags)
    assert status == 1 and "✗" in output and "measured" in output
