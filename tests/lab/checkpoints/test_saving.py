"""The edges of saving and going on: what is refused, what survives, and how a run ends early."""

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
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import common
from lab.bench import meeting
from lab.checkpoints import checkpoint, resuming, saving, storage
from tests.conftest import CHAPTERS, TEXT, chapter, main
from tests.support import programs

SMALL = ("--layers=1", "--dim=16", "--heads=2", "--kv-heads=1", "--seq=16", "--batch=4",
         "--dtype=float64", "--device=cpu", "--no-verify", f"--data={TEXT}")  # fmt: skip
QUICK = "02_data_parallel"  # whose report is short


def status_of(name, flags, patches=()):
    """For a rank of the pool: a run's status and its output. patches: for mock.patch."""
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch(*patch))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        try:
            status = main(chapter(name), [*SMALL, *map(str, flags)])
        except SystemExit as leaving:
            status = leaving.code
    return status, output.getvalue()


@pytest.fixture(scope="module")
def origin(pool, tmp_path_factory):
    """Checkpoints after steps 2 and 4, and the run on to step 6 in another folder beside it."""
    folder = tmp_path_factory.mktemp("origin")
    flags = ["--steps=4", "--save-every=2", f"--save={folder / 'saved'}"]
    [(status, output)] = pool.call(1, 45, status_of, QUICK, flags)
    assert status == 0, output
    [(status, output)] = pool.call(1, 45, status_of, QUICK,
                                   ["--steps=6", f"--save={folder / 'unbroken'}"])
    assert status == 0, output
    return folder


@pytest.fixture
def saved(origin, tmp_path):
    """A copy, to spoil. (Its files are links to the originals until they are written anew.)"""
    for step in ("step-000002", "step-000004"):
        folder = tmp_path / "saved" / step
        folder.mkdir(parents=True)
        for file in (origin / "saved" / step).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    return tmp_path / "saved"


@pytest.fixture
def refused(run_chapter, monkeypatch):
    """refused(*flags): the one line of a run that ends with status 2 before ranks would meet."""

    def run(*flags, name=QUICK):
        monkeypatch.setattr(common.dist, "init_process_group", None)
        status, out, err = run_chapter(name, *SMALL, "--steps=6", *flags)
        assert (status, out) == (2, ""), out + err
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert err.removesuffix("\n").isprintable(), err
        assert len(err) < 600
        return err.removeprefix("error: ").rstrip()

    return run


def tensors(folder):
    """{name: rectangles and their checksums}, the same of one layout if every bit is the same.
    Who wrote them, and where in a file, is left out: it depends on the order of the states."""
    saved = storage.read_index(folder)["tensors"]
    return {name: [tensor["dtype"], tensor["shape"],
                   sorted([*where, crc32] for *where, _, _, crc32 in tensor["chunks"])]
            for name, tensor in saved.items()}  # fmt: skip


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
    ("--seq=8", "--seq 16", "--seq 8"),
    ("--vocab=257", "--vocab 256", "--vocab 257"),
    ("--seed=1", "--seed 0", "--seed 1"),
    ("--batch=8", "--batch 4", "--batch 8"),
    ("--ignore=0.5", "--ignore 0.0", "--ignore 0.5"),
    ("--optimizer=sgd", "--optimizer adamw", "--optimizer sgd"),
    ("--dtype=float32", "--dtype float64", "--dtype float32"),
])  # fmt: skip
def test_another_run(refused, origin, flag, there, here):
    folder = origin / "saved"
    assert refused(f"--resume={folder}", flag) == (
        f"--resume {folder / 'step-000004'} is of a run with {there}, and this has {here}; "
        f"{there} would work"
    )


def test_a_model_with_tied_tables_or_experts(refused, origin):
    resume = f"--resume={origin / 'saved'}"
    tied = refused(resume, "--preset=gpt2", "--vocab=256", "--attention=plain")
    assert "with no tied tables, and this has --preset gpt2" in tied
    says = refused(resume, "--experts=8", name="08_expert_parallel")
    assert "with no --experts, and this has --experts 8" in says


