"""Which checkpoint a run goes on from, and what it refuses: other runs', and forged files."""

import builtins
import contextlib
import errno
import io
import json
import math
import os
import pickle
import re
import shutil
import sys
import zlib
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lab.checkpoints import checkpoint, resuming, storage
from tests.conftest import TEXT, chapter, main, sample
from tests.lab.checkpoints.test_saving import QUICK, SMALL, origin, refused, saved  # noqa: F401  (fixtures)


def forge(folder, change):
    """Change the index, as one who knows how checksums are made."""
    path = folder / storage.INDEX
    index = json.loads(path.read_bytes())["index"]
    changed = change(index)
    index = index if changed is None else changed
    crc32 = zlib.crc32(json.dumps(index).encode())
    path.write_bytes(json.dumps({"index": index, "crc32": crc32}).encode())


# ------------------------------------------------------------------------------- --resume refuses


def test_what_is_no_checkpoint(refused, tmp_path):
    (tmp_path / "file").write_text("x")
    empty = tmp_path / "empty"
    (empty / "step-000002.old").mkdir(parents=True)
    (empty / "step-000004").write_text("a file")
    for name, why in (("nowhere", "No such file or directory"), ("file", "Not a directory"),
                      ("empty", "holds no checkpoint")):
        says = refused(f"--resume={name}")
        assert says.startswith(f"--resume {name} ") and f"{why}; without --resume" in says
    os.mkfifo(empty / storage.INDEX)  # which would let a reader wait
    assert "has no checkpoint.json" in refused("--resume=empty")


def test_what_may_not_be_read_is_named(refused, saved):
    closed = PermissionError(errno.EACCES, "Permission denied", saved / "step-000004/0.bin")
    with mock.patch.object(storage, "size_of", side_effect=closed):
        assert "cannot be read: 0.bin: Permission denied" in refused(f"--resume={saved}")


