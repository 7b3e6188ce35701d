"""What the tests in a browser share."""

import json
import re
from pathlib import Path

from lab.site import answers, tools
from tests.conftest import ROOT

SHOTS = ROOT / "runs/page"
RULES = Path(__file__).with_name("rules.js")


def shoot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def answer_of(tool, **values):
    """What a tool gets when it begins with these values, as JSON has it."""
    tool = tools.TOOLS[tool]
    [(name, asked)] = answers.first_questions(tool, tool.begins | values)
    return json.loads(json.dumps(answers.answer(name, asked)))


def settled(page):
    """Wait until each tool has drawn the answer to its last question. Returns its words."""
    page.wait_for_function("() => window.busy === 0")
    return " ".join(page.locator(".verdict, .status").all_inner_texts())


def move(page, name, value=None, tool="[data-tool]"):
    """Drag a slider to this place; without one, to the next, or at its end to the one before. Then
    wait for the answer. Returns where it was."""
    was = page.eval_on_selector(f"{tool} input[name={name}]", """(one, value) => {
        const was = one.value;
        one.value = value ?? Number(was) + (was === one.max ? -1 : 1);
        one.dispatchEvent(new Event("input", { bubbles: true }));
        one.dispatchEvent(new Event("change", { bubbles: true }));
        return was;
    }""", value)
    settled(page)
    return was


def sliders(page, tool="[data-tool]"):
    """The names of all that can be moved."""
    return page.eval_on_selector_all(
        f"{tool} input[type=range]", "all => all.filter(one => !one.disabled && "
        "one.checkVisibility() && one.max > 0).map(one => one.name)")


def broken(page, *rules):
    """What a reader sees now and shouldn't, as lines: texts that are pale or over each other, a
    page that shifts, or controls and pictures without a name. rules: functions of rules.js."""
    script = RULES.read_text(encoding="utf-8").strip()
    found = [line for rule in rules or ("pale", "overlaps", "shifts")
             for line in page.evaluate(f"({script}).{rule}()")]
    tree = page.locator("body").aria_snapshot().splitlines()
    unnamed = re.compile(r" *- (link|button|img|slider|textbox|combobox|checkbox)( \[.*\])?:?")
    return found + [f"no name:{line}" for line in tree if unnamed.fullmatch(line)]