def test_biases_of_experts(refused, run_chapter, tmp_path, monkeypatch):
    balanced = "--balance=bias", f"--save={tmp_path / 'moe'}"
    assert run_chapter("08_expert_parallel", *SMALL, *balanced, "--steps=1")[0] == 0
    says = refused(f"--resume={tmp_path / 'moe'}", name="08_expert_parallel")
    assert says.endswith("with biases; --balance bias would work")
    for flag in ("--experts=4", "--top-k=1", "--shared-expert"):
        says = refused(f"--resume={tmp_path / 'moe'}", flag, name="08_expert_parallel")
        assert flag.partition("=")[0] in says


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


# ----------------------------------------------------------------------------------------- --save

class At:
    """In place of Text.batch: the same, but at a step (from 0) something happens on some ranks."""

    batch = common.Text.batch

    def __init__(self, step, ranks, what):
        self.step, self.ranks, self.what = step, ranks, what

    def __get__(self, text, owner):
        return functools.partial(self, text)

    def __call__(self, text, step):
        if step == self.step and common.environment("RANK", 0) in self.ranks:
            self.what()
        return At.batch(text, step)


def at(*args):
    return "common.Text.batch", At(*args)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("flags", "steps"), [
    (["--steps=3"], [3]),
    (["--steps=3", "--save-every=9"], [3]),
    (["--steps=4", "--save-every=2"], [2, 4]),
    (["--steps=5", "--save-every=2"], [4, 5]),
    (["--steps=5", "--save-every=1", "--keep=1"], [5]),
    (["--steps=5", "--save-every=2", "--keep=9"], [2, 4, 5]),
])  # fmt: skip
def test_which_stay(run_chapter, tmp_path, flags, steps):
    others = "notes.txt", "step-000001.old", "step-1", ".mine"
    left = ".step-000002", ".step-000077"  # by a run that was killed while it wrote or deleted
    for name in others + left:
        (tmp_path / "saved" / name).mkdir(parents=True)
        (tmp_path / "saved" / name / "0.bin").write_text("x")
    status, out, err = run_chapter(QUICK, *SMALL, *flags, "--save=saved")
    assert status == 0, out + err
    assert names(tmp_path / "saved") == sorted(
        [*others, "log.jsonl", *(f"step-{step:06}" for step in steps)]
    )
    every = int(dict(flag.split("=") for flag in flags).get("--save-every", 99))
    number = len({*range(every, int(flags[0][8:]) + 1, every), int(flags[0][8:])})
    assert f"{number} checkpoint{'s' * (number > 1)} in saved: training stood still for" in out
    log = [json.loads(line) for line in (tmp_path / "saved/log.jsonl").open()]
    assert [line["step"] for line in log] == list(range(1, int(flags[0][8:]) + 1))


def test_goes_on_in_the_same_folder(run_chapter, saved, origin):
    flags = f"--save={saved}", f"--resume={saved}", "--steps=6", "--save-every=1"
    status, out, err = run_chapter(QUICK, *SMALL, *flags)
    assert status == 0, out + err
    assert names(saved) == ["log.jsonl", "step-000005", "step-000006"]
    assert tensors(saved / "step-000006") == tensors(origin / "unbroken/step-000006")


def test_nothing_is_overwritten(refused, saved, tmp_path):
    works = f"--resume {saved} would work"
    holds = f"--save {saved} holds step-000004 already, and nothing is overwritten; {works}"
    assert refused(f"--save={saved}") == holds
    assert refused(f"--save={saved}", f"--resume={saved / 'step-000002'}") == holds
    (tmp_path / "other").mkdir()
    (saved / "step-000002").rename(tmp_path / "other/step-000002")
    other = tmp_path / "other"
    says = refused(f"--save={other}", f"--resume={saved}")  # nor does another run's go
    assert says.startswith(f"--save {other} holds step-000002 already, and nothing is overwritten")


