"""A run on the house alone: what it measures, says and writes, and its verdict."""

import contextlib
import io
import json
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

import common
from common import gpt, loss_sum
from lab.run import anatomy, formulas, report, strict, verify
from lab.run.words import quantity
from tests.conftest import SMALL, TEXT, arguments, run_main, sample

# ------------------------------------------------------------------------- a run on the house alone


def train(flags, folder, plant=None):
    """A small data-parallel run without a chapter; `plant` breaks it. Returns its status, its JSON
    and its output."""
    world, output = dist.get_world_size(), io.StringIO()
    flags = [*flags, f"--json={folder}/run.json"]
    with contextlib.redirect_stdout(output):

        def expected(args, rank, ranks, model):
            if plant == "hole":
                raise NotImplementedError("02.6: wire_bytes")
            too_many = 1 if plant == "formula" and rank == 1 else 0
            size = sum(p.nbytes for p in model.parameters())
            wire = 2 * (world - 1) / world * size
            return {"parameters": args.model.parameters() + too_many,
                    "sent": {"all_reduce": (anatomy.tensors(args.model), size, wire)}}

        run = report.Run(arguments(*flags, parse=strict.parse, shares=world), expected)
        model = run.draw(gpt(run.args.model, seed=None))
        optimizer = run.optimizer(model.parameters())
        for batch in run.batches(share=run.rank):
            with run.measure():
                if batch.step < min(report.METERED_STEP, run.args.steps - 1):
                    dist.all_reduce(torch.ones(1000))  # what only the first steps send
                loss, norm = train_step(run, model, optimizer, batch, plant)
            dist.all_reduce(loss)
            held = [(name, p) for name, p in verify.named_parameters(model) if "mlp" not in name]
            run.log(batch, loss, norm, model, held if plant == "missing" else None)
        status = run.finish()
    record = json.loads(run.args.json.read_text()) if run.rank == 0 else None
    return status, record, output.getvalue()


def train_step(run, model, optimizer, batch, plant):
    optimizer.zero_grad()
    loss = torch.zeros((), dtype=run.dtype)
    for tokens, targets in batch.micro_batches:
        part = loss_sum(model(tokens), targets) / batch.valid
        part.backward()
        loss += part.detach()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    norm = common.grad_norm(model.parameters())
    if run.args.clip:
        clip_grads_with_norm_(model.parameters(), run.args.clip, norm)
    optimizer.step()
    if plant == "parameter" and run.rank == run.world - 1:
        model.block2.mlp.up.weight.data[3, 3] += 1e-3
    return loss, norm


FLOAT64 = ("--dtype=float64", "--ignore=0.5")


@pytest.mark.parametrize(("world", "flags"), sample([
    (3, ("--clip=0.1",)),
    (1, ()),
]))
def test_a_correct_run_is_the_same_as_one_gpu(ranks, tmp_path, world, flags):
    flags = (*FLOAT64, f"--batch={4 * world}", "--micro-batch=2", *flags)
    (status, run, output), *others = ranks(world)(train, flags, tmp_path)
    assert status == 0 and [s for s, _, _ in others] == [0] * (world - 1), output
    assert 0 < max(run["max_loss_diff"], run["max_grad_diff"], run["max_param_diff"]) < 1e-12
    assert "✗" not in output
    assert [out for _, _, out in others] == [""] * (world - 1)  # rank 0 prints, and only rank 0
    if "--clip=0.1" in flags:
        assert min(run["grad_norm"]) > 0.1  # the clipping was at work


@pytest.mark.parametrize(("plant", "named"), sample([
    ("parameter", "parameters block2.mlp.up.weight in step"),
    ("missing", r"gradients block1.mlp.up.weight in step 1 .* inf"),
    ("formula", "rank 1: parameters: "),
], 2))
def test_a_planted_fault_is_caught_and_named(ranks, tmp_path, plant, named):
    """Wrong losses, gradients, norms and traffic are in tests/faults."""
    (status, run, output), (other, _, _) = ranks(2)(train, FLOAT64, tmp_path, plant)
    assert status == 1 and other == 0
    assert re.search(f"✗ {named}", output), output
    failed = [check["name"] for check in run["checks"] if check["ok"] is False]
    states = [f"rank 1: {what}" for what in ("parameters", "gradients", "optimizer states")]
    assert failed == (states if plant == "formula" else [])


