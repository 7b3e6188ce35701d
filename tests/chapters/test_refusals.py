"""What each chapter refuses (refusals.toml), and that the change it suggests works."""

import tomllib

import pytest

from tests.conftest import ROOT, SMALL
from tests.support.refused import hold_refusals

TABLES = tomllib.loads((ROOT / "tests/chapters/refusals.toml").read_text(encoding="utf-8"))
BASE = {"09_5d": " ".join(SMALL)}


@pytest.mark.parametrize("name", TABLES)
def test_what_a_chapter_refuses(run_chapter, name):
    base = BASE.get(name, "")
    hold_refusals(run_chapter, name, [(f"{base} {flags}", *row) for flags, *row in TABLES[name]])
