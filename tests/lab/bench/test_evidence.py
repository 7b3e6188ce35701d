"""Numbers and names in a diagnosis, and the evidence that it is made from."""

import math
import re
from unittest import mock

import pytest
import torch

from common import Cut
from lab.bench import diagnose, evidence, guesses, verify
from lab.bench.findings.names import factor, in_words, is_telling, times
from tests.conftest import run_main
from tests.lab.bench.test_diagnose import (
    EIGHT,
    FAULTS,
    FIVE,
    FOUR,
    NINE,
    ONE,
    SEVEN,
    SIX,
    THREE,
    TWO,
    flags_of,
)

# ------------------------------------------------------------------------- of right runs, nothing


def examined(chapter, flags, folder):
    """A run of which each step is examined as if it did not match, with all guesses. Returns also
    what is said of each but the last."""
    said = []

    def exceeds(verifier, off):
        if verifier.evidence:
            said.append(diagnose.diagnose(verifier.evidence))
            verifier.evidence = None
        return True

    with (mock.patch.object(verify.Verifier, "exceeds", exceeds),
          mock.patch.object(evidence, "is_explained", lambda found: False)):  # fmt: skip
        status, run, output = run_main(chapter, flags, folder)
    return status, run, output, said


RIGHT = [
    (2, TWO, "--dtype=float64 --optimizer=adamw --clip=0.5"),
    (2, THREE, "--dtype=bfloat16 --clip=0.3"),
    (2, FIVE, "--dtype=float32 --optimizer=momentum"),
]
PRECISIONS = ("--dtype=float64 --clip=0.5", "--dtype=float32 --optimizer=adamw --clip=0.1",
              "--dtype=bfloat16", "--dtype=bfloat16 --optimizer=adamw --clip=0.3")  # fmt: skip
LAYOUTS = [
    (1, ONE, ""), (2, TWO, ""), (2, THREE, ""), (2, THREE, "--variant=zero1"), (4, FIVE, ""),
    (4, FOUR, "--vocab=257"), (4, SIX, ""), (4, SIX, "--variant=ulysses"), (2, SEVEN, ""),
    (4, EIGHT, "--experts=4 --ep=2"), (2, EIGHT, "--experts=4 --balance=bias --bias-speed=0.5"),
    (4, NINE, "--dp=2 --tp=2 --zero=1"),
    (4, NINE, "--cp=2 --pp=2"), (2, TWO, "--variant=torch"),
]  # fmt: skip
MIXED = [(1, ONE, "--dtype=float32 --precision=bf16"),
         (2, THREE, "--dtype=float32 --precision=bf16"),
         (1, ONE, "--dtype=float32 --precision=fp16 --loss-scale=1024"),
         (2, THREE, "--dtype=float32 --variant=zeropp")]  # fmt: skip
IN_FULL = [(world, chapter, f"{more} {precision}") for world, chapter, more in LAYOUTS
           for precision in PRECISIONS]  # fmt: skip


@pytest.mark.parametrize(("world", "chapter", "flags"), [
    *RIGHT, *(pytest.param(*run, marks=pytest.mark.full) for run in (*MIXED, *IN_FULL))])
def test_of_a_right_run_nothing_is_said(ranks, tmp_path, world, chapter, flags):
    flags = flags_of(chapter, f"--steps=3 {flags}")
    results = ranks(world)(examined, chapter, flags, tmp_path)
    (status, run, output, said), *_ = results
    assert status == 0 and run["diagnosis"] == [] and said == [[], []], output
    assert "→" not in output


def test_what_is_not_compared_has_no_diagnosis(ranks, tmp_path):
    fault = "        loss.backward()\n        total += loss.detach()\n    sums", (
        "        (-loss).backward()\n        total += loss.detach()\n    sums")
    flags = [*flags_of(FOUR, ""), "--no-verify"]
    (status, run, _), _ = ranks(2)(run_main, FOUR, flags, tmp_path, fault)
    assert status == 0 and run["diagnosis"] == []


def words_fail(chapter, flags, folder, fault):
    with mock.patch("lab.bench.findings.gradients.times", lambda ratio: {}["nothing"]):
        return run_main(chapter, flags, folder, fault)