def test_where_nothing_can_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "nowhere").symlink_to("not there")
    for path in ("/proc/here", "file", "file/below", "nowhere", "x" * 300, ""):
        says = refused(f"--save={path}")
        assert says.startswith(f"--save: cannot write '{path}'"), says
        assert says.endswith("; --save runs/checkpoints would work")
    assert refused("--resume=").startswith("--resume: '' is no folder; without --resume would")
    assert refused("--save=a.json", "--json=a.json").startswith("--save a.json is the file of --js")


@pytest.mark.parametrize("flag", ["--save-every=3", "--keep=3"])
def test_flags_that_mean_nothing_without_it(refused, flag):
    name = flag.split("=")[0]
    works = "--save runs/checkpoints would work"
    assert refused(flag) == f"{name} 3 means nothing without --save; {works}"


SYNCED = storage.synced


def synced_to_a_full_disk(step, path, data=None):
    if f"step-{step:06}" in str(path) and common.environment("RANK", 0) == 1:
        raise OSError(28, "No space left on device", str(path))
    SYNCED(path, data)


@pytest.mark.parametrize(("full", "times"), [(2, 2), (4, 1)])
def test_a_disk_that_is_full_on_one_rank(ranks, tmp_path, full, times):
    """It is said at once and in the verdict; at the end of training, that is the same."""
    flags = "--steps=4", "--save-every=1", "--keep=9", f"--save={tmp_path}"
    synced = functools.partial(synced_to_a_full_disk, full)
    (status, out), _ = ranks(2)(status_of, QUICK, flags, [("lab.checkpoints.storage.synced",
                                                           synced)])
    why = f"rank 1: [Errno 28] No space left on device: '{tmp_path}/.step-00000{full}/1.bin'"
    assert status == 1 and out.count(f"✗ the checkpoint of step {full} is not written: {why}") == \
        out.count("✗") == times, out  # fmt: skip
    written = [f"step-{step:06}" for step in range(1, 5) if step != full]
    assert names(tmp_path) == ["log.jsonl", *written]
    assert all(storage.read_index(path) for path in storage.checkpoints_in(tmp_path))


def test_what_others_write_stays(tmp_path):
    """Another run, or a rank that has not said yet that it has failed."""
    failed, unfinished = saving.CheckpointException("", {}), tmp_path / ".step-000004"
    for error, is_ours, stays in ((failed, False, True), (RuntimeError(), True, True),
                                  (failed, True, False)):  # fmt: skip
        with contextlib.suppress(type(error)), storage.Writer(tmp_path / "step-000004", {}, 1) as w:
            w.prepare_global_plan([])
            w.made_it = is_ours
            raise error
        assert unfinished.exists() == stays


def test_a_folder_that_has_gone(run_chapter, tmp_path, monkeypatch):
    written, write = threading.Event(), saving.Saver.write  # in the background

    def write_and_say_so(*call):
        write(*call)
        written.set()

    def gone():
        assert written.wait(60)
        (tmp_path / "saved").rename(tmp_path / "elsewhere")
        (tmp_path / "saved").write_text("")

    monkeypatch.setattr(saving.Saver, "write", write_and_say_so)
    monkeypatch.setattr(*at(3, [0], gone))
    flags = "--steps=5", "--save-every=2", "--save=saved"
    status, out, err = run_chapter(QUICK, *SMALL, *flags)
    assert status == 1 and not err and "✗ saved/log.jsonl is not written: Not a directory" in out
    assert "✗ the checkpoint of step 4 is not written: rank 0: [Errno " in out
    assert storage.read_index(tmp_path / "elsewhere/step-000002")


# ---------------------------------------------------------------------------------- how a run ends

def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def handlers():
    other = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(other)
    return signal.getsignal(signal.SIGTERM), other


