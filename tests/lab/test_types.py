"""lab.types: chapters are well typed, a fault is named by line, axis and types, and the rules
agree with numbers. Planted faults are in tests/faults."""

import functools
import json
import zlib
from unittest import mock

import pytest
import spmd_types
import torch
import torch.distributed as dist
from spmd_types import S, rulecheck

from lab import ROOT, chapters, museum, types
from lab.typecheck import plan, run, seen, told
from lab.typecheck.fault import Fault
from tests.conftest import FULL, chapter, sample

SMALL = "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--batch=8", "--micro-batch=2"
ROOMS = plan.rooms()


def check(number, *flags, source=None):
    """The Run of a chapter, or of this source; raises Fault."""
    path = plan.of_chapter(number)
    return run.check(*plan.plan(path, [*SMALL, *flags], source or path.read_text()))


def changed(number, old, new):
    """The source of a chapter with one piece replaced."""
    source = plan.of_chapter(number).read_text()
    assert source.count(old) == 1, old
    return source.replace(old, new)


right = functools.cache(check)  # tests share the run of a chapter as it is

# ---------------------------------------------------------------------------- what is well typed

ONE = "--layers=1"
THREE_AXES = "--ranks=8", "--dp=2", "--cp=2", "--tp=2", ONE
EACH_CHAPTER = [("02", "--clip=1", ONE), ("04", ONE), ("05", ONE), ("06", ONE),
                ("08", "--ranks=4", "--ep=2", "--experts=4", ONE), ("09", *THREE_AXES)]
MORE = [
    ("04", "--variant=overlap", "--kv-heads=1", "--recompute=full", "--clip=1"),
    ("04", "--block=llama", "--precision=bf16"),
    ("05", "--variant=kept", "--kv-heads=1", "--clip=1"),
    ("05", "--variant=ring", "--block=llama"),
    ("06", "--variant=gather", "--documents=6"),
    ("06", "--variant=ring", "--window=3"),
    ("06", "--variant=ulysses", "--attention=sdpa"),
    ("08", "--variant=capacity", "--balance=bias"),
    ("08", "--variant=overlapped", "--micro-batch=1"),
    ("08", "--variant=two-hops", "--nodes=2", "--ranks=4"),
    ("09", "--like=llama3-128k"),
    ("09", "--ranks=8", "--dp=4", "--cp=2", "--ep=4", "--experts=4", "--order=dp,cp,tp,pp",
     "--zero=3"),
    ("09", "--ranks=2", "--pp=2", "--rank=1"),
    ("09", "--ranks=2", "--dp=2", "--zero=3", "--clip=1"),
]  # fmt: skip


@pytest.mark.parametrize("run", sample(EACH_CHAPTER + MORE, len(EACH_CHAPTER)), ids=" ".join)
def test_a_chapter_is_well_typed(run):
    found = right(*run)
    whole = {"R", "I"}
    assert all({*kinds.values()} <= whole for kinds in found.reported.values())
    assert found.reported.keys() == {"loss", "norm"} and len(found.gradients) > 3
    for name, (kind, taken) in found.gradients.items():
        for axis in kind:
            assert (kind[axis] in whole) == (taken[axis] in whole), name
    loss = found.loss_type()
    assert loss is None or {*loss.values()} <= {"P", "I"}


def test_f_and_g_have_the_types_of_the_lesson():
    found = right("04", ONE)
    of = {name: [kinds and kinds["tp"] for kinds in both] for name, both in found.seams.items()}
    assert of["block1.attn"] == of["block1.mlp"] == ["I", "I"]
    assert of["block1.attn.inner"] == of["block1.mlp.inner"] == ["R", "P"]
    assert of["block1.attn.inner.q"] == ["R", "V"] and of["block1.norm1"] == ["I", "I"]
    assert found.gradients["block1.attn.q.weight"] == ({"tp": "V"}, {"tp": "V"})
    assert found.gradients["head.norm.weight"][0] == found.loss_type() == {"tp": "I"}


def test_along_three_axes_each_has_its_own_type():
    found = right("09", *THREE_AXES)
    assert found.seams["0.block1.attn.inner"] == [
        {"dp": "V", "cp": "V", "tp": "R"}, {"dp": "V", "cp": "V", "tp": "P"}]
    assert found.gradients["block1.attn.q.weight"][0] == {"dp": "R", "cp": "R", "tp": "V"}
    assert found.loss_type() == {"dp": "P", "cp": "P", "tp": "P"}


# ----------------------------------------------------------------------------- what is not

SENT, NORM = ("        replica.sends = i == len(micro_batches)\n",
              "    norm = grad_norm(model.parameters(), world)\n")
