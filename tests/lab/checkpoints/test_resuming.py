"""From which checkpoint a run goes on, and what is refused: other runs', and strangers' files."""

import builtins
import contextlib
import functools
import io
import json
import math
import os
import pickle
import re
import shutil
import sys
import threading
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import common
from lab.checkpoints import checkpoint, resuming, storage
from tests.conftest import TEXT, chapter, main
from tests.lab.checkpoints.test_saving import QUICK, SMALL, origin, refused, saved, tensors  # noqa: F401  (fixtures)


def forge(folder, change):
    """Change the index, as one who knows how checksums are made."""
    path = folder / storage.INDEX
    index = json.loads(path.read_bytes())["index"]
    changed = change(index)
    index = index if changed is None else changed
    crc32 = zlib.crc32(json.dumps(index).encode())
    path.write_bytes(json.dumps({"index": index, "crc32": crc32}).encode())


# ------------------------------------------------------------------------------- --resume refuses


def test_goes_on_as_if_never_stopped(run_chapter, origin, tmp_path):
    status, out, err = run_chapter(QUICK, *SMALL, "--steps=6", f"--resume={origin / 'saved'}",
                                   f"--save={tmp_path / 'on'}")  # fmt: skip
    assert status == 0 and "goes on after step 4 of 02 data parallel · bucket" in out, out + err
    assert tensors(tmp_path / "on/step-000006") == tensors(origin / "unbroken/step-000006")


