"""lab/formats.py: its table against torch.finfo and casts, and what updates become."""

import math

import pytest
import torch

from lab import formats

REAL = [name for name in formats.FORMATS if name != "TF32"]
SMALL = [name for name in REAL if formats.FORMATS[name].itemsize <= 2]
STANDARD = {                            # sign, exponent, mantissa, as the formats' papers have them
    "float64": (1, 11, 52), "float32": (1, 8, 23), "TF32": (1, 8, 10), "bfloat16": (1, 8, 7),
    "float16": (1, 5, 10), "E4M3": (1, 4, 3), "E5M2": (1, 5, 2), "E8M0": (0, 8, 0)}


@pytest.mark.parametrize("name", formats.FORMATS)
def test_bits_are_those_of_the_standard(name):
    told = formats.about(name)
    layout = told["sign"], told["exponent"], told["mantissa"]
    assert layout == STANDARD[name] and told["bits"] == sum(layout)
    assert told["epsilon"] == 2.0 ** -told["mantissa"]


@pytest.mark.parametrize("name", REAL)
def test_the_table_is_finfo(name):
    told, there = formats.about(name), torch.finfo(formats.FORMATS[name])
    assert (told["bits"], told["largest"], told["normal"]) == (
        there.bits, there.max, there.smallest_normal)
    assert told["epsilon"] == there.eps


@pytest.mark.parametrize("name", SMALL)
def test_the_table_is_what_all_codes_give(name):
    """Of formats of 16 and 8 bits there are few enough numbers to look at each."""
    every, told = formats.numbers(name), formats.about(name)
    assert every[-1] == told["largest"] and every[0] == told["smallest"]
    assert formats.cast(every, name).equal(every)
    assert every[torch.searchsorted(every, 1, right=True)] == 1 + told["epsilon"]
    assert formats.after(every[:-1], name).equal(every[1:])
    assert formats.after(every[-1:], name).item() == math.inf


def test_tf32_is_float32_with_ten_bits():
    x = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    power = x.log2().floor().exp2()
    expected = (x.float().double() / power * 1024).round() / 1024 * power
    assert formats.cast(x, "TF32").equal(expected)
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11], dtype=torch.float64)
    assert formats.cast(ties, "TF32").tolist() == [1, 1 + 2**-9]             # to even
    assert formats.cast(-x, "TF32").equal(-expected)
    assert formats.about("TF32")["largest"] == (2 - 2**-10) * 2.0**127


@pytest.mark.parametrize("name", formats.FORMATS)
def test_spacing_is_what_the_bits_say(name):
    x = torch.logspace(-8, 5, 500, dtype=torch.float64)
    told, y = formats.about(name), formats.cast(x, name)
    power = torch.maximum(y, torch.tensor(told["normal"])).log2().floor().exp2()
    inside = (y > 0) & (y < told["largest"])
    found = formats.spacing(x, name)
    assert found[inside].equal((power * told["epsilon"])[inside].double())
    assert found[(y == 0) | (x > told["largest"])].isnan().all()


def test_the_lines_of_the_table():
    lines = list(formats.table())
    assert len(lines) == 1 + len(formats.FORMATS)
    by_name = {line.split()[0]: line.split() for line in lines[1:]}
    assert by_name["bfloat16"][-2:] == ["1", "0.00099945"]
    assert by_name["float16"][-2] == "1.000977" and by_name["E4M3"][-1] == "0.0019531"


def test_stochastic_rounding_is_right_on_average():
    low, step = 1.0, 2.0**-7
    for share in (0.1, 0.5, 0.9):
        x = torch.full((40_000,), low + share * step)
        found = formats.stochastic(x, torch.Generator().manual_seed(0))
        assert set(found.tolist()) == {low, low + step}
        error = (share * (1 - share) / len(x)) ** 0.5
        assert abs((found > low).float().mean().item() - share) < 4 * error
    x = torch.tensor([1.0, -3.5, 0.0, 2.0**-100])               # which bfloat16 holds
    assert formats.stochastic(x, torch.Generator()).equal(x)


def test_lost_updates_are_counted():
    weight = torch.tensor([1.0, 1, 1, 1, 0])
    update = torch.tensor([1e-3, 1e-2, -1e-3, 0, 1e-9])         # half a step is 2^-8, 2^-9 below
    assert formats.lost(weight, update, "bfloat16") == 2 / 4
    assert formats.lost(weight, update, "float32") == 0
    assert formats.lost(weight, update, "E4M3") == 1


def test_ways_of_updating(monkeypatch):
    """Rounded to the nearest, small updates are lost, and the loss stays behind the others'."""
    monkeypatch.setattr(formats, "settings", lambda steps, given=formats.settings: small(given))
    shares = {}
    ends = {way: formats.train(way, 12, seen=lambda before, model: shares.update(
        formats.lost_by_kind(before, model, ("float32", "bfloat16"))))[-1] for way in formats.WAYS}
    assert shares.keys() == {"tables", "LayerNorms", "matrices"}
    assert abs(ends["masters"] - ends["float32"]) < 0.01 < ends["nearest"] - ends["float32"]
    assert abs(ends["stochastic"] - ends["float32"]) < 0.01


def small(given):
    args = given(1)
    args.batch = 2
    return args


def test_the_program_prints_and_draws(tmp_path, monkeypatch, capsys):
    """The figure has the numbers that are printed."""
    drawn, new_figure = [], formats.new_figure
    monkeypatch.setattr(formats, "settings", lambda steps, given=formats.settings: small(given))
    monkeypatch.setattr(formats, "new_figure", lambda *size: drawn.append(new_figure(*size))
                        or drawn[-1])
    formats.main(["--steps=2", f"--out={tmp_path}/new/formats.png"])
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (tmp_path / "new/formats.png").read_bytes().startswith(b"\x89PNG")
    [(_, (distances, bars, gaps))] = drawn
    assert [line.get_label() for line in distances.lines] == [*formats.FORMATS]
    for kind in bars.containers:
        [printed] = [words[2::2] for words in said if words[:1] == [kind.get_label()]]
        assert [f"{bar.get_height():.0f}%" for bar in kind] == printed
    for way, line in zip(formats.WAYS[1:], gaps.lines):
        [printed] = [words[-1] for words in said if words[:1] == [way]]
        assert f"{sum(line.get_ydata()) / 2:+.4f}" == printed


def test_a_bad_argument_costs_one_line(capsys):
    with pytest.raises(SystemExit) as leaving:
        formats.main(["--steps=0"])
    assert leaving.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