def test_a_diagnosis_that_fails_costs_no_report(ranks, tmp_path):
    world, chapter, flags, *fault, _ = FAULTS[0].values
    args = chapter, flags_of(chapter, flags), tmp_path, fault
    (status, run, output), *_ = ranks(world)(words_fail, *args)
    said = "what is known of it cannot be put into words: KeyError: 'nothing'"
    assert status == 1 and run["diagnosis"] == [said] and "✗ gradient norm" in output


# -------------------------------------------------------------------------------- numbers and names

NUMBERS = {"the number of ranks": 4, "the number of micro-batches": 3, "one": 1,
           "all targets over the valid ones": 1.6, "the loss scale": 65536.0}  # fmt: skip


@pytest.mark.parametrize(("ratio", "said"), [
    (4, "4 is the number of ranks"),
    (0.25, "4 is the number of ranks"),
    (2, "2 is the square root of 4, which is the number of ranks"),
    (3**-0.5, "1.73 is the square root of 3, which is the number of micro-batches"),
    (1 / 1.6, "1.6 is all targets over the valid ones"),
    (65536.01, "65,536 is the loss scale"),
    (-1, "the sign is the opposite one"),
    (-4, "4 is the number of ranks, and the sign is the opposite one"),
    (1 / 16, "16 is the square of 4, which is the number of ranks"),
    (1, None), (5, None), (-5, None), (4.001, None), (0, None),
])  # fmt: skip
def test_a_factor_is_called_by_its_name(ratio, said):
    assert factor(ratio, NUMBERS) == said


def test_a_factor_of_two_names_has_both():
    said = "4 is the number of ranks and the number of micro-batches"
    numbers = {"the number of ranks": 4, "the number of micro-batches": 4, "the root": 16}
    assert factor(1 / 4, numbers) == said
    assert factor(4.001, numbers, within=1e-3) == said


@pytest.mark.parametrize(("ratio", "within", "tells"), [
    (3, 1e-6, False), (1 / 3, 1e-6, False), (0.75, 1e-6, False), (-4, 1e-6, False),
    (1.5732, 1e-6, True), (8**0.5, 1e-6, True), (4096, 1e-6, True), (1 / 4096, 1e-6, True),
    (1.5732, 0.05, False), (4096, 0.05, True), (0, 1e-6, False), (math.inf, 1e-6, False)])
def test_a_number_that_any_run_has_tells_nothing(ratio, within, tells):
    assert is_telling(ratio, within) is tells


def test_a_ratio_is_written_as_it_is_said():
    written = [times(ratio) for ratio in (4, 1 / 3, 0.7, -1.5, 65536.3, 1.0001, 0.0123)]
    assert written == ["4.00 times", "1/3 of", "0.70 times", "-1.50 times", "65,536 times",
                       "(1 +1.0e-04) times", "0.012 times"]  # fmt: skip


def names_of(*blocks, mixture=False, tie=False):
    inside = ["norm1.weight", "norm1.bias", *(f"attn.{x}.weight" for x in "qkvo"), "norm2.weight",
              "norm2.bias"]  # fmt: skip
    inside += ["mlp.router.weight", "mlp.up", "mlp.down"] if mixture else (
        ["mlp.up.weight", "mlp.down.weight"])  # fmt: skip
    head = ["head.norm.weight", "head.norm.bias", *([] if tie else ["head.out.weight"])]
    return ["embedding.weight", *(f"{block}.{x}" for block in blocks for x in inside), *head]


