"""lab/bench/verify.py: the comparison with one GPU, its tolerances, and its verdict."""

import dataclasses
import math
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common
from common import gpt, loss_sum
from lab.bench import report, rounding, verify
from lab.bench.one_gpu import BesideOneGpu
from lab.bench.verify import Verifier, named_parameters
from tests.conftest import SMALL, TEXT, arguments, edited, run_main, sample


def float64_run(*flags):
    return BesideOneGpu(arguments("--dtype=float64", "--optimizer=sgd", *flags))


# ---------------------------------------------------------------------------------------- the parts


def cut_and_verified(wrong_part):
    """A step with MLPs cut over the ranks: each rank is compared with its own part."""
    group, run, other = dist.group.WORLD, float64_run("--steps=1"), float64_run("--steps=1")
    [batch] = run.batches()
    other.build, other.after_step = gpt, lambda model: None
    loss, norm = other.one_gpu_step(batch)
    whole, model = other.one_gpu, gpt(run.args.model, dtype=torch.float64)
    for p, q in zip(whole.parameters(), model.parameters()):
        q.data, q.grad = p.data, p.grad
    for block, full in zip(model[1:-1], whole[1:-1]):
        for name, dim in (("up", 0), ("down", 1)):
            linear, grad = getattr(block.mlp, name), getattr(full.mlp, name).weight.grad
            linear.weight.grad = None
            common.keep_shard(linear, "weight", dim, group)
            linear.weight.grad = common.part(grad, linear.weight.cuts).clone()
    gradient = model.block1.mlp.up.weight.grad
    if run.rank == 1:
        gradient.mul_(1 + wrong_part)
    verifier = Verifier(run, tensor_steps=5)
    pair = verifier.compare(batch, loss, norm, named_parameters(nn.Sequential(model)))
    largest = whole.block1.mlp.up.weight.grad.abs().max()
    off = wrong_part * gradient.abs().max() / largest
    return pair == [loss.item(), norm.item()], verifier.worst, off.item()


@pytest.mark.parametrize("world", sample([3, 2, 4]))
def test_each_rank_is_compared_with_its_own_part(ranks, world):
    for same, worst, _ in ranks(world)(cut_and_verified, 0.0):
        assert same and max(value for value, _ in worst.values()) < 1e-12
    results = ranks(world)(cut_and_verified, 1e-3)
    for _, worst, _ in results:  # relative to the whole gradient's largest element, not the part's
        expected = pytest.approx(results[1][2], rel=1e-2)
        assert worst["gradients"] == (expected, "gradients block1.mlp.up.weight in step 1")


def dtensors_compared():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.arange(6.0) * 2, mesh, [Shard(0)])
    tensors = verify.compared(torch.zeros(()), torch.zeros(()), [("p", p)])
    return [tensors[kind, "p"][0].tolist() for kind in ("parameters", "gradients")]


def test_dtensors_are_compared_whole(ranks):
    whole = [0, 1, 2, 3, 4, 5]
    assert ranks(2)(dtensors_compared) == [[whole, [2 * x for x in whole]]] * 2


def flat_shards_of_cut_parameters(forgotten):
    """A flat shard of parameters of which one is cut, as chapter 03's units are: four ranks, of
    which two share a matrix, and two hold the same half of it. forgotten: the cut is not noted."""
    columns, shards = (mesh := float64_run().mesh(shards=2, columns=2))["columns"], mesh["shards"]
    linear, bias = nn.Linear(3, 4, bias=False).double(), nn.Parameter(torch.ones(2).double())
    linear.weight.data = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    linear.weight.global_name, bias.global_name = "weight", "bias"
    common.keep_shard(linear, "weight", 0, columns.get_group())
    parameters, group = [linear.weight, bias], shards.get_group()
    shard = torch.cat([p.detach().flatten() for p in parameters]).chunk(2)[group.rank()]
    views = lambda flat: [flat[:6].view(2, 3), flat[6:]]
    if forgotten:
        del linear.weight.cuts
    held = types.SimpleNamespace(master=nn.Parameter(shard), grad=-shard)
    unit = types.SimpleNamespace(full=shard, group=group, views=views, shard=held,
                                 parameters=parameters)

    there = {"weight": nn.Parameter(torch.arange(12.0).double().view(4, 3)), "bias": bias}
    for p in there.values():
        p.grad = -p.detach()
    run, one = float64_run(), torch.ones(())
    run.one_gpu, run.one_gpu_step = nn.ParameterDict(there), lambda batch: (one, one)
    verifier = Verifier(run, 5)
    verifier.compare(types.SimpleNamespace(step=0), one, one, verify.gathered([unit]))
    return {kind: off for kind, (off, _) in verifier.worst.items()}


def test_gathered_flat_shards_are_cut_as_their_parameters(ranks):
    same = dict.fromkeys(("loss", "gradient norm", "gradients", "parameters"), 0.0)
    assert ranks(4)(flat_shards_of_cut_parameters, False) == [same] * 4
    [worst, *_] = ranks(4)(flat_shards_of_cut_parameters, True)
    assert worst["gradients"] == worst["parameters"] == math.inf  # half against the whole


# ---------------------------------------------------------------------------------------- the steps