def test_what_is_no_checkpoint(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    works = "; without --resume would work"
    for name, why in (("nowhere", "No such file or directory"), ("file", "Not a directory")):
        assert refused(f"--resume={name}") == f"--resume {name} cannot be read: {why}{works}"
    assert refused("--resume=empty") == f"--resume empty holds no checkpoint{works}"
    (tmp_path / "empty/step-000002.old").mkdir()
    (tmp_path / "empty/step-000004").write_text("a file")
    assert refused("--resume=empty") == f"--resume empty holds no checkpoint{works}"
    os.mkfifo(tmp_path / "empty" / storage.INDEX)  # which would let a reader wait
    assert refused("--resume=empty").startswith("--resume empty has no checkpoint.json; ")


@pytest.mark.parametrize(("file", "spoil", "why"), [
    (storage.INDEX, None, "has no checkpoint.json"),
    (storage.INDEX, lambda data: data[:-20], "has no checkpoint.json that can be read"),
    (storage.INDEX, lambda data: b"", "has no checkpoint.json that can be read"),
    (storage.INDEX, lambda data: data.replace(b": ", b":", 1),
     "has changed bytes in checkpoint.json"),
    ("0.bin", None, "has no file 0.bin"),
    ("0.bin", lambda data: data[:-1], "is cut short: bytes of"),
    ("0.bin", lambda data: b"", "is cut short: bytes of"),
])  # fmt: skip
def test_one_that_is_cut_short_and_the_older_one_beside_it(
    refused, run_chapter, monkeypatch, saved, file, spoil, why
):
    path = saved / "step-000004" / file
    path.write_bytes(spoil(path.read_bytes())) if spoil else path.unlink()
    says = refused(f"--resume={saved}")
    assert says.startswith(f"--resume {saved / 'step-000004'} {why}")
    assert says.endswith(f"; --resume {saved / 'step-000002'} would work")
    assert refused(f"--resume={saved / 'step-000004'}") == says  # named itself: the same
    says = refused(f"--resume={saved}", f"--save={saved}")  # nothing is overwritten
    assert says.endswith(f"; --resume {saved / 'step-000002'} --save {saved}-2 would work")
    if spoil is None:
        monkeypatch.undo()
        words = re.search("; (.*) would work", says)[1].split()
        status, out, err = run_chapter(QUICK, *SMALL, "--steps=3", *words)
        assert status == 0 and "goes on after step 2" in out, out + err


def test_no_flipped_byte_is_accepted(origin, saved):
    """Any bits of any byte; each is refused by the reader, in words."""
    folder, random = saved / "step-000004", np.random.default_rng(0)
    for file, number in ((storage.INDEX, 500), ("0.bin", 50)):
        good = (folder / file).read_bytes()
        for at in np.linspace(0, len(good) - 1, number).astype(int):
            bad = bytearray(good)
            bad[at] ^= int(random.integers(1, 256))
            (folder / file).write_bytes(bad)
            with pytest.raises(storage.Unusable):
                storage.read_index(folder)
        (folder / file).write_bytes(good)
    assert storage.read_index(folder)


@pytest.mark.parametrize(("flag", "there", "here"), [
    ("--layers=2", "--layers 1", "--layers 2"),
    ("--dim=32", "--dim 16", "--dim 32"),
    ("--heads=4", "--heads 2", "--heads 4"),
    ("--kv-heads=2", "--kv-heads 1", "--kv-heads 2"),
    ("--vocab=257", "--vocab 256", "--vocab 257"),
    ("--block=llama", "--block gpt", "--block llama"),
    ("--seed=1", "--seed 0", "--seed 1"),
    ("--batch=8", "--batch 4", "--batch 8"),
    ("--ignore=0.5", "--ignore 0.0", "--ignore 0.5"),
    ("--optimizer=sgd", "--optimizer adamw", "--optimizer sgd"),
    ("--optimizer=muon", "--optimizer adamw", "--optimizer muon"),
    ("--dtype=float32", "--dtype float64", "--dtype float32"),
])  # fmt: skip
def test_another_run(refused, origin, flag, there, here):
    folder = origin / "saved"
    assert refused(f"--resume={folder}", flag) == (
        f"--resume {folder / 'step-000004'} is of a run with {there}, and this has {here}; "
        f"{there} would work"
    )


def test_a_model_with_tied_tables_or_experts_or_another_mlp(refused, origin):
    resume = f"--resume={origin / 'saved'}"
    wide = refused(resume, "--ffn=48")
    assert wide.endswith("with no --ffn, and this has --ffn 48; without --ffn would work")
    tied = refused(resume, "--preset=gpt2", "--vocab=256", "--attention=plain")
    assert "with no tied tables, and this has --preset gpt2" in tied
    says = refused(resume, "--experts=8", name="08_expert_parallel")
    assert "with no --experts, and this has --experts 8" in says


def test_one_of_muon(refused, run_chapter, tmp_path):
    """Another optimizer does not go on from it; nor does Muon, where a matrix has other states."""
    muon, folder = "--optimizer=muon", tmp_path / "muon"
    flags = [*SMALL, muon, "--no-verify", "--steps=1"]
    assert run_chapter(QUICK, *flags, f"--save={folder}")[0] == 0
    for other in ("adamw", "momentum"):
        says = refused(f"--resume={folder}", f"--optimizer={other}")
        assert says.endswith(f"with --optimizer muon, and this has --optimizer {other}; "
                             "--optimizer muon would work")
    step, name = folder / "step-000001", "block1.attn.q.weight/momentum_buffer"
    whole = (step / storage.INDEX).read_bytes()
    for change in (lambda tensors: tensors.pop(name),
                   lambda tensors: tensors.update({"block1.attn.q.weight/exp_avg":
                                                   tensors.pop(name)}),
                   lambda tensors: tensors.update({"block1.norm1.weight/momentum_buffer":
                                                   tensors["block1.norm1.weight/exp_avg"]})):
        forge(step, lambda index, change=change: change(index["tensors"]) and None)
        assert "has other tensors than this run: the states of block1." in refused(
            f"--resume={folder}", muon)
        (step / storage.INDEX).write_bytes(whole)


def test_biases_of_experts(refused, run_chapter, tmp_path, monkeypatch):
    balanced = "--balance=bias", f"--save={tmp_path / 'moe'}"
    assert run_chapter("08_expert_parallel", *SMALL, *balanced, "--steps=1")[0] == 0
    says = refused(f"--resume={tmp_path / 'moe'}", name="08_expert_parallel")
    assert says.endswith("with biases; --balance bias would work")
    for flags in (["--experts=4"], ["--top-k=1"], ["--shared-expert"], ["--router=sigmoid"],
                  ["--nodes=2", "--node-limit=1"]):  # fmt: skip
        says = refused(f"--resume={tmp_path / 'moe'}", *flags, name="08_expert_parallel")
        assert flags[0].partition("=")[0] in says


def test_documents_and_windows_stay_as_they_are(refused, run_chapter, tmp_path):
    """A run does not go on with other ones, or without; one without does not begin to pack."""
    six, folder = "06_context_parallel", tmp_path / "packed"
    packed = "--documents=6", "--window=9", f"--save={folder}"
    assert run_chapter(six, *SMALL, *packed, "--steps=1")[0] == 0
    says = refused(f"--resume={folder}", "--documents=6", "--window=8", name=six)
    assert says.endswith("with --window 9, and this has --window 8; --window 9 would work")
    says = refused(f"--resume={folder}", "--window=9", name=six)
    assert says.endswith("with --documents 6, and this has no --documents; --documents 6 would "
                         "work")


def test_a_ramp_stays_as_it_is_until_it_is_over(refused, run_chapter, monkeypatch, tmp_path):
    ramp, folder = ["--batch-ramp", "2", "3"], tmp_path / "ramp"
    flags = [*SMALL, "--steps=3", "--save-every=2", f"--save={folder}"]
    assert run_chapter(QUICK, *flags, *ramp)[0] == 0
    inside = f"--resume={folder / 'step-000002'}"
    there, here = "--batch-ramp 2 3", "no --batch-ramp"
    says = refused(inside)
    assert says.endswith(f"of a run with {there}, and this has {here}; {there} would work")
    says = refused(inside, "--batch-ramp", "2", "9")
    assert says.endswith(f"with {there}, and this has --batch-ramp 2 9; {there} would work")
    over = f"--resume={folder / 'step-000003'}"
    says = refused(over, "--batch-ramp", "2", "9")  # that would be smaller batches again
    assert says.endswith(f"{here}, and this has --batch-ramp 2 9; without --batch-ramp would work")
    monkeypatch.undo()
    status, out, err = run_chapter("03_zero", *SMALL, "--steps=4", over)
    assert status == 0 and "goes on after step 3" in out, out + err


def test_another_length_of_sequences_alone(refused, origin):
    """With other layers, or another text, it is another run as before."""
    resume = f"--resume={origin / 'saved'}"
    says = refused(resume, "--seq=32", "--batch=2", "--layers=2")
    assert says.endswith("--layers 1, and this has --layers 2; --layers 1 would work")


@pytest.mark.parametrize("length", [17, 40, 500, 70_000])
def test_another_text_of_the_same_length(refused, run_chapter, monkeypatch, tmp_path, length):
    for name, kind in (("a.txt", np.uint8), ("b.bin", np.uint16)):
        tokens = (np.arange(length) % 256).astype(kind)
        (tmp_path / name).write_bytes(tokens.tobytes())
        flags = [f"--data={name}", f"--resume={tmp_path / name}.saved"]
        status, _, err = run_chapter(QUICK, *SMALL, flags[0], "--steps=1",
                                     f"--save={tmp_path / name}.saved")  # fmt: skip
        assert status == 0, err
        tokens[length // 3] ^= 1
        (tmp_path / name).write_bytes(tokens.tobytes())
        says = refused(*flags)
        monkeypatch.undo()
        assert re.search(rf"with a text of {length:,} tokens with CRC-32 \w{{8}} \({name}\)", says)
        assert says.endswith("; without --resume would work")


def test_a_long_text_is_read_in_parts():
    tokens = np.zeros(1024 * 2**16 + 12_345, np.uint8)
    text = mock.Mock(tokens=tokens)
    first = resuming.crc32_of_text(text)
    for at in (0, 40_000_000, -1):
        tokens[at] = 1
        assert resuming.crc32_of_text(text) != first
        tokens[at] = 0


def test_a_newer_format(refused, saved):
    forge(saved / "step-000004", lambda index: index | {"format": 2})
    assert refused(f"--resume={saved}") == (
        f"--resume {saved / 'step-000004'} has format 2, and this course reads 1; "
        f"--resume {saved / 'step-000002'} would work"
    )


def test_steps_that_are_done(refused, origin):
    folder = origin / "saved"
    says = refused(f"--resume={folder}", "--steps=4")
    assert says == f"--steps 4 are done in {folder / 'step-000004'}; --steps 8 would work"


def test_a_restarted_run_that_was_done(run_chapter, origin, capsys):
    for rank, says in (0, "step 4 was the last one, and "), (1, ""):
        status, out, err = run_chapter(
            QUICK, *SMALL, "--steps=4", f"--save={origin / 'saved'}",
            f"--resume={origin / 'saved'}", RANK=rank, WORLD_SIZE=2,
            MASTER_ADDR="localhost", MASTER_PORT=1)  # fmt: skip
        assert (status, err) == (0, "") and out.startswith(says) and bool(out) == (rank == 0)


def test_one_of_several_ranks_says_it(run_chapter):
    launched = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    status, out, err = run_chapter(QUICK, *SMALL, "--resume=nowhere", RANK=0, LOCAL_RANK=0,
                                   **launched)  # fmt: skip
    assert (status, err.count("\n")) == (2, 1)
    assert run_chapter(QUICK, *SMALL, "--resume=nowhere", RANK=1, LOCAL_RANK=1,
                       **launched) == (0, "", "")  # fmt: skip


# -------------------------------------------------------------------------------- strangers' files


def first(index):
    """A matrix of the index: embedding.weight."""
    return index["tensors"]["embedding.weight"]


def change(path, value):
    """A change of an index: value at a path of keys in it, or value(what is there)."""

    def forged(index):
        place = index
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value(place[path[-1]]) if callable(value) else value

    return forged


def without(left_out):
    """A forger who leaves out the tensors of these names."""
    return lambda index: index.update(tensors={
        name: tensor for name, tensor in index["tensors"].items() if not left_out(name)})


CHUNK = "tensors", "embedding.weight", "chunks", 0      # offsets, sizes, rank, at, CRC-32
TENSOR = "tensors", "embedding.weight"
HOSTILE = {
    "a list": lambda index: [],
    "a number": lambda index: 5,
    "nothing": lambda index: {"format": 1},
    "old format": change(["format"], 0),
    "format of text": change(["format"], "2"),
    "step of text": change(["step"], "4"),
    "step below 0": change(["step"], -1),
    "step true": change(["step"], True),
    "run is a list": change(["run"], [1]),
    "tensors is a list": change(["tensors"], [[]]),
    "no tensors": change(["tensors"], {}),
    "by of one": change(["by"], ["x"]),
    "by with escapes": change(["by"], ["\x1b[2J\n", "x", 1]),
    "by without ranks": change(["by"], ["x", "y", "z"]),
    "biases": change(["biases"], 3),
    "remembered": change(["remembered"], {"loss_scale": {"scale": "x"}}),
    "remembered, a list": change(["remembered"], [1]),
    "text": change(["text"], None),
    "path up": change([*CHUNK, 2], "../../0"),
    "path from the root": change([*CHUNK, 2], "/etc/passwd\0"),
    "rank below 0": change([*CHUNK, 2], -1),
    "rank true": change([*CHUNK, 2], False),
    "offset below 0": change([*CHUNK, 3], -8),
    "offset far": change([*CHUNK, 3], 2**70),
    "offset a fraction": change([*CHUNK, 3], 0.5),
    "huge sizes": change([*CHUNK, 1], [2**40, 2**40]),
    "huge tensor": change([*TENSOR, "shape"], [2**62, 16]),
    "shape and sizes huge": lambda index: first(index).update(
        shape=[2**50, 16], chunks=[[[0, 0], [2**50, 16], 0, 0, 0]]),
    "sizes below 0": change([*CHUNK, 1], [-256, -16]),
    "sizes of 0": change([*CHUNK, 1], [0, 16]),
    "outside": change([*CHUNK, 0], [1, 0]),
    "one dim": change([*CHUNK, 1], [4096]),
    "no chunk": change([*TENSOR, "chunks"], []),
    "a chunk twice": change([*TENSOR, "chunks"], lambda chunks: chunks * 2),
    "overlapping": lambda index: first(index).update(shape=[512, 16], chunks=[
        first(index)["chunks"][0], [[1, 0], *first(index)["chunks"][0][1:]]]),
    "a hole": change([*TENSOR, "shape"], [512, 16]),
    "dtype": change([*TENSOR, "dtype"], "object"),
    "dtype, a list": change([*TENSOR, "dtype"], ["float64"]),
    "another dtype": change([*TENSOR, "dtype"], "bfloat16"),
    "reshaped": lambda index: first(index).update(shape=[16, 256], chunks=[
        [[0, 0], [16, 256], *first(index)["chunks"][0][2:]]]),
    "one left out": lambda index: index["tensors"].pop("embedding.weight"),
    "no states of one": without(lambda name: name.startswith("embedding.weight/")),
    "no states": without(lambda name: "/" in name),
    "renamed": lambda index: index["tensors"].update(
        {"../../evil\n": index["tensors"].pop("embedding.weight")}),
    "one more": lambda index: index["tensors"].update(more=first(index)),
    "without step count": lambda index: index["tensors"].pop("embedding.weight/step"),
    "another state": lambda index: index["tensors"].update(
        {"embedding.weight/__class__": index["tensors"].pop("embedding.weight/exp_avg")}),
    "state of nothing": lambda index: index["tensors"].update(
        {"nothing/exp_avg": index["tensors"]["embedding.weight/exp_avg"]}),
    "a state of another shape": change(["tensors", "embedding.weight/exp_avg"],
                                       lambda tensor: tensor | {"shape": [4096], "chunks": [
                                           [[0], [4096], *tensor["chunks"][0][2:]]]}),
    "not a number": change(["remembered"], {"loss_scale": {"scale": math.nan}}),
    "infinite": change(["run", "ignore"], math.inf),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_forged_index(refused, saved, what):
    opened, real = [], builtins.open
    folder = saved / "step-000004"
    forge(folder, HOSTILE[what])

    def watched(file, *args, **more):
        if threading.current_thread() is threading.main_thread():  # the stories have others
            opened.append(str(file))
        return real(file, *args, **more)

    with mock.patch.object(builtins, "open", watched), mock.patch.object(io, "open", watched):
        says = refused(f"--resume={saved}")
    assert says.startswith(f"--resume {folder} ") and "would work" in says
    inside = [os.path.realpath(name) for name in opened if not name.isdecimal()]
    ours = str(saved), os.path.realpath(TEXT), sys.prefix, sys.base_prefix  # Python imports
    outside = [name for name in inside if not name.startswith(ours)]
    assert not outside and inside, outside


def on_a_machine_of_its_own(folder, *flags):
    """For a rank of the pool: as if each had a disk, and rank 1's lacked the last checkpoint."""
    with mock.patch.object(storage, "checkpoints_in", lambda path: [
            path / f"step-{6 - 2 * (1 + dist.get_rank()):06}"]):
        output = io.StringIO()
        with contextlib.redirect_stderr(output), pytest.raises(SystemExit) as leaving:
            main(chapter(QUICK), [*SMALL, "--steps=6", f"--resume={folder}", *flags])
    return leaving.value.code, output.getvalue()


def test_ranks_that_find_different_checkpoints(ranks, origin):
    (status, says), other = ranks(2)(on_a_machine_of_its_own, origin / "saved")
    assert status == 2 and other == (0, "") and says.count("\n") == 1
    assert "rank 0 finds step-000004 " in says and "and rank 1 step-000002 " in says


def test_a_checkpoint_may_go_while_it_is_read(origin, tmp_path):
    """Its files are open: another run in that folder, or this one, may have written newer ones."""
    shutil.copytree(origin / "saved/step-000004", tmp_path / "step-000004")
    folder = tmp_path / "step-000004"
    saved = checkpoint.Checkpoint(folder, storage.read_index(folder))
    before = saved.value("embedding.weight", torch.empty(256, 16))
    shutil.rmtree(folder)
    assert torch.equal(saved.value("embedding.weight", torch.empty(256, 16)), before)
    assert before.any()


TOP, BELOW, MIDDLE = ([0, 0], [2, 4]), ([2, 0], [2, 4]), ([1, 0], [2, 4])
LEFT, RIGHT = ([2, 0], [2, 1]), ([2, 1], [2, 3])


@pytest.mark.parametrize(("rectangles", "tiles"), [
    ([([0, 0], [4, 4])], True), ([TOP, BELOW], True), ([RIGHT, TOP, LEFT], True),
    ([TOP], False), ([TOP, MIDDLE], False), ([TOP, TOP], False), ([TOP, LEFT], False),
    ([TOP, BELOW, LEFT], False), ([TOP, ([2, 0], [2, 2]), ([2, 1], [2, 2])], False),
])  # fmt: skip
def test_rectangles_tile_their_tensor(tmp_path, rectangles, tiles):
    data = bytes(range(64))
    (tmp_path / "0.bin").write_bytes(data)
    chunks = [[at, sizes, 0, 0, zlib.crc32(data[: 4 * math.prod(sizes)])]
              for at, sizes in rectangles]  # fmt: skip
    check = functools.partial(storage.check_chunks, tmp_path, "x", [4, 4], torch.float32, chunks)
    if tiles:
        check()
    else:
        with pytest.raises(storage.Unusable, match="overlap or are missing, of x"):
            check()


def bomb(target):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (target,)

    return pickle.dumps(Bomb())


@pytest.mark.parametrize("data", [
    b"[" * 100_000,
    b'{"index": ' * 50_000,
    b'{"index": {"format": ' + b"9" * 5000 + b"}}",
    b"\xff\xfe",
    b"null",
], ids=["lists", "objects", "digits", "bytes", "null"])  # fmt: skip
def test_json_that_wants_to_harm(refused, saved, data):
    (saved / "step-000004" / storage.INDEX).write_bytes(data)
    assert "has no checkpoint.json that can be read" in refused(f"--resume={saved}")


def test_a_key_twice(refused, saved):
    path = saved / "step-000004" / storage.INDEX
    path.write_bytes(path.read_bytes().replace(b'"step": 4', b'"step": 9, "step": 4'))
    assert "has changed bytes in checkpoint.json" in refused(f"--resume={saved}")


def test_no_pickle_is_read(refused, run_chapter, monkeypatch, saved, tmp_path):
    target = tmp_path / "exploded"
    pickle.loads(bomb(target))
    assert target.exists()  # it works
    target.unlink()
    for file in (storage.INDEX, "0.bin", ".metadata", "__0_0.distcp"):
        good = saved / "step-000004" / file
        before = good.read_bytes() if good.exists() else None
        good.write_bytes(bomb(target))
        if before is None:
            continue
        refused(f"--resume={saved}")
        good.write_bytes(before)
    monkeypatch.undo()

    def fails(*args, **more):
        raise AssertionError("a pickle is read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"),
                         (torch, "load"), (pickle, "_Unpickler")):  # fmt: skip
        monkeypatch.setattr(module, name, fails)
    gather = lambda everyones, mine: everyones.__setitem__(0, mine)  # the report's, of one rank
    monkeypatch.setattr(common.dist, "all_gather_object", gather)
    status, out, err = run_chapter(QUICK, *SMALL, "--steps=6", f"--resume={saved}")
    assert status == 0 and "goes on after step 4" in out and not target.exists(), out + err