@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_sigterm_saves_and_ends(ranks, tmp_path, who):
    flags = "--steps=9", f"--save={tmp_path}"
    (status, out), (other, silent) = ranks(2)(status_of, QUICK, flags, [at(2, who, sigterm)])
    assert (status, other, silent) == (0, 0, "")
    step = int(re.search(r"  SIGTERM: saved after step (\d+); --resume \S+ goes on\n$", out)[1])
    assert step in (3, 4) and names(tmp_path) == ["log.jsonl", f"step-{step:06}"]
    (status, out), _ = ranks(2)(status_of, QUICK, [*flags, f"--resume={tmp_path}"])
    assert status == 0 and f"goes on after step {step} of" in out
    unbroken = "--steps=9", f"--save={tmp_path / 'unbroken'}"
    assert ranks(2)(status_of, QUICK, unbroken)[0][0] == 0
    last = "step-000009"
    assert tensors(tmp_path / last) == tensors(tmp_path / "unbroken" / last)


def test_sigterm_of_a_run_without_ranks(run_chapter, tmp_path, monkeypatch):
    before = handlers()
    monkeypatch.setattr(*at(1, [0], sigterm))
    status, out, err = run_chapter(QUICK, *SMALL, "--steps=50", "--save=saved")
    assert status == 0 and "  SIGTERM: saved after step " in out, out + err
    assert handlers() == before


def test_sigterm_in_the_end_ends_nothing(run_chapter, monkeypatch, tmp_path):
    before, report = handlers(), saving.Saver.report
    monkeypatch.setattr(saving.Saver, "report", lambda self: (sigterm(), report(self)))
    monkeypatch.setattr(*at(2, [0], sigterm))
    flags = "--steps=3", "--save=saved", "--json=run.json"
    status, out, err = run_chapter(QUICK, *SMALL, *flags)
    assert status == 0 and "1 checkpoint in saved" in out and "SIGTERM" not in out, out + err
    assert names(tmp_path / "saved") == ["log.jsonl", "step-000003"]
    assert len(json.loads((tmp_path / "run.json").read_text())["loss"]) == 3
    assert handlers() == before


def test_handlers_are_put_back_when_a_run_fails(run_chapter, monkeypatch):
    def fail():
        raise ZeroDivisionError

    before, seen = handlers(), []
    monkeypatch.setattr(*at(1, [0], fail))
    with pytest.raises(ZeroDivisionError):
        run_chapter(QUICK, *SMALL, "--save=saved")
    assert handlers() == before
    monkeypatch.setattr(*at(1, [0], lambda: seen.append(handlers())))
    assert run_chapter(QUICK, *SMALL, "--steps=2")[0] == 0  # without --save: as ever
    assert run_chapter(QUICK, *SMALL, "--steps=2", "--save=other")[0] == 0
    assert seen[0] == before and seen[1] != before


class NotFinite:
    """In place of F.cross_entropy: the same, but not finite in one call, on some ranks."""

    right = staticmethod(torch.nn.functional.cross_entropy)

    def __init__(self, call, ranks, value):
        self.calls, self.call, self.ranks, self.value = 0, call, ranks, value

    def __call__(self, *args, **more):
        self.calls += 1
        wrong = self.calls == self.call and common.environment("RANK", 0) in self.ranks
        return NotFinite.right(*args, **more) * (self.value if wrong else 1)


@pytest.mark.parametrize(("name", "ranks_", "value"), [
    (QUICK, [1], math.nan), (QUICK, [0], math.inf), ("07_pipeline_parallel", [1], math.nan),
    ("03_zero", [0], math.nan),
])  # fmt: skip
def test_what_is_not_finite_ends_the_run_in_that_step(ranks, tmp_path, name, ranks_, value):
    flags = ["--layers=2", "--micro-batch=2", "--steps=6", f"--json={tmp_path / 'run.json'}"]
    flags += ["--save-every=1", f"--save={tmp_path / 'saved'}", f"--plot={tmp_path / 'run.png'}"]
    call = 3 if name == QUICK or name == "03_zero" else 5  # two micro-batches a step, or one
    wrong = [("torch.nn.functional.cross_entropy", NotFinite(call, ranks_, value))]
    (status, out), (other, _) = ranks(2)(status_of, name, flags, wrong)
    assert (status, other) == (1, 0), out
    step = int(re.search(r"✗ step (\d), rank 0: loss (nan|inf), gradient norm nan", out)[1])
    assert step == 3 and names(tmp_path / "saved") == ["log.jsonl", "step-000001", "step-000002"]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["loss"][-1] is None and len(record["loss"]) == step
    assert "run.png is not written: ValueError: the run has stopped before it was measured" in out
    assert out.count("✗") == 2