def compared_over_steps(plant):
    """Two steps of one rank against itself, with tensor_steps=1 and a fault in one of them."""
    run = float64_run("--steps=2")
    verifier, model = Verifier(run, tensor_steps=1), gpt(run.args.model, dtype=torch.float64)
    optimizer = run.optimizer(model.parameters())
    for batch in run.batches():
        optimizer.zero_grad()
        loss = loss_sum(model(batch.tokens), batch.targets) / batch.valid
        loss.backward()
        optimizer.step()
        norm = common.grad_norm(model.parameters())
        if batch.step == (plant == "in the second step"):
            loss = loss if batch.step else 2 * loss
            model.block1.mlp.up.weight.grad = None
            norm = norm * 2
        verifier.compare(batch, loss, norm, named_parameters(model))
    return verifier.steps, verifier.worst


def test_the_verifier_looks_at_tensors_for_so_many_steps(ranks):
    [(steps, worst)] = ranks(1)(compared_over_steps, "in the first step")
    assert steps == 2 and worst["parameters"][0] < 1e-12
    assert worst["loss"] == (pytest.approx(1), "loss in step 1")
    assert worst["gradient norm"] == (pytest.approx(1), "gradient norm in step 1")
    # A gradient of None counts as zeros.
    assert worst["gradients"] == (1, "gradients block1.mlp.up.weight in step 1")
    [(steps, worst)] = ranks(1)(compared_over_steps, "in the second step")
    assert steps == 2 and max(value for value, _ in worst.values()) < 1e-12


def a_late_loss():
    run = float64_run("--lr=1e-12")
    verifier, model = Verifier(run, 1), gpt(run.args.model, dtype=torch.float64)
    for batch in run.batches():
        loss = loss_sum(model(batch.tokens), batch.targets) / batch.valid
        verifier.compare(batch, loss * (1 + batch.step), loss, named_parameters(model))
    return verifier.worst["loss"]


def test_losses_are_compared_in_every_step(ranks):
    """Beside the largest one, which the text decides, and with it the version of Python."""
    assert ranks(1)(a_late_loss) == [(pytest.approx(2, rel=0.05), "loss in step 3")]


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
    ("--dtype=bfloat16", 1), ("--dtype=bfloat16", 1.3), ("--precision=bf16", 1),
    ("--precision=fp16", 1.1)], 2))  # fmt: skip
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


def effects_of(flags, nudge):
    """How far rounding moves the tensors of two steps; nudge: by how much a weight is off."""
    run = BesideOneGpu(arguments("--optimizer=sgd", *flags))
    again = rounding.Rounding(run, "float32", verify.tensors_of)
    with mock.patch.object(rounding, "NUDGED", 1):
        for batch in list(run.batches())[:2]:
            again.batches.append(batch)
            there = verify.tensors_of(*run.one_gpu_step(batch), run.one_gpu)
        if nudge:
            again.again = [rounding.nudged(run, 0)]
            again.again[0].nudge = nudge
        found = again.effects(there)
    return found, [run.steps_taken for run in again.again]


def test_the_effect_of_rounding_is_that_of_half_a_unit_in_each_weight(ranks):
    [(nothing, steps)] = ranks(1)(effects_of, (), torch.clone)
    assert steps == [2] and set(nothing.values()) == {0.0}
    [(found, _)] = ranks(1)(effects_of, (), None)
    assert all(0 < found[key] < 1e-5 for key in found if key[0] == "gradients")


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
    tiny = 512 * 2**-24  # gradients, of 1024 tokens
    assert 3e-5 < tiny < 1e-4 / 3  # a fault of a ten-thousandth is seen
    for dtype, optimizer, kind, value in (
            ("float64", "adamw", "parameters", 1e-10), ("float32", "sgd", "loss", 1e-5),
            ("float32", "sgd", "parameters", tiny), ("float32", "adamw", "parameters", 1e-3),
            ("bfloat16", "sgd", "parameters", 1 / 8), ("bfloat16", "adamw", "parameters", None)):
        assert verify.tolerances(dtype, optimizer)[kind] == value
    assert verify.tolerances("float32", "adamw", 4096)["gradients"] == 2 * tiny


def test_difference_is_never_silently_zero():
    reference = torch.ones(3, dtype=torch.float64)
    assert verify.difference(torch.tensor([1.0, math.nan, 1.0]), reference, 1) == math.inf
    assert verify.difference(torch.ones(2), reference, 1) == math.inf
    assert verify.difference(torch.tensor([1.0, math.inf, 1.0]), reference, 1) == math.inf
    assert verify.difference(torch.ones(3) * 1.5, reference, torch.tensor(2.0)).item() == 0.25
    assert verify.scales({("gradients", "p"): 0.0}) == {("gradients", "p"): 1.0}


def verdict(rounding, **worst):
    worst = {kind.replace("_", " "): (off, f"{kind} of p") for kind, off in worst.items()}
    return verify.verdict(worst, 2, rounding, verify.tolerances(rounding, "adamw"))


def test_the_verdict_names_what_is_off_and_by_how_much():
    off = {"loss": 1e-11, "gradient_norm": 1e-12, "gradients": 2e-10, "parameters": 0.0}
    (line,), wrong = verdict("float64", **off)
    assert line.startswith("NOT the same as one GPU") and "gradients 2e-10" in line
    assert wrong == {"gradients": "gradients of p is off by 2.0e-10, tolerance 1e-10"}
    (line,), wrong = verdict("float64", **off | {"gradients": 1e-10})
    assert line.startswith("same as one GPU") and line.endswith("✓") and not wrong


def test_a_run_of_which_nothing_was_compared_is_no_match():
    why = "no step was compared with one GPU: all were skipped"
    assert verdict("float16") == ([], {"loss": why})


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
