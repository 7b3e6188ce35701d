"""lab/chapters/__init__.py: each chapter is loaded once, and its room is complete."""

import ast
import shutil
import subprocess
import sys

import pytest

from lab import ROOT, chapters
from lab.chapters import question
from lab.site import tools
from lab.site.pages import split_title

EVERYWHERE = """
import importlib, sys
from lab.planner.models import as_planned
from common import PRESETS
from lab.chapters import chapter
from lab.chapters import question
from lab.site import answers

case, _ = question.draw_questions("10_planner", 0)
found = [chapter("10"), chapter("10"), answers.chapter("10"), case.chapter]
other = importlib.import_module("10_planner")
assert all(module is found[0] for module in found)
same = other is found[0]
assert same != ("student" in sys.argv)
assert (case.layout == other.Layout(**vars(case.layout))) == same
"""


@pytest.mark.full
@pytest.mark.parametrize("has_own", [True, False])
def test_a_chapter_is_the_same_from_everywhere(tmp_path, has_own):
    """A student's file with the same name is another module, and stays it."""
    script = EVERYWHERE
    if has_own:
        shutil.copy(ROOT / "10_planner.py", tmp_path)
        script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import importlib\n" \
                 f"importlib.import_module('10_planner'); sys.path.pop(0){EVERYWHERE}"
    ran = subprocess.run([sys.executable, "-c", script, *["student"] * has_own], cwd=ROOT,
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_every_chapter_has_predictions_and_a_figure():
    for what in ("predictions", "figure"):
        assert {name[:2] for name in chapters.NAMES} <= chapters.rooms_with(what).keys()
    drawn = {room: figure.OF for room, figure in chapters.rooms_with("figure").items()}
    names = {name[:2]: name for name in chapters.NAMES}
    assert drawn == names | {"10": None, "checkpoints": "faults"}


def test_a_rooms_tools_and_files_exist():
    for name in chapters.NAMES:
        lesson = split_title(ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text())))[1]
        begins = [" ".join(text.split()) for text in lesson.split("\n\n")]
        for place, (tool, begin) in getattr(chapters.about(name), "PLAYS", {}).items():
            assert sum(text.startswith(place) for text in begins) == 1, (name, place)
            assert begin.keys() <= tools.TOOLS[tool].begins.keys()
    for about in chapters.rooms_with("about").values():
        for file, figure in getattr(about, "FILES", {}).items():
            assert (ROOT / f"{file}.py").exists()
            assert figure is None or (ROOT / f"figures/{figure}.png").exists()


def test_a_question_comes_from_the_rooms_own_chapter():
    for name in chapters.NAMES:
        case, _ = question.draw_questions(name, 1)
        assert case.chapter is chapters.chapter(name[:2]) and case.name == name
