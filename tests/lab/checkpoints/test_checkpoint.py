"""Checkpoints: what a variant of any chapter saves, any other goes on from, as if never stopped."""

import itertools
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import common
from lab.checkpoints import saving
from lab.faults import tensors_of
from lab.run import rectangles
from tests.conftest import TEXT, run_main, sample
from tests.lab.checkpoints.test_saving import status_of

SMALL = ("--layers=4", "--dim=32", "--heads=8", "--kv-heads=2", "--seq=16", "--vocab=131",
         "--batch=8", "--dtype=float64", "--clip=0.5", "--ignore=0.3",
         "--device=cpu", f"--data={TEXT}", "--no-verify")  # fmt: skip
FOUR = ("--micro-batch=2",)  # of them
# Chapter, ranks, and flags of its own. The table's 131 rows are no multiple of any ranks, and four
# that share a layer are more than there are kv heads.
LAYOUTS = {
    "01 hand": ("01_single_gpu", 1, "--variant=hand"),
    "02 bucket": ("02_data_parallel", 2, "--variant=bucket"),
    "02 torch": ("02_data_parallel", 2, "--variant=torch"),
    "03 zero3": ("03_zero", 4, "--variant=zero3"),
    "03 zero1": ("03_zero", 2, "--variant=zero1"),
    "03 offload": ("03_zero", 2, "--variant=zero2", "--offload"),
    "03 hsdp": ("03_zero", 4, "--variant=hsdp", "--shard-size=2"),
    "03 zeropp": ("03_zero", 4, "--variant=zeropp", "--no-quantized-weights",
                  "--shard-size=2"),
    "03 torch": ("03_zero", 2, "--variant=torch", "--stage=3"),
    "04 megatron": ("04_tensor_parallel", 4, "--variant=megatron"),
    "04 overlap": ("04_tensor_parallel", 2, "--variant=overlap"),
    "04 torch": ("04_tensor_parallel", 2, "--variant=torch"),
    "05 megatron": ("05_sequence_parallel", 2, "--variant=megatron"),
    "05 ring": ("05_sequence_parallel", 2, "--variant=ring"),
    "05 torch": ("05_sequence_parallel", 2, "--variant=torch"),
    "06 zigzag": ("06_context_parallel", 2, "--variant=zigzag"),
    "07 1f1b": ("07_pipeline_parallel", 3, *FOUR, "--variant=1f1b"),
    "07 interleaved": ("07_pipeline_parallel", 2, *FOUR, "--variant=interleaved"),
    "07 zb-h2": ("07_pipeline_parallel", 2, *FOUR, "--variant=zb-h2"),
    "07 dualpipe": ("07_pipeline_parallel", 2, *FOUR, "--variant=dualpipe"),
    "07 dualpipe-v": ("07_pipeline_parallel", 2, *FOUR, "--variant=dualpipe-v"),
    "07 torch": ("07_pipeline_parallel", 2, *FOUR, "--variant=torch"),
    "09 3d": ("09_5d", 8, "--pp=2", "--tp=2", "--zero=3", "--micro-batch=2"),
    "09 zero1": ("09_5d", 4, "--dp=2", "--tp=2", "--zero=1"),
    "09 cp": ("09_5d", 4, "--cp=2", "--pp=2", "--zero=2", *FOUR, "--schedule=dualpipe-v"),
    "09 torch": ("09_5d", 4, "--variant=torch", "--dp=2", "--tp=2", "--zero=3"),
    "09 torch pp": ("09_5d", 2, "--variant=torch", "--pp=2", *FOUR),
}  # fmt: skip
MIXTURE = ("--experts=8", "--layers=2")
MIXTURES = {
    "08 dropless": ("08_expert_parallel", 4, *MIXTURE, "--variant=dropless"),
    "08 copies": ("08_expert_parallel", 4, *MIXTURE, "--variant=dropless", "--ep=2"),
    "08 capacity": ("08_expert_parallel", 2, *MIXTURE, "--variant=capacity",
                    "--capacity-factor=100"),
    "08 two hops": ("08_expert_parallel", 2, *MIXTURE, "--variant=two-hops", "--nodes=2"),
    "08 torch": ("08_expert_parallel", 2, *MIXTURE, "--variant=torch"),
    "09 ep": ("09_5d", 8, *MIXTURE, "--dp=4", "--ep=4", "--tp=2", "--zero=1"),
    "09 pp ep": ("09_5d", 4, *MIXTURE, "--dp=2", "--ep=2", "--pp=2", "--zero=3"),
    "09 cp ep": ("09_5d", 4, *MIXTURE, "--dp=2", "--ep=2", "--cp=2", "--zero=3"),
}  # fmt: skip
# Of matrices a momentum, of all else what AdamW has; shards end where they will, or with a matrix.
MUON = {f"muon {layout}": (*LAYOUTS[layout], "--optimizer=muon") for layout in (
    "03 zero3", "09 zero1", "01 hand", "03 offload", "04 megatron", "09 3d")}  # fmt: skip