def whose_gradients(bad):
    from lab.bench import report
    from lab.cli import strict
    from tests.conftest import arguments

    run = report.Run(arguments("--no-verify", parse=strict.parse))
    p = torch.nn.Parameter(torch.zeros(2))
    run.optimizers.append(torch.optim.SGD([p], 1))
    p.grad = torch.tensor([1.0, math.inf if run.rank in bad else 1.0])
    nan = torch.tensor(math.nan)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for batch in run.batches():
            run.seconds.append(0.5)
            try:
                run.log(batch, nan, nan, torch.nn.Module())
            except SystemExit:
                return output.getvalue()


@pytest.mark.parametrize(("bad", "named"), [([2], 2), ([1, 2], 1), ([], 0), ([0, 1, 2], 0)])
def test_the_rank_whose_gradients_are_not_finite_is_named(ranks, bad, named):
    out, *_ = ranks(3)(whose_gradients, bad)
    assert f"✗ step 1, rank {named}: loss nan, gradient norm nan\n" in out


# ------------------------------------------------------------------------------------------- hangs

LONG = (*SMALL, "--layers=2", "--micro-batch=2", "--steps=100000", "--timeout=5")
TORCHRUN = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"


def hang(folder, name, rank):
    """A rank that hangs until the other one has ended, which waits for 5 s; not so before, since
    on a busy machine any rank may be late. Returns all that they leave."""
    ended, other = folder / "ended", 1 - rank
    patches = {rank: [at(2, [rank], functools.partial(until_there, ended))],
               other: [at(2, [other], functools.partial(meeting.set_timeout, 5))]}
    flags = *SMALL, "--kv-heads=2", "--steps=4", "--timeout=90"
    ranks = programs.Ranks(CHAPTERS / f"{name}.py", *flags, world=2, cwd=folder, patches=patches)
    ranks.processes[other].join(100)
    ended.touch()
    return ranks.wait(), ranks.out() + ranks.err(), ranks.err(other)


def until_there(path):
    while not path.exists():
        time.sleep(0.1)


def hang_or_sync(path, data=None):
    if "step-000001" in str(path):
        time.sleep(9)
    SYNCED(path, data)


def hang_while_saving(folder):
    """The second rank does, in its thread."""
    ranks = programs.Ranks(
        CHAPTERS / f"{QUICK}.py", *SMALL, "--steps=4", "--timeout=5", "--save-every=1",
        "--save=saved", world=2, cwd=folder, patches={1: [("lab.checkpoints.storage.synced",
                                                           hang_or_sync)]})
    statuses, said = ranks.wait(), ranks.out() + ranks.err()
    return statuses, said, storage.checkpoints_in(folder / "saved")


def strike(folder, name, number, rank, **more):
    """Send a signal to a rank after its fifth step. Returns what the other one says, its status,
    and after how many seconds it ends."""
    ranks = programs.Ranks(CHAPTERS / f"{name}.py", *LONG, world=2, cwd=folder, **more)
    try:
        ranks.until("     5 ")
        ranks.send(number, rank)
        start, other = time.monotonic(), ranks.processes[1 - rank]
        other.join(60)
        return ranks.err(), other.exitcode, time.monotonic() - start
    finally:
        ranks.stop()


def without_torchrun(folder, number, rank):
    """Rank 0 keeps the store."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return strike(folder, QUICK, number, rank, meet_at=port)


def sigterm_to_torchrun(folder):
    """In a session of its own, and a reader's environment."""
    flags = *SMALL, "--steps=100000", f"--save={folder}"
    process = subprocess.Popen(
        [*TORCHRUN, f"{QUICK}.py", *flags], cwd=CHAPTERS, start_new_session=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = []
    while "     5 " not in "".join(lines[-1:]):
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines) + process.stderr.read()
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=60)


