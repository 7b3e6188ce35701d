"""When a run saves, which checkpoints stay, and what happens when one cannot be written."""

import contextlib
import functools
import io
import json
import shutil
from unittest import mock

import pytest

import common
from lab.checkpoints import saving, storage
from tests.conftest import TEXT, chapter, main, sample

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
    for more in flags, ["--steps=6", f"--save={folder / 'unbroken'}"]:
        [(status, output)] = pool.call(1, 45, status_of, QUICK, more)
        assert status == 0, output
    return folder


@pytest.fixture
def saved(origin, tmp_path):
    """A copy, to spoil."""
    return shutil.copytree(origin / "saved", tmp_path / "saved",
                           ignore=shutil.ignore_patterns(saving.LOG))


@pytest.fixture
def refused(run_chapter, monkeypatch):
    """refused(*flags): the one line of a run that ends with status 2 before ranks would meet."""

    def run(*flags, name=QUICK):
        monkeypatch.setattr(common.dist, "init_process_group", None)
        status, out, err = run_chapter(name, *SMALL, "--steps=6", *flags)
        assert (status, out) == (2, ""), out + err
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert err.removesuffix("\n").isprintable() and len(err) < 600, err
        return err.removeprefix("error: ").rstrip()

    return run


def tensors(folder):
    """{name: rectangles and their checksums}, the same of one layout if every bit is the same.
    Who wrote them, and where in a file, is left out: it depends on the order of the states."""
    saved = storage.read_index(folder)["tensors"]
    return {name: sorted([*where, crc32] for *where, _, _, crc32 in tensor["chunks"])
            for name, tensor in saved.items()}


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


@pytest.mark.parametrize(("flags", "steps"), sample([
    (["--steps=5", "--save-every=2"], [4, 5]),
    (["--steps=3"], [3]),
    (["--steps=5", "--save-every=2", "--keep=9"], [2, 4, 5]),
], 2))  # fmt: skip
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
    log = [json.loads(line) for line in (tmp_path / "saved/log.jsonl").open()]
    assert [line["step"] for line in log] == list(range(1, steps[-1] + 1))


def test_nothing_is_overwritten(refused, saved, tmp_path):
    line = f"--save {saved} holds step-000004 already, and nothing is overwritten"
    line += f"; --save {saved}-2 would work"
    assert refused(f"--save={saved}") == line
    assert refused(f"--save={saved}", f"--resume={saved / 'step-000002'}") == line
    other = tmp_path / "other"  # nor does another run's checkpoint go
    other.mkdir()
    (saved / "step-000002").rename(other / "step-000002")
    assert f"--save {other} holds step-000002" in refused(f"--save={other}", f"--resume={saved}")


SYNCED = storage.synced


def synced_to_a_full_disk(step, path, data=None):
    if f"step-{step:06}" in str(path) and common.environment("RANK", 0) == 1:
        raise OSError(28, "No space left on device", str(path))
    SYNCED(path, data)


@pytest.mark.parametrize(("full", "times"), sample([(2, 2), (4, 1)]))
def test_a_disk_that_is_full_on_one_rank(ranks, tmp_path, full, times):
    """A line at once and one in the verdict; the last step has the verdict only."""
    flags = "--steps=4", "--save-every=1", "--keep=9", f"--save={tmp_path}"
    synced = functools.partial(synced_to_a_full_disk, full)
    (status, out), _ = ranks(2)(status_of, QUICK, flags, [("lab.checkpoints.storage.synced",
                                                           synced)])
    problems = [line for line in out.splitlines() if "✗" in line]
    assert status == 1 and len(problems) == times, out
    assert all(f"step {full} " in line and "rank 1: [Errno 28]" in line for line in problems)
    written = [f"step-{step:06}" for step in range(1, 5) if step != full]
    assert [name for name in names(tmp_path) if name[0] != "."] == ["log.jsonl", *written]
    assert all(storage.read_index(path) for path in storage.checkpoints_in(tmp_path))


def test_a_folder_that_has_gone(run_chapter, tmp_path, monkeypatch):
    def gone():
        (tmp_path / "saved").rename(tmp_path / "elsewhere")
        (tmp_path / "saved").write_text("")

    monkeypatch.setattr(*at(1, [0], gone))
    status, out, err = run_chapter(QUICK, *SMALL, "--steps=3", "--save=saved")
    assert status == 1 and not err
    for file in ("✗ saved/log.jsonl", "✗ the checkpoint of step 3"):
        assert f"{file} is not written" in out


# ------------------------------------------------------------------------- numbers that a run keeps

KEPT = {
    "fp16": ("01_single_gpu", "--precision=fp16", "--dtype=float32", "--loss-scale=524288"),
    "bf16 zero": ("03_zero", "--precision=bf16", "--dtype=float32"),
    "momentum": (QUICK, "--optimizer=momentum"),
    "fp16 torch": ("01_single_gpu", "--precision=fp16", "--dtype=float32", "--variant=torch",
                   "--loss-scale=524288"),
    "bfloat16": (QUICK, "--dtype=bfloat16"),
    "sgd": (QUICK, "--optimizer=sgd"),
    "bf16 offload": ("03_zero", "--precision=bf16", "--dtype=float32", "--variant=zero2",
                     "--offload"),
    "tied zero": ("03_zero", "--preset=gpt2", "--vocab=256", "--variant=zero2"),
}  # fmt: skip


@pytest.mark.parametrize("what", sample(KEPT, 2))
def test_losses_are_those_of_the_unbroken_run(run_chapter, tmp_path, what):
    name, *flags = KEPT[what]
    json_file = f"--json={tmp_path / 'run.json'}"
    keeps = "--save-every=3", "--keep=9", "--save=saved"
    resumes = "--resume=saved/step-000003", "--save=on"
    found = []
    for more in keeps, resumes:
        status, out, err = run_chapter(name, *SMALL, *flags, "--steps=8", json_file, *more)
        assert status == 0, out + err
        found.append(json.loads((tmp_path / "run.json").read_text())["loss"])
    assert found[1] == found[0][3:]
    last = tmp_path / "saved/step-000008", tmp_path / "on/step-000008"
    assert tensors(last[0]) == tensors(last[1])
    kept = [storage.read_index(folder)["remembered"] for folder in last]
    assert kept[0] == kept[1] and bool(kept[0].get("loss_scale")) == ("fp16" in what)
    if "fp16" in what:
        assert kept[0]["loss_scale"]["scale"] < 2**19  # it has moved
