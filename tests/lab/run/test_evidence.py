"""The evidence behind a diagnosis, and runs in which no chapter is wrong.

Planted faults, and the words of each diagnosis, are in tests/faults.
"""

from unittest import mock

import pytest

from lab.diagnose import collect, diagnose
from lab.run import verify
from tests.conftest import SMALL, TEXT, edited, run_main, sample

ONE, TWO, THREE = "01_single_gpu", "02_data_parallel", "03_zero"
FOUR, FIVE, SIX = "04_tensor_parallel", "05_sequence_parallel", "06_context_parallel"
SEVEN, EIGHT, NINE = "07_pipeline_parallel", "08_expert_parallel", "09_5d"
BATCH = {TWO: 6, THREE: 6, EIGHT: 12, NINE: 6}  # of the others: 3


def flags_of(chapter, flags):
    """Three micro-batches on each rank, of which no two have as many valid targets."""
    return (*SMALL, f"--data={TEXT}", "--verify", "--dtype=float64", "--optimizer=sgd", "--steps=1",
            "--micro-batch=1", "--ignore=0.3", f"--batch={BATCH.get(chapter, 3)}", *flags.split())


# ------------------------------------------------------------------------- of right runs, nothing


def examined(chapter, flags, folder):
    """A run of which each step is examined as if it did not match, with all guesses. Returns also
    what rank 0 says of each but the last."""
    said = []

    def exceeding(verifier, off):
        if verifier.evidence:
            said.append(diagnose.diagnose(verifier.evidence))
        verifier.evidence, verifier.is_examined = None, False
        return [*off]

    with (mock.patch.object(verify.Verifier, "exceeding", exceeding),
          mock.patch.object(verify.Verifier, "effects", lambda verifier, there: {}),
          mock.patch.object(collect, "is_explained", lambda evidence: False)):  # fmt: skip
        status, run, output = run_main(chapter, flags, folder)
    return status, run, output, said


PRECISIONS = ("--dtype=bfloat16", "--dtype=float64 --clip=0.5",
              "--dtype=float32 --optimizer=adamw --clip=0.1",
              "--dtype=bfloat16 --optimizer=adamw --clip=0.3")  # fmt: skip
LAYOUTS = [
    (2, THREE, ""), (1, ONE, ""), (2, TWO, ""), (2, THREE, "--variant=zero1"), (4, FIVE, ""),
    (4, FOUR, "--vocab=257"), (4, SIX, ""), (4, SIX, "--variant=ulysses"), (2, SEVEN, ""),
    (4, EIGHT, "--experts=4 --ep=2"), (2, EIGHT, "--experts=4 --balance=bias --bias-speed=0.5"),
    (4, NINE, "--dp=2 --tp=2 --zero=1"),
    (4, NINE, "--cp=2 --pp=2"), (2, TWO, "--variant=torch"),
]  # fmt: skip
MIXED = [(1, ONE, "--dtype=float32 --precision=bf16"),
         (2, THREE, "--dtype=float32 --precision=bf16"),
         (1, ONE, "--dtype=float32 --precision=fp16 --loss-scale=1024"),
         (2, THREE, "--dtype=float32 --variant=zeropp")]  # fmt: skip
# Each layout in two of the four precisions.
RIGHT = [(world, chapter, f"{more} {PRECISIONS[(i + next) % 4]}")
         for next in (0, 1) for i, (world, chapter, more) in enumerate(LAYOUTS)] + MIXED


@pytest.mark.parametrize(("world", "chapter", "flags"), sample(RIGHT))
def test_of_a_right_run_nothing_is_said(ranks, tmp_path, world, chapter, flags):
    flags = flags_of(chapter, f"--steps=3 {flags}")
    results = ranks(world)(examined, chapter, flags, tmp_path)
    (status, run, output, said), *_ = results
    assert status == 0 and run["diagnosis"] == [] and said == [[], []], output
    assert "→" not in output


MEAN = "dist.all_reduce(p.grad, group=self.group)"


def words_fail(chapter, flags, folder, source):
    with mock.patch("lab.diagnose.gradients.times", lambda ratio: {}["nothing"]):
        return run_main(chapter, flags, folder, source)


def test_a_diagnosis_that_fails_costs_no_report(ranks, tmp_path):
    """And what is not compared has none."""
    wrong = edited(TWO, MEAN, f"{MEAN}\n            p.grad /= self.group.size()")
    flags = flags_of(TWO, "--variant=naive")
    (status, run, output), *_ = ranks(2)(words_fail, TWO, flags, tmp_path, wrong)
    [said] = run["diagnosis"]
    assert status == 1 and "KeyError: 'nothing'" in said and "✗ gradient norm" in output
    (status, run, _), _ = ranks(2)(run_main, TWO, [*flags, "--no-verify"], tmp_path, wrong)
    assert status == 0 and run["diagnosis"] == []