MUON |= {"muon owner": ("11_muon", 4, "--variant=owner"),
         "muon deal": ("11_muon", 2, "--variant=deal", "--zero=3")}
ROUNDED = {"muon torch": ("11_muon", 1, "--variant=torch")}  # in bf16, so like no other
# Documents are a function of seed and step, so any layout finds those of the step it goes on with.
PACKED = {"06 packed": ("06_context_parallel", 2, "--documents=6", "--cut=document"),
          "09 packed": ("09_5d", 4, "--documents=6", "--cp=2", "--pp=2", "--zero=1", *FOUR),
          "06 levels": ("06_context_parallel", 4, "--documents=6", "--variant=ring",
                        "--inner=2")}  # fmt: skip


def train(ranks, layout, *flags):
    """The run on these ranks ends with status 0."""
    name, world, *own = (LAYOUTS | MIXTURES | MUON | ROUNDED | PACKED)[layout]
    (status, output), *_ = ranks(world)(status_of, name, [*SMALL, *own, *flags])
    assert status == 0, output


def difference(folder, other):
    """The largest, relative to the largest number of each tensor."""
    these, those = tensors_of(folder), tensors_of(other)
    for name in these.keys() ^ those.keys():  # chapter 09 has no biases
        assert name.endswith("mlp.bias") and not (these | those)[name].any()
    return max(
        float((these[name] - those[name]).abs().max() / those[name].abs().max().clamp(min=1e-30))
        for name in these.keys() & those.keys()
    )


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """saved(layout): a folder with its checkpoints after steps 2 and 3, which it makes once."""
    folder = tmp_path_factory.mktemp("saved")

    def save(layout):
        if not (folder / layout).exists():
            ranks = lambda world: lambda *call: pool.call(world, 45, *call)
            train(ranks, layout, "--steps=3", "--save-every=2", f"--save={folder / layout}")
        return folder / layout

    return save


def off_after_going_on(ranks, saved, tmp_path, before, after):
    """Save with one layout, go on with another: how far from the first's unbroken run it ends."""
    resume = f"--resume={saved(before) / 'step-000002'}"
    train(ranks, after, "--steps=3", resume, f"--save={tmp_path}")
    return difference(tmp_path / "step-000003", saved(before) / "step-000003")


def read_by_two():
    """(before, after): each layout's checkpoint is read by two others of its kind, those of
    `make test` first."""
    first = [("03 zero3", "04 overlap"), ("04 torch", "07 interleaved"),
             ("08 two hops", "08 dropless"), ("muon deal", "muon 03 zero3")]
    more = []
    for kind in ([*LAYOUTS], [*MIXTURES], [*MUON], [*PACKED]):
        for i, before in enumerate(kind):
            more += [(before, kind[(i + hop) % len(kind)]) for hop in (1, 5)]
    return first + [pair for pair in more if pair not in first]


@pytest.mark.parametrize(("before", "after"), sample(read_by_two(), 4))
def test_another_layout_goes_on(ranks, saved, tmp_path, before, after):
    assert off_after_going_on(ranks, saved, tmp_path, before, after) < 1e-10


# PyTorch's DDP sums in another order in its first step, in which it learns the order of gradients.
@pytest.mark.parametrize("layout", sample(
    ["03 zero3", "muon deal", "08 two hops", "02 bucket", "07 dualpipe-v", "09 cp", "muon torch",
     "muon owner", "muon 09 zero1"], 2))  # fmt: skip
def test_the_same_bits_in_the_same_layout(ranks, saved, tmp_path, layout):
    assert off_after_going_on(ranks, saved, tmp_path, layout, layout) == 0


# ------------------------------------------------------------------- parts, rectangles and files


def test_rectangles_of_a_range():
    """Those in the picture; and of any range of any shape: few, in order, each number once."""
    assert list(rectangles.rectangles((4, 6), 5, 23)) == [
        ((0, 5), (1, 1)), ((1, 0), (2, 6)), ((3, 0), (1, 5))]  # fmt: skip
    for shape in ((7,), (4, 6), (3, 1), (1, 5), (3, 2, 4)):
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        for start, stop in itertools.combinations(range(numbers.numel() + 1), 2):
            found = list(rectangles.rectangles(shape, start, stop))
            slices = [tuple(slice(at, at + size) for at, size in zip(*one)) for one in found]
            assert torch.cat([numbers[one].flatten() for one in slices]).tolist() == [
                *range(start, stop)]  # fmt: skip
            assert len(found) <= 2 * len(shape) - 1