FINISH = "    sums.finish()\n"
UNTYPED = [
    # autograd adds to a gradient that is whole already
    ("02", "--variant=naive", SENT, SENT + "        i > 1 and replica.finish()\n",
     "is added to one that has been summed already"),
    # gradients of different experts are added up
    ("08", "--ranks=2 --ep=2", NORM, "    dist.all_reduce(model.block1.mlp.up.grad)\n" + NORM,
     "gradients of different parts have been summed"),
    # a collective along no axis of the mesh
    ("05", "--ranks=4 --kv-heads=4", FINISH,
     FINISH + "    dist.all_reduce(total, group=dist.new_subgroups(2)[0])\n",
     "which are no axis of the mesh"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "flags", "old", "new", "says"), sample(UNTYPED))
def test_a_gradient_that_is_summed_wrongly_is_seen(number, flags, old, new, says):
    with pytest.raises(Fault, match=says):
        check(number, *flags.split(), source=changed(number, old, new))


@pytest.mark.full
def test_a_sum_of_messages_is_believed_and_the_table_marks_it():
    """A bug inside a ring isn't seen. If it is one day: lab/types.py, duality.py and functions.py
    shouldn't say any more that it isn't."""
    lost = changed("05", "        dx = ring_sum(dx_of, ctx.group)\n",
                   "        dx = dx_of(ctx.group.rank())\n")
    for found in (check("05", "--variant=ring"), check("05", "--variant=ring", source=lost)):
        rows = {row["name"]: row["by_rule_alone"] for row in told.calls_of(found)}
        assert rows == {"RingColumns": True, "RingRow": True}
        assert sum("RingRow *" in line for line in told.table(found)) == 1


# ----------------------------------------------------------------- the rules and numbers

def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


def noise(like, *key):
    """In place of spmd_types' own, whose operator a CPU may not have: it depends on key alone."""
    seeded = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(like.shape, dtype=like.dtype, generator=seeded)


def held_to_numbers(number, name, args):
    """What rulecheck has checked: {argument: type} for each placement that the rule takes."""
    module, rules = chapter(chapters.name_of(number)), ROOMS[number].RULES
    real_rank, real_get = dist.ProcessGroup.rank, dist.get_rank
    of_each = lambda group: (real_rank(group) if dist.get_rank is real_get  # of the only rank
                             else dist.get_rank(group))                     # of each simulated one
    function = type(name, (getattr(module, name),), {"spmd_typecheck": staticmethod(rules[name])})
    with (mock.patch.object(dist.ProcessGroup, "rank", of_each),
          mock.patch.object(rulecheck, "_seeded_noise", noise)):
        report = rulecheck.rulecheck(function, args, mesh={"tp": 2}, local_tensor_mode=True)
    return [{name: repr(kind["tp"]) for name, kind in placed.items()} for placed in report.checked]


X, ROWS = random(2, 4, 4), random(8, 3)
HELD = [
    ("04", "CopyIn", (X, "tp"), {"x": "I"}),
    ("04", "SumOut", (X, "tp"), {"x": "P"}),
    ("04", "VocabParallelLoss", (random(2, 4, 8), torch.arange(8).view(2, 4), 8, "tp"),
     {"logits": "S(2)", "targets": "R"}),
    ("05", "GatherIn", (X, "tp"), {"x": "S(1)"}),
    ("05", "ScatterOut", (X, "tp"), {"x": "P"}),
    ("06", "GatherKeys", (random(2, 2, 2, 4, 4), "tp"), {"kv": "S(3)"}),
    ("06", "Exchange", (random(2, 4, 4, 3), 1, 2, "tp"), {"x": "S(2)"}),
    ("08", "AddLoss", (ROWS, random()), {"x": "P", "loss": "P"}),
    ("09", "GatherIn", (X, "tp"), {"x": "S(1)"}),
    ("09", "ScatterOut", (X, "tp"), {"x": "P"}),
    ("09", "AddLoss", (ROWS, random()), {"x": "P", "loss": "P"}),
]  # fmt: skip
# These take weights in a tuple, send messages, or compute other blocks on each rank, none of which
# rulecheck can simulate. The chapters' tests compare their numbers.
NOT_HELD = {("04", "CopyInColumns"), ("05", "GatherInColumns"), ("05", "RingColumns"),
            ("05", "RingRow"), ("06", "RingAttention"), ("08", "AllToAll"), ("08", "Depart"),
            ("08", "Arrive"), ("09", "AllToAll")}


@pytest.mark.parametrize(("number", "name", "args", "taken"), sample(HELD, 2))
def test_a_rule_agrees_with_numbers(number, name, args, taken):
    """In forward. Backward has the dual types, and the chapter's own tests compare its numbers."""
    assert taken in held_to_numbers(number, name, args)