def test_formulas_that_are_not_written_are_a_problem_and_the_rest_is_compared(ranks, tmp_path):
    (status, run, output), _ = ranks(2)(train, FLOAT64, tmp_path, "hole")
    assert status == 1 and re.search("✗ .*02.6: wire_bytes", output)
    assert 0 < run["max_grad_diff"] < 1e-12


def test_json_has_every_field_of_the_contract(ranks, tmp_path):
    (_, run, output), _ = ranks(2)(train, ("--steps=4", "--dtype=float64", "--seed=3"), tmp_path)
    for key in ("loss", "grad_norm", "step_seconds", "reference_loss", "reference_grad_norm"):
        assert len(run[key]) == 4 and all(x > 0 for x in run[key])
    expected = {"chapter": "00_test", "variant": "test", "world_size": 2, "backend": "gloo",
                "device": "cpu", "dtype": "float64"}
    assert expected.items() <= run.items() and run["seconds"] > sum(run["step_seconds"])
    config = {"layers": 2, "vocab": 256, "tie": False, "batch": 8, "micro_batch": 4, "seed": 3}
    assert config.items() <= run["config"].items()
    assert set(run["comm"]["all_reduce"]) == {"calls", "bytes", "wire_bytes"}
    assert all({"name", "measured", "expected", "ok"} <= set(check) for check in run["checks"])
    [first] = [line.split() for line in output.splitlines() if line.startswith("     1 ")]
    assert first[1:3] == [f"{run[key][0]:.4f}" for key in ("loss", "reference_loss")]


# ------------------------------------------------------------------- what is measured and explained


def bare(*flags):
    """A run of one rank that has taken no step."""
    return report.Run(arguments(*flags, parse=strict.parse))


def a_run_that_sent(total, formula):
    run = bare("--no-verify")
    run.comm.total = {op: {"calls": calls, "bytes": payload, "wire_bytes": wire}
                      for op, (calls, payload, wire) in total.items()}
    formulas.hold_traffic(run, {"sent": formula})
    formulas.note_beside(run, "ring", formula or {})
    return {check["name"]: check["ok"] for check in run.checks}, run.notes[-1].strip()


def test_traffic_is_checked_both_ways(ranks):
    whats = "calls", "payload", "on the wire"
    seen = {"all_reduce": (2, 100, 99.9), "broadcast": (1, 8, 8)}
    traffic = ranks(1)
    [(checks, note)] = traffic(
        a_run_that_sent, seen, {"all_reduce": (2, 100, 100.1), "send": (None, 4, 300)})
    assert checks == dict([(f"all_reduce, {what}", True) for what in whats]
                          + [(f"broadcast, {what}", False) for what in whats]  # no formula has it
                          + [("send, calls", None)]
                          + [(f"send, {what}", False) for what in whats[1:]])  # it was not sent
    assert all(words in note for words in ("108 B", "400 B", "27%"))
    [(checks, _)] = traffic(a_run_that_sent, seen, None)  # without a formula
    assert len(checks) == 6 and set(checks.values()) == {None}
    assert traffic(a_run_that_sent, {}, {})[0][0] == {}