SECOND = """
import threading
from lab.bench.meeting import Sigterm
Sigterm.SAME = 0.5
Sigterm()
print("waits", flush=True)
lock = threading.Lock()
lock.acquire()
while True:  # as in a collective, from which no signal calls back
    try:
        lock.acquire()
    except KeyboardInterrupt:
        pass
"""


def second_sigterm(folder):
    """Returns the status after two at once, of which torchrun has passed on one; and at the end."""
    (folder / "second.py").write_text(SECOND)
    ranks = programs.Ranks("second.py", cwd=folder)
    try:
        ranks.until("waits")
        ranks.send(signal.SIGTERM, 0)
        ranks.send(signal.SIGTERM, 0)
        before = ranks.wait(1)
        ranks.send(signal.SIGTERM, 0)
        return before, ranks.wait(5)
    finally:
        ranks.stop()


STORIES = {
    "a replica hangs": (hang, QUICK, 0),
    "a part of a layer hangs": (hang, "04_tensor_parallel", 1),
    "hangs while it saves": (hang_while_saving,),
    "a stage is stopped": (strike, "07_pipeline_parallel", signal.SIGSTOP, 0),
    "rank 0 is stopped": (without_torchrun, signal.SIGSTOP, 0),
    "rank 1 is killed": (without_torchrun, signal.SIGKILL, 1),
    "rank 0 is killed": (without_torchrun, signal.SIGKILL, 0),
    "torchrun is told to end": (sigterm_to_torchrun,),
    "told to end twice": (second_sigterm,),
}


@pytest.fixture(scope="module", autouse=True)
def stories(request, tmp_path_factory):
    """{name: a Future}: most of what these take is time in which ranks wait for others, so they
    begin with the first test of this file, and go on beside the next ones."""
    told = [item for item in request.session.items if item.path == Path(__file__)]
    told = {item.callspec.params.get("story") for item in told if hasattr(item, "callspec")}
    programs.folder()                                       # before several threads ask for it
    with ThreadPoolExecutor(4) as threads:
        yield {name: threads.submit(story, tmp_path_factory.mktemp("story"), *args)
               for name, (story, *args) in STORIES.items() if name in told}


@pytest.mark.parametrize(("story", "rank"), [("a replica hangs", 0),
                                             ("a part of a layer hangs", 1)])
def test_a_rank_that_hangs_is_named(stories, story, rank):
    statuses, said, others = stories[story].result()
    assert statuses == [1, 1], said
    assert said.count("error: ") == 1 and "Traceback" not in said, said
    assert others == f"error: step 3: rank {rank} did not answer within 5 s\n"


@pytest.mark.parametrize("story", ["hangs while it saves"])
def test_a_rank_that_hangs_while_it_saves_is_named(stories, story):
    statuses, said, checkpoints = stories[story].result()
    assert statuses[0] == 1 and re.search(
        r"^error: step [23]: rank 1 did not answer within 5 s$", said, re.M), said
    assert "Traceback" not in said and not checkpoints


@pytest.mark.parametrize(("story", "says"), [
    pytest.param("a stage is stopped", "rank 0 did not answer within 5 s",  # others wait for its
                 marks=pytest.mark.full),                                   # messages
    ("rank 0 is stopped", "rank 0 did not answer within 5 s"),
    ("rank 1 is killed", "rank 1 has ended"),
    pytest.param("rank 0 is killed", "rank 0 has ended", marks=pytest.mark.full),  # and the store
])
def test_a_rank_that_is_stopped_or_killed_is_named(stories, story, says):
    said, status, seconds = stories[story].result()
    assert re.search(rf"^error: step \d+: {says}$", said, re.M), said
    assert status == 1 and seconds < 15 and "Traceback" not in said and "gloo" not in said, said


@pytest.mark.parametrize("story", ["torchrun is told to end"])
def test_torchrun_passes_sigterm_on(stories, story):
    out, err = stories[story].result()
    step, folder = re.search(r"SIGTERM: saved after step (\d+); --resume (\S+)", out).groups()
    assert storage.read_index(Path(folder, f"step-{int(step):06}"))
    assert f"{QUICK}.py" not in err, err


