"""Chapter 01's timeline, its kernels, and its report."""

import importlib
import json

import pytest
import torch

from common import Config, gpt
from lab.chapters import held
from lab.run import anatomy
from lab.run.words import printable
from tests.chapters.test_01_single_gpu import (
    FLAGS,
    ONE,
    ONE_SETTING,
    SMALL,
    one,  # noqa: F401  (fixtures)
    plain_forward,
    state_formula,
)
from tests.conftest import chapter, needs_triton, sample

instruments = held("01")

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
    """The tokens that a model writes behind a prompt."""
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
