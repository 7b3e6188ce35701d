"""Checkpoints: what a variant of any chapter saves, any other goes on from, as if never stopped."""


import pytest
import torch
from conftest import TEXT, chapter, main

from lab import checkpoint, storage

SMALL = ("--layers=4", "--dim=32", "--heads=8", "--kv-heads=2", "--seq=16", "--vocab=131",
         "--batch=8", "--dtype=float64", "--clip=0.5", "--ignore=0.3",
         "--device=cpu", f"--data={TEXT}", "--no-verify")  # fmt: skip
SINGLE = ("--micro-batch=1",)
# Chapter, ranks, and flags of its own. The table's 131 rows are no multiple of any ranks.
LAYOUTS = {
    "01 hand": ("01_single_gpu", 1, "--variant=hand"),
    "01 torch": ("01_single_gpu", 1, "--variant=torch"),
    "02 bucket": ("02_data_parallel", 2, "--variant=bucket"),
    "02 overlap": ("02_data_parallel", 4, "--variant=overlap"),
    "02 naive": ("02_data_parallel", 2, "--variant=naive"),
    "02 torch": ("02_data_parallel", 4, "--variant=torch"),
    "03 zero3": ("03_zero", 8, "--variant=zero3"),
    "03 zero1": ("03_zero", 2, "--variant=zero1"),
    "03 zero2": ("03_zero", 4, "--variant=zero2"),
    "03 offload": ("03_zero", 8, "--variant=zero2", "--offload"),
    "03 hsdp": ("03_zero", 8, "--variant=hsdp", "--shard-size=4"),
    "03 zeropp": ("03_zero", 4, "--variant=zeropp", "--no-quantized-weights",
                  "--no-quantized-gradients", "--shard-size=2"),
    "03 torch": ("03_zero", 4, "--variant=torch", "--stage=3"),
    "03 torch 1": ("03_zero", 2, "--variant=torch", "--stage=1"),
    "04 megatron": ("04_tensor_parallel", 4, "--variant=megatron"),
    "04 overlap": ("04_tensor_parallel", 8, "--variant=overlap"),
    "04 torch": ("04_tensor_parallel", 2, "--variant=torch"),
    "05 megatron": ("05_sequence_parallel", 8, "--variant=megatron"),
    "05 kept": ("05_sequence_parallel", 2, "--variant=kept"),
    "05 ring": ("05_sequence_parallel", 4, "--variant=ring"),
    "05 torch": ("05_sequence_parallel", 2, "--variant=torch"),
    "06 zigzag": ("06_context_parallel", 4, "--variant=zigzag"),
    "07 1f1b": ("07_pipeline_parallel", 3, *SINGLE, "--variant=1f1b"),
    "07 naive": ("07_pipeline_parallel", 2, *SINGLE, "--variant=naive"),
    "07 afab": ("07_pipeline_parallel", 4, *SINGLE, "--variant=afab"),
    "07 interleaved": ("07_pipeline_parallel", 2, *SINGLE, "--variant=interleaved"),
    "07 zb-h1": ("07_pipeline_parallel", 4, *SINGLE, "--variant=zb-h1"),
    "07 zb-h2": ("07_pipeline_parallel", 3, *SINGLE, "--variant=zb-h2"),
    "07 dualpipe": ("07_pipeline_parallel", 4, *SINGLE, "--variant=dualpipe"),
    "07 dualpipe-v": ("07_pipeline_parallel", 2, *SINGLE, "--variant=dualpipe-v"),
    "07 torch": ("07_pipeline_parallel", 2, *SINGLE, "--variant=torch"),
    "09 3d": ("09_5d", 8, "--pp=2", "--tp=2", "--zero=3", "--micro-batch=2"),
    "09 zero1": ("09_5d", 8, "--dp=4", "--tp=2", "--zero=1"),
    "09 cp": ("09_5d", 8, "--cp=2", "--pp=2", "--dp=2", "--zero=2", *SINGLE,
              "--schedule=dualpipe-v"),
    "09 torch": ("09_5d", 8, "--variant=torch", "--dp=2", "--pp=2", "--tp=2", "--zero=3",
                 "--micro-batch=2"),
}  # fmt: skip
MIXTURE = ("--experts=8", "--layers=2")
MIXTURES = {
    "08 dropless": ("08_expert_parallel", 4, *MIXTURE, "--variant=dropless"),
    "08 copies": ("08_expert_parallel", 4, *MIXTURE, "--variant=dropless", "--ep=2"),
    "08 capacity": ("08_expert_parallel", 2, *MIXTURE, "--variant=capacity",
                    "--capacity-factor=100"),
    "08 tensor": ("08_expert_parallel", 4, *MIXTURE, "--variant=tensor"),
    "08 torch": ("08_expert_parallel", 2, *MIXTURE, "--variant=torch"),
    "09 ep": ("09_5d", 8, *MIXTURE, "--dp=4", "--ep=2", "--tp=2", "--zero=1"),
    "09 pp ep": ("09_5d", 8, *MIXTURE, "--dp=2", "--ep=2", "--cp=2", "--pp=2", "--zero=3"),
}  # fmt: skip


def run(name, flags):
    """For a rank of the pool. Returns its status; a refusal is one, too."""
    try:
        return main(chapter(name), [*map(str, flags)])
    except SystemExit as leaving:
        return leaving.code


def train(ranks, layout, *flags):
    name, world, *own = (LAYOUTS | MIXTURES)[layout]
    assert ranks(world)(run, name, [*SMALL, *own, *flags])[0] == 0, layout


def whole(folder):
    """{name: full tensor} of a checkpoint."""
    saved = checkpoint.Checkpoint(0, folder, storage.read_index(folder))
    shapes = {name: tensor["shape"] for name, tensor in saved.index["tensors"].items()}
    return {name: saved.value(name, torch.empty(shape)) for name, shape in shapes.items()}


def difference(folder, other):
    """The largest, relative to the largest number of each tensor."""
    these, those = whole(folder), whole(other)
    for name in these.keys() ^ those.keys():            # chapter 09 has no biases
        assert name.endswith("mlp.bias") and not (these | those)[name].any()
    these = {name: these[name] for name in these.keys() & those.keys()}
    return max(float((x - those[name]).abs().max() / those[name].abs().max().clamp(min=1e-30))
               for name, x in these.items())


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """saved(layout): a folder with its checkpoints after steps 2 and 4, which it makes once."""
    folder = tmp_path_factory.mktemp("saved")

    def save(layout):
        if not (folder / layout).exists():
            ranks = lambda world: lambda *call: pool.call(world, 45, *call)
            train(ranks, layout, "--steps=4", "--save-every=2", f"--save={folder / layout}")
        return folder / layout

    return save


def goes_on(ranks, saved, tmp_path, before, after):
    """Save with one layout, go on with another, and compare with the first's unbroken run."""
    train(ranks, after, "--steps=4", f"--resume={saved(before) / 'step-000002'}",
          f"--save={tmp_path}")  # fmt: skip
    off = difference(tmp_path / "step-000004", saved(before) / "step-000004")
    assert off < 1e-10, off
    if before == after:
        assert off == 0


def once(layouts):
    """Pairs in which each saves once and each goes on once; a stride, so that chapters meet."""
    names = list(layouts)
    return [(name, names[(5 * i + 3) % len(names)]) for i, name in enumerate(names)]


@pytest.mark.parametrize(("before", "after"), once(LAYOUTS) + once(MIXTURES))
def test_goes_on_in_another_layout(ranks, saved, tmp_path, before, after):
    goes_on(ranks, saved, tmp_path, before, after)