class Bomb:
    """As a pickle, it ends the test when it is read."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


BOMB = pickle.dumps(Bomb())
UNREADABLE = "has no checkpoint.json that can be read"


def test_a_spoiled_one_is_refused_and_the_older_one_would_work(refused, saved):
    folder = saved / "step-000004"
    for file, spoil, why in [
        (storage.INDEX, lambda data: data[:-20], UNREADABLE),
        (storage.INDEX, lambda data: data.replace(b'"step": 4', b'"step": 9, "step": 4'),
         "has changed bytes"),  # a key twice
        ("0.bin", lambda data: data[:-1], "is cut short"),
        # what wants to harm
        (storage.INDEX, lambda data: BOMB, UNREADABLE),
        ("0.bin", lambda data: BOMB, "is cut short"),
        (storage.INDEX, lambda data: b"[" * 100_000, UNREADABLE),
        (storage.INDEX, lambda data: b'{"index": {"format": ' + b"9" * 5000 + b"}}", UNREADABLE),
        (storage.INDEX, lambda data: b"\xff\xfe", UNREADABLE),
    ]:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(spoil(data))
        says = refused(f"--resume={saved}")
        assert says.startswith(f"--resume {folder} {why}"), says
        assert says.endswith(f"; --resume {saved / 'step-000002'} would work"), says
        assert refused(f"--resume={folder}") == says
        (folder / file).write_bytes(data)


def test_what_would_work_does(refused, run_chapter, monkeypatch, saved):
    (saved / "step-000004/0.bin").unlink()
    says = refused(f"--resume={saved}", f"--save={saved}")  # nothing is overwritten
    assert "has no file 0.bin" in says
    words = re.search("; (.*) would work", says)[1].split()
    assert words == ["--resume", f"{saved / 'step-000002'}", "--save", f"{saved}-2"]
    monkeypatch.undo()
    status, out, err = run_chapter(QUICK, *SMALL, "--steps=3", *words)
    assert status == 0, out + err


def test_no_flipped_byte_is_accepted(saved):
    """Any bits of any byte; the reader refuses each, in words."""
    folder, random = saved / "step-000004", np.random.default_rng(0)
    for file, number in ((storage.INDEX, 80), ("0.bin", 20)):
        good = (folder / file).read_bytes()
        for at in np.linspace(0, len(good) - 1, number).astype(int):
            bad = bytearray(good)
            bad[at] ^= int(random.integers(1, 256))
            (folder / file).write_bytes(bad)
            with pytest.raises(storage.Unusable):
                storage.read_index(folder)
        (folder / file).write_bytes(good)
    assert storage.read_index(folder)


def test_another_run_is_refused_by_its_flag(refused, origin):
    """Of QUICK, or of the chapter at the end."""
    folder = origin / "saved"
    for flags, there, here, *name in sample([
        ("--dim=32", "--dim 16", "--dim 32"),
        ("--optimizer=muon", "--optimizer adamw", "--optimizer muon"),
        ("--ignore=0.5", "--ignore 0.0", "--ignore 0.5"),
        ("--ffn=48", "no --ffn", "--ffn 48"),
        ("--experts=8", "no --experts", "--experts 8", "08_expert_parallel"),
        ("--block=llama", "--block gpt", "--block llama"),
        ("--preset=gpt2 --vocab=256 --attention=plain", "no tied tables", "--preset gpt2"),
        ("--seq=32 --batch=2 --layers=2", "--layers 1", "--layers 2"),  # more than longer sequences
    ], 5):
        says = refused(f"--resume={folder}", *flags.split(), name=[*name, QUICK][0])
        assert f"with {there}, and this has {here}" in says, says
        works = there if there[:2] == "--" else "without --"
        assert f"; {works}" in says or "tied" in there, says


@pytest.mark.full
def test_one_of_muon(refused, run_chapter, tmp_path):
    """Another optimizer does not go on from it; nor does Muon, where a matrix has other states."""
    muon, folder = "--optimizer=muon", tmp_path / "muon"
    assert run_chapter(QUICK, *SMALL, muon, "--steps=1", f"--save={folder}")[0] == 0
    for other in ("adamw", "momentum"):
        says = refused(f"--resume={folder}", f"--optimizer={other}")
        assert says.endswith("; --optimizer muon would work")
    forge(folder / "step-000001",
          without(lambda name: name == "block1.attn.q.weight/momentum_buffer"))
    assert "the states of block1." in refused(f"--resume={folder}", muon)


@pytest.mark.full
@pytest.mark.parametrize(("name", "saves", "others"), [
    ("08_expert_parallel", "--balance=bias",
     {"": "--balance bias", "--balance=bias --top-k=1": "--top-k",
      "--balance=bias --router=sigmoid": "--router",
      "--balance=bias --nodes=2 --node-limit=1": "--nodes"}),
    ("06_context_parallel", "--documents=6 --window=9",
     {"--documents=6 --window=8": "--window 9", "--window=9": "--documents 6"}),
])  # fmt: skip
def test_a_flag_of_one_chapter_stays_as_it_is(refused, run_chapter, tmp_path, name, saves, others):
    """others: {flags: what would work instead}."""
    folder = tmp_path / "saved"
    status, *_ = run_chapter(name, *SMALL, *saves.split(), "--steps=1", f"--save={folder}")
    assert status == 0
    for flags, works in others.items():
        says = refused(f"--resume={folder}", *flags.split(), name=name)
        assert works in says.rpartition("; ")[2], says


@pytest.mark.full
def test_a_ramp_stays_as_it_is_until_it_is_over(refused, run_chapter, tmp_path):
    ramp, folder = ["--batch-ramp", "2", "3"], tmp_path / "ramp"
    flags = [*SMALL, "--steps=3", "--save-every=2", f"--save={folder}"]
    assert run_chapter(QUICK, *flags, *ramp)[0] == 0
    inside, over = (f"--resume={folder / step}" for step in ("step-000002", "step-000003"))
    for other in [], ["--batch-ramp", "2", "9"]:
        assert refused(inside, *other).endswith("; --batch-ramp 2 3 would work")
    says = refused(over, "--batch-ramp", "2", "9")  # that would be smaller batches again
    assert says.endswith("; without --batch-ramp would work")


@pytest.mark.parametrize(("length", "name", "kind"), sample([
    (70_000, "b.bin", np.uint16), (17, "a.txt", np.uint8)]))
def test_another_text_of_the_same_length(refused, run_chapter, tmp_path, length, name, kind):
    tokens, file = (np.arange(length) % 256).astype(kind), tmp_path / name
    file.write_bytes(tokens.tobytes())
    flags = [f"--data={name}", f"--resume={file}.saved"]
    status, _, err = run_chapter(QUICK, *SMALL, flags[0], "--steps=1", f"--save={file}.saved")
    assert status == 0, err
    tokens[length // 3] ^= 1
    file.write_bytes(tokens.tobytes())
    says = refused(*flags)
    assert f"{length:,} tokens" in says and says.endswith("; without --resume would work")


def test_a_long_text_is_read_in_parts():
    tokens = np.zeros(1024 * 2**16 + 12_345, np.uint8)
    text = mock.Mock(tokens=tokens)
    first = resuming.crc32_of_text(text)
    for at in (0, 40_000_000, -1):
        tokens[at] = 1
        assert resuming.crc32_of_text(text) != first
        tokens[at] = 0


def test_a_run_that_was_done(refused, run_chapter, origin):
    """To go on with it is refused; to start it again, as a cluster does, ends with status 0."""
    folder = origin / "saved"
    assert refused(f"--resume={folder}", "--steps=4").endswith("; --steps 8 would work")
    status, out, err = run_chapter(QUICK, *SMALL, "--steps=4", f"--save={folder}",
                                   f"--resume={folder}")  # fmt: skip
    assert (status, err) == (0, "") and "step 4 was the last one" in out


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
    "newer format": change(["format"], 2),
    "by with escapes": change(["by"], ["\x1b[2J\n", "x", 1]),
    "path up": change([*CHUNK, 2], "../../0"),
    "offset far": change([*CHUNK, 3], 2**70),
    "shape and sizes huge": lambda index: first(index).update(
        shape=[2**50, 16], chunks=[[[0, 0], [2**50, 16], 0, 0, 0]]),
    "outside": change([*CHUNK, 0], [1, 0]),
    "overlapping": lambda index: first(index).update(shape=[512, 16], chunks=[
        first(index)["chunks"][0], [[1, 0], *first(index)["chunks"][0][1:]]]),
    "another dtype": change([*TENSOR, "dtype"], "bfloat16"),
    "one left out": lambda index: index["tensors"].pop("embedding.weight"),
    "another state": lambda index: index["tensors"].update(
        {"embedding.weight/__class__": index["tensors"].pop("embedding.weight/exp_avg")}),
    "a state of another shape": change(["tensors", "embedding.weight/exp_avg"],
                                       lambda tensor: tensor | {"shape": [4096], "chunks": [
                                           [[0], [4096], *tensor["chunks"][0][2:]]]}),
    "infinite": change(["run", "ignore"], math.inf),
    "a list": lambda index: [],
    "step below 0": change(["step"], -1),
    "run is a list": change(["run"], [1]),
    "by of one": change(["by"], ["x"]),
    "biases": change(["biases"], 3),
    "remembered": change(["remembered"], {"loss_scale": {"scale": "x"}}),
    "text": change(["text"], None),
    "sizes below 0": change([*CHUNK, 1], [-256, -16]),
    "no chunk": change([*TENSOR, "chunks"], []),
    "a chunk twice": change([*TENSOR, "chunks"], lambda chunks: chunks * 2),
    "dtype, a list": change([*TENSOR, "dtype"], ["float64"]),
    "no states": without(lambda name: "/" in name),
    "one more": lambda index: index["tensors"].update(more=first(index)),
    "state of nothing": lambda index: index["tensors"].update(
        {"nothing/exp_avg": index["tensors"]["embedding.weight/exp_avg"]}),
    "no tensors": change(["tensors"], {}),
    "one dim": change([*CHUNK, 1], [4096]),
}  # fmt: skip


@pytest.mark.parametrize("what", sample(HOSTILE, 12))
def test_a_forged_index(refused, saved, what):
    """It is refused, and no file elsewhere is opened."""
    opened, real = [], builtins.open
    folder = saved / "step-000004"
    forge(folder, HOSTILE[what])

    def watched(file, *args, **more):
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
