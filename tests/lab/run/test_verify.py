"""lab/run/verify.py: the comparison with one GPU, its tolerances, and its verdict."""

import dataclasses
import math
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from common import gpt, loss_sum
from lab.run import report, verify
from lab.run.one_gpu import BesideOneGpu
from lab.run.verify import Verifier, named_parameters
from tests.conftest import SMALL, TEXT, arguments, edited, run_main, sample


def float64_run(*flags):
    return BesideOneGpu(arguments("--dtype=float64", "--optimizer=sgd", *flags))


# ---------------------------------------------------------------------------------------- the steps


def compared_over_steps(faulty):
    """Two steps of one rank against itself, of which tensors are compared in the first. A step has
    twice the loss, twice the norm, and a gradient less."""
    run = float64_run("--steps=2")
    verifier, model = Verifier(run, tensor_steps=1), gpt(run.args.model, dtype=torch.float64)
    optimizer = run.optimizer(model.parameters())
    for batch in run.batches():
        optimizer.zero_grad()
        loss = loss_sum(model(batch.tokens), batch.targets) / batch.valid
        loss.backward()
        optimizer.step()
        norm = common.grad_norm(model.parameters())
        if batch.step == faulty:
            loss, norm = 2 * loss, 2 * norm
            model.block1.mlp.up.weight.grad = None
        verifier.compare(batch, loss, norm, named_parameters(model))
    return verifier.steps, verifier.worst


def test_losses_are_compared_in_every_step_and_tensors_in_the_first_ones(ranks):
    [(steps, worst)] = ranks(1)(compared_over_steps, 0)
    assert steps == 2 and worst["parameters"][0] < 1e-12
    assert worst["loss"] == (pytest.approx(1), "loss in step 1")
    assert worst["gradient norm"] == (pytest.approx(1), "gradient norm in step 1")
    # A gradient of None counts as zeros.
    assert worst["gradients"] == (1, "gradients block1.mlp.up.weight in step 1")
    [(steps, worst)] = ranks(1)(compared_over_steps, 1)
    assert steps == 2 and worst.pop("loss") == (pytest.approx(1, rel=0.2), "loss in step 2")
    assert max(value for value, _ in worst.values()) < 1e-12


def a_true_gradient_of_zero(file, fault):
    """A step with fused attention on a text of one repeated byte: all values are alike, so that
    nothing depends on the scores, nor on q. fault: what is added to an element of q's gradient, as
    a share of the largest element of all. Returns the worst gradient, and what q's is off, as a
    share of itself."""
    run = float64_run(f"--data={file}", "--steps=1")
    model = gpt(dataclasses.replace(run.args.model, attention="sdpa"), dtype=torch.float64)
    verifier, [batch] = Verifier(run, 5), run.batches()
    loss = loss_sum(model(batch.tokens), batch.targets) / batch.valid
    loss.backward()
    largest = max(p.grad.abs().max() for p in model.parameters())
    q = model.block2.attn.q.weight
    q.grad[3, 3] += fault * largest
    verifier.compare(batch, loss, common.grad_norm(model.parameters()), named_parameters(model))
    true = dict(run.one_gpu.named_parameters())["block2.attn.q.weight"].grad
    return verifier.worst["gradients"], ((q.grad - true).abs().max() / true.abs().max()).item()


def test_noise_in_a_gradient_of_zero_is_no_difference(ranks, tmp_path):
    (tmp_path / "a.txt").write_text(5000 * "a")
    allowed = verify.tolerances("float64", "sgd")["gradients"]
    [((off, _), to_itself)] = ranks(1)(a_true_gradient_of_zero, tmp_path / "a.txt", 0.0)
    assert to_itself > 0.1 and off < allowed / 100
    [((off, where), _)] = ranks(1)(a_true_gradient_of_zero, tmp_path / "a.txt", 1e-12)
    assert where == "gradients block2.attn.q.weight in step 1"  # small as it is, a fault is seen
    assert off == pytest.approx(1e-12 / verify.SMALL, rel=1e-2) and off > allowed


def test_only_gradients_are_measured_against_the_largest_of_all():
    """A gradient of q of 5e-4, as in blocks of the tiny preset, is measured against itself."""
    largest = {("loss", ""): 1e-6, ("gradients", "a"): 4.0, ("gradients", "b"): 3e-4,
               ("gradients", "q"): 2e-3, ("parameters", "b"): 2e-9}  # fmt: skip
    assert verify.scales(largest) == largest | {("gradients", "b"): 4e-4}