def a_step_on_axes(off=None, stray=False):
    """Four ranks as a mesh, dp=2 by tp=2. Each sends all_reduces of 24 bytes: two on dp,
    one on tp, and one on all ranks. off: the axis, operator and amount whose formula is wrong by
    one. stray: rank 1's pair sends on a group that no axis has, too."""
    args = arguments("--no-verify", "--steps=1", f"--batch={dist.get_world_size()}",
                     parse=strict.parse)
    args.node_size = 2
    x, calls = torch.ones(6), {"dp": 2, "tp": 1, "world": 1}

    def expected(args, rank, ranks, model):
        wire = {axis: 2 * (group[axis].size() - 1) / group[axis].size() * 24 for axis in group}
        sent = {axis: {"all_reduce": [n, 24 * n, wire[axis] * n]} for axis, n in calls.items()}
        sent["cp"] = {}                                 # of a rank alone: it is not reported
        if off:
            axis, op, amount = off
            sent[axis].setdefault(op, [0, 0, 0])[amount] += 1
        return {"sent": sent}

    run = report.Run(args, expected)
    mesh = run.mesh(dp=2, tp=2)
    group = {axis: mesh[axis].get_group() for axis in ("dp", "tp")} | {"world": dist.group.WORLD}
    pairs = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for batch in run.batches():
            with run.measure():
                for axis, number in calls.items():
                    for _ in range(number if group[axis].size() > 1 else 0):
                        dist.all_reduce(x.clone(), group=group[axis])
                if stray and run.rank in (1, 2):
                    dist.all_reduce(x.clone(), group=pairs[1])
            run.log(batch, torch.ones(()), torch.ones(()), run.model)
        status = run.finish()
    recorded = json.loads(json.dumps(run.recorded))
    checks = [check for check in run.checks if "all_" in check["name"] or "other" in check["name"]]
    return status, checks, recorded, output.getvalue()


def test_what_is_sent_on_each_axis_is_checked(ranks):
    (status, checks, recorded, _), (_, _, others, _), *_ = ranks(4)(a_step_on_axes)
    assert status == 0 and len(recorded["timeline"]["collectives"]) == 4
    assert [(check["name"], check["measured"]) for check in checks] == [
        (f"{axis}: all_reduce, {amount}", measured)
        for axis, of in {"dp": (2, 48, 48), "tp": (1, 24, 24), "world": (1, 24, 36)}.items()
        for amount, measured in zip(formulas.AMOUNTS, of)]
    axes = {"dp": {"groups": [[0, 2], [1, 3]], "wire_bytes": 48, "total": 192, "leaves": True},
            "tp": {"groups": [[0, 1], [2, 3]], "wire_bytes": 24, "total": 96, "leaves": False},
            "world": {"groups": [[0, 1, 2, 3]], "wire_bytes": 36, "total": 144, "leaves": True}}
    assert recorded["axes"] == others["axes"] == axes


@pytest.mark.parametrize(("off", "named"), sample([
    (("dp", "all_reduce", 2), "dp: all_reduce, on the wire"),
    (("world", "all_gather", 1), "world: all_gather, payload"),  # it was not sent
]))
def test_a_wrong_formula_of_an_axis_is_named(ranks, off, named):
    (status, checks, _, output), *_ = ranks(4)(a_step_on_axes, off)
    failed = [check["name"] for check in checks if check["ok"] is False]
    assert status == 1 and failed == [named] + [f"rank {rank}: {named}" for rank in (1, 2, 3)]
    assert f"✗ {named}: " in output


def test_what_is_sent_on_no_axis_fails(ranks):
    (status, checks, *_), *_ = ranks(4)(a_step_on_axes, None, True)
    failed = [check for check in checks if check["ok"] is False]
    assert status == 1 and [check["name"] for check in failed] == [
        "rank 1: on other groups", "rank 2: on other groups"]
    assert {(check["measured"], check["expected"]) for check in failed} == {(24, 0)}


def an_unknown_key(answer):
    run = report.Run(arguments("--no-verify", "--steps=1", parse=strict.parse), lambda *_: answer)
    with contextlib.redirect_stdout(io.StringIO()):
        for batch in run.batches():
            with run.measure():
                pass
            run.log(batch, torch.ones(()), torch.ones(()), run.model)
        with pytest.raises(ValueError, match="'insides'"):
            run.finish()


