"""Chapter 01's timeline, its kernels, and its report."""

import importlib
import json
import math
import statistics
from unittest import mock

import pytest
import torch
from torch import nn

import common
from common import Config, gpt
from lab.chapters import held
from lab.run import anatomy
from lab.run.words import printable
from tests.chapters.test_01_single_gpu import (
    FLAGS,
    ONE,
    ONE_SETTING,
    SMALL,
    formulas,
    one,  # noqa: F401  (fixtures)
    plain_forward,
)
from tests.conftest import chapter, needs_triton, sample

instruments = held("01")


def state_formula(one, cfg, *flags):
    """Bytes of parameters, gradients and optimizer states, and of gradients at the most."""
    args, answer = formulas(one, cfg, *flags)
    return list(anatomy.state_bytes(args, answer, 4).values()), answer["most gradients"]


# ------------------------------------------------------------------------------- 5. the timeline


@pytest.mark.parametrize(("precision", "width"), sample([("bf16-fp32grad", 2), ("fp32", 4)]))
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
    verdict = output.splitlines()[-1]  # after the sample
    assert "what it writes" in output and "same as one GPU" in verdict


def written_by(one, model, prompt, length):
    seq = len(model[1].attn.rope.positions)
    return instruments.sample(plain_forward(one, model), prompt, seq, length=length)


def test_the_sample_reads_what_it_has_written(one):
    """A model that counts: after more than seq tokens, it still counts on from the last one."""
    model = gpt(Config(1, 32, 4, 2, 8, 32))
    for p in model.parameters():
        p.data.zero_()
    model.head.norm.weight.data.fill_(1)
    model.embedding.weight.data.copy_(torch.eye(32))
    model.head.out.weight.data.copy_(1000 * torch.eye(32).roll(1, 0))
    assert written_by(one, model, [3, 4, 5], 20) == list(range(3, 26))
    assert printable([65, 10, 27, 7, 200, 9, 50000, 126]) == "A\n·····~"


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
    """Of a run that diverged, and of tokens that are no bytes."""
    diverges = "--steps=6", "--optimizer=sgd", "--lr=1e9", "--no-verify", "--json=run.json"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *diverges)
    assert status == 1 and "what it writes" not in output
    assert json.loads((tmp_path / "run.json").read_text())["loss"][-1] is None
    (tmp_path / "text.bin").write_bytes(bytes(1000))
    flags = (*ONE_SETTING, "--steps=1", "--data=text.bin")
    assert "what it writes" not in run_chapter(ONE, *flags)[1]


@pytest.mark.parametrize("works", [True, False])
def test_compile_where_it_works(run_chapter, monkeypatch, works):
    """With a stand-in for the compiler, which takes long."""
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
    assert status == 0 and calls == ([0] * 3 if works else [0])  # a trial, and steps 4 and 5
    assert output.count("no C++ compiler\n") == (0 if works else 1)


# ------------------------------------------------------------------------------- our kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes the kernels")
def test_without_a_gpu_the_kernels_are_pytorchs(run_chapter, monkeypatch):
    importlib.import_module("kernels.model")  # and all others: to be interpreted, for other tests
    monkeypatch.delenv("TRITON_INTERPRET")
    fits = "--kernels", "--dim=32", "--heads=2"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *fits, "--steps=1")
    assert status == 0 and output.count("--kernels: no GPU") == 1


@pytest.mark.parametrize("more", sample([
    ("--block=llama", "--ffn=44", "--recompute=every"), ("--block=gpt",)]))
def test_a_run_with_our_kernels(run_chapter, monkeypatch, tmp_path, more):
    """On a GPU or in Triton's interpreter, they train as one GPU does without them. (Where they
    are interpreted, what they keep must be what the formula says.)"""
    needs_triton()
    monkeypatch.setattr(chapter(ONE), "CORES", dict(chapter(ONE).CORES))
    monkeypatch.setattr(instruments, "sample", lambda *args: [65])
    fits = "--kernels", "--dim=32", "--heads=2", "--kv-heads=1", "--batch=2", "--json=run.json"
    status, output, _ = run_chapter(ONE, *FLAGS, *fits, *more, "--steps=1")
    assert status == 0 and "triton attention" in output, output
    checks = json.loads((tmp_path / "run.json").read_text())["checks"]
    kept = [check["name"] for check in checks if check["name"].startswith("kept per micro-batch")]
    assert any("triton" in name for name in kept)


def test_the_model_with_our_kernels(one, monkeypatch):
    needs_triton()
    monkeypatch.setattr(one, "CORES", dict(one.CORES))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = Config(layers=1, dim=32, heads=2, kv_heads=1, seq=16, vocab=64)
    model, kernels = gpt(cfg, device=device), importlib.import_module("kernels.model")
    with mock.patch.object(kernels, "layer_norm", side_effect=kernels.layer_norm) as layer_norm:
        one.CORES["triton"] = kernels.use_kernels(model)
        plain_forward(one, model, "triton")(torch.arange(32, device=device).view(2, 16))
    assert layer_norm.call_count == 3  # two in the block, and the last
    assert [*dict(model.named_parameters())] == [*dict(gpt(cfg).named_parameters())]


# ------------------------------------------------------------------------------- the report


def test_the_report_is_of_this_run(run_chapter, tmp_path, monkeypatch):
    """A preset other than tiny checks the one combination that ran, and tiny checks all six."""
    cores = []
    written = lambda forward, *args: [cores.append(forward.args[0][1].attn.core) or 65]
    monkeypatch.setattr(instruments, "sample", written)
    flags = ("--preset=gpt2", "--vocab=256", "--verify", "--steps=5", "--micro-batch=4")
    chosen = ("--attention=sdpa", "--recompute=full", "--json=run.json")
    status, output, _ = run_chapter(ONE, *FLAGS, *flags, *chosen)
    run = json.loads((tmp_path / "run.json").read_text())
    assert status == 0 and cores == [common.CORES["sdpa"]]
    names = [check["name"] for check in run["checks"] if ":" in check["name"]]
    assert names == ["kept per micro-batch: sdpa, full", "computed: sdpa, full",
                     "computed: sdpa, full, early stop"]  # fmt: skip
    speed = 8 * 16 / statistics.median(run["step_seconds"][3:])
    assert f"  {speed:,.0f} tokens/s" in output
    few = run_chapter(ONE, *FLAGS, "--kv-heads=4", "--steps=3", "--no-verify")[1]
    assert few.count("kept per micro-batch") == 6 and cores[1] == common.plain_attention
    assert "tokens/s" not in few


@pytest.mark.parametrize(("formula", "wrong"), sample([
    ("WIDTHS", {"bf16": (2, 2, 2)}),
    ("KEPT", {"none": {"inside": 0.5}}),
    ("step_flops", lambda *args, **more: 1e6),
]))  # fmt: skip
def test_a_wrong_formula_is_reported(run_chapter, monkeypatch, formula, wrong):
    monkeypatch.setattr(chapter(ONE), formula, wrong)
    flags = "--steps=1", "--no-verify", "--precision=bf16"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *flags)
    assert status == 1 and "✗" in output and "measured" in output