@pytest.mark.parametrize(("pattern", "words"), [
    (".", "all parameters"),
    (r"attn\.[qkv]|up", "q, k, v and up"),
    ("norm", "the LayerNorms"),
    (r"norm.*bias", "the LayerNorms' biases"),
    ("^(?!.*norm)", "all but the LayerNorms"),
    ("block2", "block2"),
    ("block1|embedding", "all before block2"),
    (r"block2\.attn\.[qk]", "block2.attn.q and block2.attn.k"),
    (r"block2\.attn\.[qkv]", "q, k and v of block2"),
    (r"block2\.norm1", "block2.norm1"),
    (r"embedding|block1|block2\.norm1", "all up to block2.norm1"),
    (r"block1\.attn\.q|block2\.mlp\.up|head.out", "block1.attn.q, block2.mlp.up and head.out"),
])  # fmt: skip
def test_parameters_are_called_by_what_they_are(pattern, words):
    every = names_of("block1", "block2")
    names = [name for name in every if re.search(pattern, name)]
    assert in_words(names, every) == words
    assert in_words(names[::-1], every) == words


def test_experts_and_tied_tables_have_names_of_their_own():
    every = names_of("block1", "block2", mixture=True, tie=True)
    of = lambda pattern: [name for name in every if re.search(pattern, name)]
    assert in_words(of("up|down"), every) == "the experts"
    assert in_words(of("up"), every) == "the experts' up"
    assert in_words(of("router|embedding"), every) == "the tied table and the router"


# ------------------------------------------------------------------------------------- the evidence


def test_a_fit_tells_a_multiple_from_another_tensor():
    x, y = torch.tensor([1.0, 2, 3, 0]).double(), torch.tensor([0.0, 0, 0, 1]).double()
    assert evidence.fit(-3 * x, x) == (pytest.approx(-3), pytest.approx(0, abs=1e-15))
    assert evidence.fit(x + x.norm() * y, x) == (pytest.approx(1), pytest.approx(0.5**0.5))
    assert evidence.fit(0 * x, x) == (0, 0) and evidence.fit(0 * x, 0 * x) is None
    ratio, residue = evidence.fit(x, 0 * x)
    assert math.isnan(ratio) and residue == math.inf


def parts_of_a_table(whole):
    """Each rank's rows of 7 that are cut into four, with padding at the end, and a vector of which
    all have a part of the sum. whole: the table is nevertheless on every rank."""
    group = torch.distributed.group.WORLD
    full = {"table": torch.arange(14.0).view(7, 2).double(), "vector": torch.ones(3).double()}
    table, vector = torch.nn.Parameter(full["table"]), torch.nn.Parameter(full["vector"])
    if not whole:
        table.cuts = (Cut(0, group.rank(), group.size(), group),)
    mine = evidence.part(full["table"], getattr(table, "cuts", ()))
    own = torch.tensor([1.0, 0, 0] if group.rank() else [-2.0, 1, 1]).double()
    return evidence.sums_over_ranks({"table": (mine, table), "vector": (own, vector)}, full)


def test_what_all_ranks_hold_is_added_up_in_its_place(ranks):
    for whole, n in ((False, 1), (True, 4)):
        for totals in ranks(4)(parts_of_a_table, whole):
            assert totals["table"] == (pytest.approx(n), pytest.approx(0, abs=1e-15))
            assert totals["vector"] == (pytest.approx(1), pytest.approx(0, abs=1e-15))


def test_of_importances_those_that_leave_tokens_out_do_so_once():
    """Each target counts once in all shares together, and in means each micro-batch alike."""
    targets = torch.randint(256, (12, 16))
    targets[torch.rand(targets.shape) < 0.4] = -100
    valid = int((targets != -100).sum())
    args = mock.Mock(batch=12, shares=2, micro_batch=2, cp=None, model=mock.Mock(seq=16))
    batch = mock.Mock(targets=targets, valid=valid)
    ways = {words: importance for words, importance, _ in guesses.importances(args, batch, 2)}
    of = lambda start: sum(x for words, x in ways.items() if words.startswith(start))
    ones = torch.ones(targets.shape).double()
    assert torch.equal(of("the sequences of data-parallel rank"), ones)
    for which in ("last", "first"):
        assert torch.equal(of(f"all micro-batches of each rank but the {which}")
                           + of(f"the {which} micro-batch of each rank"), ones)  # fmt: skip
    means = of("the mean of the micro-batches' own means")
    for rows in range(0, 12, 2):  # a sixth of the loss comes from each
        share = (means * (targets != -100))[rows : rows + 2].sum() / valid
        assert share.item() == pytest.approx(1 / 6)