def test_a_slip_of_the_pen_leaves_no_check_out(ranks):
    for answer in ({"insides": 1}, {"kept": {"insides": 1}}):
        ranks(1)(an_unknown_key, answer)


@pytest.mark.parametrize(("name", "flags"), sample([
    ("02_data_parallel", "--variant=torch --steps=2"),  # in which DDP makes its buckets anew
    ("03_zero", "--variant=zeropp --no-quantized-weights --steps=1"),
]))
def test_a_run_passes_whatever_step_is_metered(ranks, tmp_path, name, flags):
    """Of zeropp on one rank, even where nothing is on the wire that could be divided by."""
    flags = (*SMALL, f"--data={TEXT}", *flags.split())
    for world in (1, 2):
        (status, _, output), *_ = ranks(world)(run_main, name, flags, tmp_path)
        assert status == 0, output


def what_a_step_keeps_and_computes(on_cuda, attention, share=1.0, more=0):
    """share: of what is kept, that its formula gives; more: FLOPs that theirs gives too many."""

    def expected(args, rank, ranks, model):
        return {"kept": {}, "flops": {"all": run.flops.all + more}}

    args = arguments("--no-verify", "--batch=2", "--steps=1", f"--attention={attention}",
                     parse=strict.parse)
    run = report.Run(args, expected)
    model = run.draw(gpt(args.model, seed=None))
    exact = anatomy.activation_bytes
    with (mock.patch.object(anatomy, "activation_bytes", lambda *all: share * exact(*all)),
          contextlib.redirect_stdout(io.StringIO())):
        for batch in run.batches():
            with run.measure():
                loss = loss_sum(model(batch.tokens), batch.targets)
                loss.backward()
            run.log(batch, loss.detach(), torch.ones(()), model)
        with mock.patch.object(report.Run, "on_cuda", on_cuda):
            formulas.hold(run)
    ok = {check["name"]: check["ok"] for check in run.checks}
    return ok["activations of a micro-batch"], ok["FLOPs of a step"], run.kept.most, run.notes


def test_activations_and_flops_are_the_formulas_but_on_cuda(ranks):
    """There plain attention keeps within 10% of it, and fused attention is not judged."""
    step = lambda *args: ranks(1)(what_a_step_keeps_and_computes, *args)[0]
    right, flops, kept, _ = step(False, "sdpa")
    assert right and flops and kept > 1000
    assert step(False, "plain", 1.09, 1)[:2] == (False, False)
    for share, ok in ((0.92, True), (1.12, False)):
        right, _, kept, notes = step(True, "plain", share)
        assert right is ok and any(quantity(abs(kept - share * kept)) in note for note in notes)
    assert step(True, "sdpa", 1.12)[:2] == (None, None)


def notes_of_speed(seconds, gpu, on_cuda):
    run = bare("--no-verify")
    run.seconds = seconds
    with (mock.patch.object(report.Run, "on_cuda", on_cuda),
          mock.patch.object(torch.cuda, "get_device_name", lambda device: gpu)):
        formulas.note_speed(run, {"mfu": 989e12, "hfu": 2 * 989e12})
    return run.notes


def test_speed_leaves_the_first_steps_out_and_knows_some_gpus(ranks):
    notes = lambda *args: [note.strip() for note in ranks(1)(notes_of_speed, *args)[0]]
    seconds = [99.0] * formulas.WATCHED_STEPS + [4.0, 2.0, 9.0]
    speed, shares = notes(seconds, "NVIDIA H200", True)
    assert speed == f"{8 * 16 / 4:,.0f} tokens/s"
    assert re.search("MFU 25.0%.* HFU 50.0%.* 989 TFLOP/s", shares)
    assert "NVIDIA T4" in notes(seconds, "NVIDIA T4", True)[1]
    assert notes(seconds, "no GPU", False) == [speed]
    assert notes(seconds[:3], "NVIDIA H200", True) == []
