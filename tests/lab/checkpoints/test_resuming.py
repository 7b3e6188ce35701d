"""Which checkpoint a run goes on from, and which it refuses."""

import contextlib
import io
import pickle
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lab.checkpoints import checkpoint, resuming, storage
from tests.conftest import chapter, main, sample
from tests.lab.checkpoints.test_saving import QUICK, SMALL, origin, refused, saved  # noqa: F401  (fixtures)


def test_what_is_no_checkpoint(refused, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder/step-000002.old").mkdir(parents=True)
    (tmp_path / "folder/step-000004").write_text("a file")
    for name, why in (("nowhere", "cannot be read: No such file or directory"),
                      ("file", "cannot be read: Not a directory"),
                      ("folder", "holds no checkpoint")):
        line = refused(f"--resume={name}")
        assert line == f"--resume {name} {why}; without --resume would work"


class Bomb:
    """As a pickle, it ends the test when it is read."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


UNREADABLE = "has no checkpoint.json that can be read"
SPOILED = [  # a file, what becomes of its bytes, and why it is refused
    (storage.INDEX, lambda data: data[:-20], UNREADABLE),
    (storage.INDEX, lambda data: pickle.dumps(Bomb()), UNREADABLE),
    (storage.INDEX, lambda data: b"[" * 100_000, UNREADABLE),
    (storage.INDEX, lambda data: data.replace(b'"format": 2', b'"format": 1'), "has format 1"),
    ("0.bin", lambda data: data[:-1], "is cut short")]


def test_a_spoiled_one_is_refused_and_the_older_one_would_work(refused, saved):
    folder = saved / "step-000004"
    for file, spoil, why in SPOILED:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(spoil(data))
        line = refused(f"--resume={saved}")
        assert line.startswith(f"--resume {folder} {why}"), line
        assert line.endswith(f"; --resume {saved / 'step-000002'} would work"), line
        (folder / file).write_bytes(data)
    (folder / "0.bin").unlink()
    assert "cannot be read: 0.bin: No such file" in refused(f"--resume={folder}")


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
        ("--ffn=48", "no --ffn", "--ffn 48"),
        ("--experts=8", "no --experts", "--experts 8", "08_expert_parallel"),
        ("--block=llama", "--block gpt", "--block llama"),
        ("--ignore=0.5", "--ignore 0.0", "--ignore 0.5"),
        ("--preset=gpt2 --vocab=256 --attention=plain", "no tied tables", "--preset gpt2"),
        ("--seq=32 --batch=2 --layers=2", "--layers 1", "--layers 2"),  # more than longer sequences
    ], 5):
        line = refused(f"--resume={folder}", *flags.split(), name=[*name, QUICK][0])
        assert f"with {there}, and this has {here}" in line, line
        works = there if there[:2] == "--" else "without --resume"
        assert line.endswith(f"; {works} would work"), line


@pytest.mark.full
@pytest.mark.parametrize(("name", "saves", "others"), [
    ("08_expert_parallel", "--balance=bias",
     {"": "--balance bias", "--balance=bias --top-k=1": "--top-k",
      "--balance=bias --router=sigmoid": "without --resume",
      "--balance=bias --nodes=2 --node-limit=1": "without --resume"}),
    ("06_context_parallel", "--documents=6 --window=9",
     {"--documents=6 --window=8": "--window 9", "--window=9": "--documents 6"}),
])  # fmt: skip
def test_a_flag_of_one_chapter_stays_as_it_is(refused, run_chapter, tmp_path, name, saves, others):
    """others: {flags: what would work instead}."""
    folder = tmp_path / "saved"
    status, *_ = run_chapter(name, *SMALL, *saves.split(), "--steps=1", f"--save={folder}")
    assert status == 0
    for flags, works in others.items():
        line = refused(f"--resume={folder}", *flags.split(), name=name)
        assert works in line.rpartition("; ")[2], line


@pytest.mark.full
def test_a_ramp_stays_as_it_is_until_it_is_over(refused, run_chapter, tmp_path):
    ramp, folder = ["--batch-ramp", "2", "3"], tmp_path / "ramp"
    flags = [*SMALL, "--steps=3", "--save-every=2", f"--save={folder}"]
    assert run_chapter(QUICK, *flags, *ramp)[0] == 0
    inside, over = (f"--resume={folder / step}" for step in ("step-000002", "step-000003"))
    for other in [], ["--batch-ramp", "2", "9"]:
        assert refused(inside, *other).endswith("; --batch-ramp 2 3 would work")
    line = refused(over, "--batch-ramp", "2", "9")  # that would be smaller batches again
    assert "no --batch-ramp, and this has --batch-ramp 2 9; without --resume" in line


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
    line = refused(*flags)
    assert f"{length:,} tokens" in line and line.endswith("; without --resume would work")


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


def on_a_machine_of_its_own(folder, *flags):
    """For a rank of the pool: as if each had a disk, and rank 1's lacked the last checkpoint."""
    with mock.patch.object(storage, "checkpoints_in", lambda path: [
            path / f"step-{6 - 2 * (1 + dist.get_rank()):06}"]):
        output = io.StringIO()
        with contextlib.redirect_stderr(output), pytest.raises(SystemExit) as leaving:
            main(chapter(QUICK), [*SMALL, "--steps=6", f"--resume={folder}", *flags])
    return leaving.value.code, output.getvalue()


def test_ranks_that_find_different_checkpoints(ranks, origin):
    (status, line), other = ranks(2)(on_a_machine_of_its_own, origin / "saved")
    assert status == 2 and other == (0, "") and line.count("\n") == 1
    assert "rank 0 finds step-000004 " in line and "and rank 1 step-000002 " in line


def test_a_checkpoint_may_go_while_it_is_read(origin, tmp_path):
    """Its files are open: another run in that folder, or this one, may have written newer ones."""
    shutil.copytree(origin / "saved/step-000004", tmp_path / "step-000004")
    folder = tmp_path / "step-000004"
    saved = checkpoint.Checkpoint(folder, storage.read_index(folder))
    before = saved.value("embedding.weight", torch.empty(256, 16))
    shutil.rmtree(folder)
    assert torch.equal(saved.value("embedding.weight", torch.empty(256, 16)), before)
    assert before.any()