def a_loss_that_falls_to_nothing(fault):
    """Three steps whose losses and gradients fall to a millionth, with rounding noise of 1e-8."""
    run, worst = float64_run(), []
    run.one_gpu = torch.nn.Linear(2, 1, bias=False).double()
    [p] = run.one_gpu.parameters()
    verifier = Verifier(run, 5)
    for step, size in enumerate((1.0, 1e-3, 1e-6)):
        p.grad = torch.full_like(p, size)
        run.one_gpu_step = lambda batch, size=size: (torch.tensor(5 * size), torch.tensor(size))
        mine = torch.nn.Parameter(p.detach().clone())
        mine.grad = p.grad + 1e-8 + fault * size
        verifier.compare(types.SimpleNamespace(step=step), torch.tensor(5 * size + 1e-8),
                         torch.tensor(size), [("weight", mine)])
        worst.append(verifier.worst["gradients"][0])
    return worst


def test_noise_is_measured_against_what_there_was(ranks):
    """Where the loss falls to nothing, a difference is still of the size of the first rounding."""
    [worst] = ranks(1)(a_loss_that_falls_to_nothing, 0.0)
    assert max(worst) == pytest.approx(1e-8, rel=1e-3)
    [worst] = ranks(1)(a_loss_that_falls_to_nothing, 1e-3)
    assert worst[0] == pytest.approx(1e-3, rel=1e-3)


# ------------------------------------------------------------------------------------- rounding


MANY_TOKENS = ("--layers=1", "--dim=16", "--heads=4", "--seq=32", "--batch=128",
               "--micro-batch=16", "--device=cpu", "--steps=1", "--optimizer=sgd",
               f"--data={TEXT}")  # fmt: skip


@pytest.mark.parametrize(("precision", "times"), sample([
    ("--dtype=bfloat16", 1), ("--dtype=bfloat16", 1.3), ("--precision=fp16", 1.1)], 2))
def test_what_rounding_explains_is_tolerated_and_no_more(ranks, tmp_path, precision, times):
    """One GPU takes all 4,096 tokens at once, and the run 512 of them. A fault is in one matrix."""
    sound = "    norm = grad_norm(model.parameters())\n    if clip:"
    fault = f"    model[1].mlp.up.weight.grad *= {times}\n{sound}"
    if precision != "--dtype=bfloat16":
        sound = "    norm = masters.norm() / loss_scale\n"
        fault = f"    masters.parameters[9].grad *= {times}\n{sound}"
    source = edited("01_single_gpu", sound, fault)
    flags = *MANY_TOKENS, precision
    [(status, run, output)] = ranks(1)(run_main, "01_single_gpu", flags, tmp_path, source)
    wrong = [problem.partition(" is off by ")[0] for problem in run["problems"]]
    names = [f"{kind} block1.mlp.up.weight in step 1" for kind in ("gradients", "parameters")]
    assert wrong == ([] if times == 1 else names[: len(wrong)]) and status == (times > 1), output


BADLY_CONDITIONED = ("--layers=3", "--heads=1", "--kv-heads=1", "--dim=2", "--seq=5", "--batch=12",
                     "--vocab=260", "--ffn=432", "--seed=55", "--clip=10", "--ignore=0.1",
                     "--optimizer=muon", "--variant=naive", "--steps=3", "--device=cpu",
                     f"--data={TEXT}")  # fmt: skip


def test_muon_magnifies_rounding_and_a_fault_is_still_seen(ranks, tmp_path):
    """Newton-Schulz makes more of what is small in a matrix, such as a difference of rounding."""
    (status, _, output), *_ = ranks(3)(run_main, "02_data_parallel", BADLY_CONDITIONED, tmp_path)
    assert status == 0 and "rounding alone" in output, output
    source = edited("02_data_parallel", "dist.all_reduce(p.grad, group=self.group)",
                    "dist.all_reduce(p.grad, group=self.group)\n            p.grad *= 1.001")
    (status, run, output), *_ = ranks(3)(
        run_main, "02_data_parallel", BADLY_CONDITIONED, tmp_path, source)
    assert status == 1 and any("gradients" in problem for problem in run["problems"]), output