def test_each_rule_is_compared_with_numbers():
    rules = {(number, name) for number, room in ROOMS.items() for name in room.RULES}
    held = {(number, name) for number, name, *_ in HELD}
    assert rules - held == NOT_HELD and held <= rules


def test_a_wrong_rule_does_not_pass():
    wrong = mock.patch.dict(ROOMS["05"].RULES, GatherIn=lambda *, x, group: spmd_types.rules.
                            all_gather(x, group, src=S(2), dst=spmd_types.R))  # fmt: skip
    with wrong, pytest.raises(rulecheck.RuleCheckError):
        try:
            held_to_numbers("05", "GatherIn", (random(2, 4, 4), "tp"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


# ------------------------------------------------------------------------------------ the command

FOUR = str(ROOT / "04_tensor_parallel.py")


@pytest.mark.full
def test_a_right_chapter_has_a_table(capsys, tmp_path):
    file = tmp_path / "types.json"
    assert types.main([FOUR, *SMALL, ONE, f"--json={file}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "CopyIn I R P I".split() in rows and "block1.attn.inner R P".split() in rows
    record = json.loads(file.read_text())
    assert record["axes"] == {"tp": 2} and record["fault"] is None
    rows = [(one["in"]["tp"], one["out"]["tp"]) for one in record["functions"]
            if one["name"] == "SumOut"]  # that of the embedding, and those of blocks
    assert rows == [("V", "I"), ("P", "I")]
    assert not any(one["by_rule_alone"] for one in record["functions"])


def test_a_students_file_is_checked_where_it_is(capsys, tmp_path):
    path, file = tmp_path / "04_tensor_parallel.py", tmp_path / "types.json"
    old, new = "return summed(gradient, ctx.group), None\n", "return gradient, None\n"
    path.write_text(changed("04", old, new))
    assert types.main([str(path), *SMALL, ONE, f"--json={file}"]) == 1
    where = f"{path.name}:{path.read_text().partition(new)[0].count(chr(10)) + 1}"
    assert f"✗ {where}: CopyIn.backward" in capsys.readouterr().out
    found = json.loads(file.read_text())["fault"]
    assert (found["where"], found["axis"], found["source"]) == (where, "tp", new.strip())


def refusal(capsys, *argv):
    """The one line of a command that ends with status 2."""
    with pytest.raises(SystemExit) as leaving:
        types.main([*argv])
    [line] = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and line.endswith("would work"), line
    return line


@pytest.mark.parametrize(("source", "where"), sample([
    ("import torch\nnothing\n", ":2 raises NameError"),
    (b"\xff", ""),  # no UTF-8
    ("VARIANTS = {}\nrequires = None\n", ""),
]))
def test_a_file_that_does_not_run_costs_one_line(source, where, capsys, tmp_path):
    path = tmp_path / "04_tensor_parallel.py"
    path.write_bytes(source.encode() if isinstance(source, str) else source)
    assert f"{path.name}{where}" in refusal(capsys, str(path), *SMALL)


def test_without_spmd_types_one_line_names_what_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(types.sys.modules, "spmd_types", None)
    with pytest.raises(SystemExit) as leaving:
        types.main([FOUR])
    [line] = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and "make types" in line


def test_a_bad_argument_costs_one_line_with_a_change(capsys):
    for number, flags, change in sample([
        (None, "", "04_tensor_parallel.py"),
        ("04", "--ranks=3", "--ranks 2"),
        ("04", "--variant=torch", "--variant megatron"),
        ("04", "--steps=3", "without --steps"),
        (None, "--museum --ranks=2", "without --ranks"),
        ("07", "", "04_tensor_parallel.py"),
        (None, "--museum 99", "06"),
    ], 5):
        file = [str(ROOT / f"{chapters.name_of(number)}.py")] if number else []
        assert change in refusal(capsys, *file, *flags.split()), (number, flags)


# ------------------------------------------------------------------------------------- the museum

@pytest.mark.full
def test_the_museum_records_what_types_see(capsys, tmp_path):
    file = tmp_path / "types.json"
    assert types.main(["--museum", "torchtitan#1805", "RL#3788", "picotron#5", "torchtitan#280",
                       f"--json={file}"]) == 0          # the third one is the last stage's
    found = json.loads(file.read_text())
    assert [(one["typed"], bool(one["sentence"])) for one in found] == [
        (True, True), (True, False), (True, True), (False, False)]


RUNS = {(room, one.file, one.ranks, one.flags) for room in ROOMS for one in museum.exhibits()[room]}


@pytest.mark.parametrize("run", sorted(RUNS) if FULL else [], ids=lambda run: f"{run[0]}{run[3]}")
def test_a_chapter_is_well_typed_with_the_flags_of_its_exhibits(run):
    room, file, ranks, flags = run
    assert seen.fault_of(room, file, None, ranks, flags) is None