@pytest.mark.parametrize("layout", sample(["03 zero3", "07 dualpipe-v", "09 cp"]))
def test_every_rank_writes_its_share_once(saved, layout):
    """Nothing is gathered on one rank: the files are about as large, whoever holds how much; and
    together as large as the formula says."""
    folder, world = saved(layout) / "step-000003", LAYOUTS[layout][1]
    sizes = [file.stat().st_size for file in folder.glob("*.bin")]
    assert len(sizes) == world and max(sizes) < 1.5 * sum(sizes) / world
    cfg = common.Config(4, 32, 8, 2, 16, 131)
    assert sum(sizes) == saving.checkpoint_bytes(cfg, "adamw", 8)


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(run_chapter, tmp_path):
    """And as long as it stays; afterwards, the name is on the disk, too."""
    done, fsync, rename, folder = [], os.fsync, Path.rename, tmp_path / "saved"

    def note_sync(file):
        stat = os.fstat(file)
        done.append((stat.st_ino, stat.st_size))
        fsync(file)

    def note_rename(self, target):
        files = [self, *self.iterdir()]
        done.append({(file.stat().st_ino, file.stat().st_size) for file in files})
        return rename(self, target)

    flags = "--layers=1", "--steps=1", f"--save={folder}"
    with mock.patch("os.fsync", note_sync), mock.patch.object(Path, "rename", note_rename):
        assert run_chapter("01_single_gpu", *SMALL, *flags)[0] == 0
    [at] = [i for i, event in enumerate(done) if isinstance(event, set)]
    assert len(done[at]) == 3 and done[at] <= set(done[:at])
    assert folder.stat().st_ino in [inode for inode, _ in done[at + 1 :]]


def test_one_gpu_goes_on_from_the_checkpoint_too(ranks, saved, tmp_path):
    name, world, *own = LAYOUTS["04 overlap"]
    resume = f"--resume={saved('03 zero3') / 'step-000002'}"
    flags = [*SMALL, "--verify", "--steps=4", *own, resume]
    status, run, _ = ranks(world)(run_main, name, flags, tmp_path)[0]
    assert status == 0 and len(run["reference_loss"]) == 2
    assert run["max_grad_diff"] < 1e-12 and run["max_param_diff"] < 1e-12


@pytest.mark.full
def test_longer_sequences_go_on(ranks, saved, tmp_path):
    """And fewer in a batch: as one GPU goes on with them from the same checkpoint."""
    resume = f"--resume={saved('03 zero3') / 'step-000002'}"
    flags = ["--seq=32", "--batch=4", "--steps=4", resume]
    train(ranks, "02 bucket", *flags, f"--save={tmp_path / 'whole'}")
    name, world, *own = LAYOUTS["06 zigzag"]
    flags = [*SMALL, *own, *flags, "--verify", f"--save={tmp_path / 'ring'}"]
    status, record, _ = ranks(world)(run_main, name, flags, tmp_path)[0]
    assert status == 0 and record["max_param_diff"] < 1e-12
    assert difference(tmp_path / "ring/step-000004", tmp_path / "whole/step-000004") < 1e-10


@pytest.mark.full
def test_a_ramp_goes_on_in_its_middle(ranks, tmp_path):
    """With the batches of the run that was never stopped: of 2, 4, 6 and then 8 sequences. When it
    is over, any chapter goes on."""
    ramp = "--batch-ramp", "2", "3"
    train(ranks, "02 bucket", *ramp, "--save-every=2", "--steps=5", "--keep=9",
          f"--save={tmp_path}")  # fmt: skip
    for step, layout, *more in ((2, "02 bucket", *ramp), (4, "05 ring")):
        resume, on = f"--resume={tmp_path / f'step-{step:06}'}", tmp_path / layout
        train(ranks, layout, *more, "--steps=5", resume, f"--save={on}")
        assert difference(on / "step-000005", tmp_path / "step-000005") < 1e-10


@pytest.mark.full
def test_biases_of_experts(ranks, tmp_path):
    """They have no gradient, but move: saved, and moved on, on other ranks."""
    flags = ["--balance=bias", "--bias-speed=0.01"]
    train(ranks, "08 dropless", *flags, "--steps=3", "--save-every=2", f"--save={tmp_path}")
    biases = tensors_of(tmp_path / "step-000002")["block1.mlp.bias"]
    assert len(biases) == 8 and biases.abs().max() > 0.015
    resume = f"--resume={tmp_path / 'step-000002'}"
    train(ranks, "08 two hops", *flags, "--steps=3", resume, f"--save={tmp_path / 'x'}")
    assert difference(tmp_path / "x/step-000003", tmp_path / "step-000003") < 1e-10