def with_other_weights(chapter, flags, folder, change):
    """A run whose optimizers are given parameters that were changed."""
    given = report.Run.optimizer

    def optimizer(run, parameters, **remembered):
        parameters = list(parameters)
        for p in parameters if run.batch is None else ():  # else they are one GPU's
            p.data.copy_(change(p.data))
        return given(run, parameters, **remembered)

    with mock.patch.object(report.Run, "optimizer", optimizer):
        return run_main(chapter, flags, folder)


def rounded(x):
    return x.bfloat16().to(x)


def turned(x):
    return -x


BEGINNING = "numbers that the optimizer begins with, "
MASTERS = [("01_single_gpu", 1, ""), ("03_zero", 2, "--variant=zero1"),
           ("03_zero", 2, "--variant=zero3")]  # fmt: skip


@pytest.mark.parametrize(("chapter", "world", "flags"), MASTERS)
def test_masters_that_were_rounded_are_no_masters(ranks, tmp_path, chapter, world, flags):
    """Nothing else says so: gradients are those of rounded weights in any case."""
    flags = [*SMALL, f"--data={TEXT}", "--steps=1", "--precision=bf16", *flags.split()]
    for change, how in ((rounded, "rounded to bfloat16"), (turned, "unlike one GPU's")):
        (status, run, _), *_ = ranks(world)(with_other_weights, chapter, flags, tmp_path, change)
        assert status == 1 and run["problems"][0].startswith(f"{BEGINNING}{how}: measured ")
        assert all(BEGINNING in problem for problem in run["problems"]) or change is turned
    (status, run, output), *_ = ranks(world)(run_main, chapter, flags, tmp_path)
    assert status == 0 and BEGINNING not in output


# --------------------------------------------------------------------------- tolerances and verdict


def test_tolerances():
    of_gradients = verify.tolerances("float32", "adamw")["gradients"]
    assert of_gradients < 1e-4 / 3  # a fault of a ten-thousandth is seen
    assert verify.tolerances("float32", "adamw", 4 * 1024)["gradients"] == 2 * of_gradients
    assert verify.tolerances("bfloat16", "adamw")["parameters"] is None


def test_difference_is_never_silently_zero():
    reference = torch.ones(3, dtype=torch.float64)
    assert verify.difference(torch.tensor([1.0, math.nan, 1.0]), reference, 1) == math.inf
    assert verify.difference(torch.ones(2), reference, 1) == math.inf
    assert verify.difference(torch.tensor([1.0, math.inf, 1.0]), reference, 1) == math.inf
    assert verify.difference(torch.ones(3) * 1.5, reference, torch.tensor(2.0)).item() == 0.25
    assert verify.scales({("gradients", "p"): 0.0}) == {("gradients", "p"): 1.0}


def verdict(rounding, **worst):
    worst = {kind.replace("_", " "): (off, f"{kind} of p") for kind, off in worst.items()}
    run = mock.Mock(about=mock.Mock(rounding=lambda args: rounding))
    verifier = Verifier(run, 1, verify.tolerances(rounding, "adamw"))
    verifier.worst, verifier.steps = worst, 2
    return verifier.verdict()


def test_the_verdict_names_what_is_off_and_by_how_much():
    off = {"loss": 1e-11, "gradient_norm": 1e-12, "gradients": 2e-10, "parameters": 0.0}
    (line,), wrong = verdict("float64", **off)
    assert line.startswith("NOT the same as one GPU") and "gradients 2e-10" in line
    assert wrong == {"gradients": "gradients of p is off by 2.0e-10, tolerance 1e-10"}
    (line,), wrong = verdict("float64", **off | {"gradients": 1e-10})
    assert line.startswith("same as one GPU") and line.endswith("✓") and not wrong


def has_computed_when_this_rank_goes_on():
    """Whether rank 0 had computed by then, in two steps."""
    run, store = BesideOneGpu(arguments("--batch=2")), dist.distributed_c10d._get_default_store()
    verifier, found = Verifier(run, 1), []
    for step in range(2):  # each step has a key of its own
        computed = lambda step=step: store.set(f"rank 0 has computed {step}", "")
        with mock.patch.object(torch.cuda, "synchronize", computed):
            verifier.wait_for_rank_0()
        found.append(store.check([f"rank 0 has computed {step}"]))
        dist.barrier()
    return found


def test_on_nccl_the_others_wait_at_the_store(ranks):
    """Not in a collective, whose watchdog would kill them."""
    assert ranks(2)(has_computed_when_this_rank_goes_on) == 2 * [[True, True]]
