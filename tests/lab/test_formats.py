"""lab/formats.py: its table against all numbers of a format, and updates that get lost."""

import pytest
import torch

import common
from lab import formats
from tests.conftest import FULL, TEXT


@pytest.mark.parametrize("name", formats.FORMATS)
def test_the_table_is_what_all_codes_give(name):
    """16 and 8 bits have few enough numbers to look at each."""
    row = formats.about(name)
    assert row["bits"] == row["sign"] + row["exponent"] + row["mantissa"]
    assert row["epsilon"] == 2.0 ** -row["mantissa"]
    if row["bits"] <= 16:
        every = formats.numbers(name)
        assert every[-1] == row["largest"] and every[0] == row["smallest"]
        assert row["normal"] in every and row["epsilon"] == every[every > 1][0] - 1
        assert formats.cast(every, name).equal(every)
        assert formats.spacing(every[:-1], name).equal(every.diff())
        assert formats.spacing(every[-1:], name).isnan()


def test_tf32_is_float32_with_ten_bits():
    x = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    power = x.log2().floor().exp2()
    expected = (x.float().double() / power * 1024).round() / 1024 * power
    assert formats.cast(x, "TF32").equal(expected)
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11], dtype=torch.float64)
    assert formats.cast(ties, "TF32").tolist() == [1, 1 + 2**-9]             # to even


def test_stochastic_rounding_is_right_on_average():
    low, step = 1.0, 2.0**-7
    for share in (0.1, 0.5, 0.9):
        x = torch.full((40_000,), low + share * step)
        found = formats.stochastic(x, torch.Generator().manual_seed(0))
        assert set(found.tolist()) == {low, low + step}
        error = (share * (1 - share) / len(x)) ** 0.5
        assert abs((found > low).float().mean().item() - share) < 4 * error


def test_lost_updates_are_counted():
    weight = torch.tensor([1.0, 1, 1, 1, 0])
    update = torch.tensor([1e-3, 1e-2, -1e-3, 0, 1e-9])         # half a step is 2^-8, 2^-9 below
    assert formats.lost(weight, update, "bfloat16").tolist() == [True, False, True, True, False]
    assert formats.lost(weight, update, "float32").sum() == 1
    assert formats.lost(weight, update, "E4M3").sum() == 5


@pytest.fixture
def small(monkeypatch):
    """Training on two sequences of a small model."""
    given = formats.settings

    def settings(steps):
        args = given(steps)
        args.batch, args.model, args.data = 2, common.Config(2, 64, 4, 2, 32, 256), TEXT
        return args

    monkeypatch.setattr(formats, "settings", settings)


def test_small_updates_are_lost_when_rounded_to_the_nearest(small):
    """Then the loss stays behind the others'."""
    ends = {way: formats.train(way, 12)[0][-1] for way in formats.WAYS}
    shares = formats.lost_by_kind(*formats.train("float32", 1)[1:], ("float32", "bfloat16"))
    assert shares.keys() == {"tables", "LayerNorms", "matrices"}
    assert all(row["float32"] < 0.01 < row["bfloat16"] for row in shares.values())
    assert abs(ends["masters"] - ends["float32"]) < 0.01 < ends["nearest"] - ends["float32"]
    assert abs(ends["stochastic"] - ends["float32"]) < 0.01


def test_the_program_runs_and_a_bad_argument_costs_one_line(small, tmp_path, capsys):
    formats.main(["--steps=1", *[f"--out={tmp_path}/new/formats.png"] * FULL])
    assert not FULL or (tmp_path / "new/formats.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*formats.FORMATS, *formats.RECIPES))
    with pytest.raises(SystemExit) as leaving:
        formats.main(["--steps=0"])
    assert leaving.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