@pytest.mark.parametrize("story", ["told to end twice"])
def test_a_second_sigterm_ends_at_once(stories, story):
    assert stories[story].result() == ([None], [128 + signal.SIGTERM])


def test_the_timeout_is_put_back(run_chapter):
    before, c10d = meeting.USUAL, meeting.c10d
    assert run_chapter(QUICK, *SMALL, "--timeout=2", "--steps=1")[0] == 0
    assert (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout) == before


# ------------------------------------------------------------------------- numbers that a run keeps

KEPT = {
    "fp16": ("01_single_gpu", "--precision=fp16", "--dtype=float32", "--loss-scale=524288"),
    "fp16 torch": ("01_single_gpu", "--precision=fp16", "--dtype=float32", "--variant=torch",
                   "--loss-scale=524288"),
    "bf16": ("01_single_gpu", "--precision=bf16", "--dtype=float32"),
    "bf16 zero": ("03_zero", "--precision=bf16", "--dtype=float32"),
    "bfloat16": (QUICK, "--dtype=bfloat16"),
    "momentum": (QUICK, "--optimizer=momentum"),
    "sgd": (QUICK, "--optimizer=sgd", "--clip=0.5"),
    "tied": (QUICK, "--preset=gpt2", "--vocab=256"),
    "tied zero": ("03_zero", "--preset=gpt2", "--vocab=256", "--variant=zero2"),
}  # fmt: skip


@pytest.mark.parametrize("what", KEPT)
def test_losses_are_those_of_the_unbroken_run(run_chapter, tmp_path, what):
    name, *flags = KEPT[what]
    json_file = f"--json={tmp_path / 'run.json'}"
    losses = lambda: json.loads((tmp_path / "run.json").read_text())["loss"]
    keeps = "--save-every=3", "--keep=9", "--save=saved"
    status, out, err = run_chapter(name, *SMALL, *flags, "--steps=8", json_file, *keeps)
    assert status == 0, out + err
    unbroken = losses()
    resume = "--resume=saved/step-000003", "--save=on"
    status, out, err = run_chapter(name, *SMALL, *flags, "--steps=8", json_file, *resume)
    assert status == 0, out + err
    assert losses() == unbroken[3:]
    last = tmp_path / "saved/step-000008", tmp_path / "on/step-000008"
    assert tensors(last[0]) == tensors(last[1])
    kept = [storage.read_index(folder)["remembered"] for folder in last]
    assert kept[0] == kept[1] and bool(kept[0].get("loss_scale")) == ("fp16" in what)
    if "fp16" in what:
        assert kept[0]["loss_scale"]["scale"] < 2**19  # it has moved


@pytest.mark.parametrize(("before", "after"), [("hand", "torch"), ("torch", "hand")])
def test_a_loss_scale_goes_on_in_the_other_variant(run_chapter, tmp_path, before, after):
    flags = "--precision=fp16", "--dtype=float32", "--loss-scale=524288"
    keeps = "--save-every=6", "--keep=9", f"--save={before}"
    scale = lambda folder: storage.read_index(tmp_path / folder)["remembered"]["loss_scale"]
    assert run_chapter("01_single_gpu", *SMALL, *flags, f"--variant={before}", "--steps=8",
                       *keeps)[0] == 0  # fmt: skip
    status, out, err = run_chapter("01_single_gpu", *SMALL, *flags, f"--variant={after}",
                                   "--steps=8", f"--save={after}",
                                   f"--resume={before}/step-000006")  # fmt: skip
    assert status == 0, out + err
    there, here = scale(f"{before}/step-000008"), scale(f"{after}/step-000008")
    assert {key: there[key] for key in ("scale", "_growth_tracker")} == {
        key: here[key] for key in ("scale", "_growth_tracker")}  # fmt: skip
    assert there["_growth_tracker"] > 2 and there["scale"] < 2**19
