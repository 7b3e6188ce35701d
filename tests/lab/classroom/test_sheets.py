"""Sheets of predictions: written without answers, and marked whatever is in them."""

import json
import re

import pytest

from lab import predict as command
from lab.classroom import gradebook, predict, questions, sheets

NAME = "04_tensor_parallel"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of a class; commands are called beside it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "class"


def export(path, *flags):
    """A sheet, and the five questions that it asks."""
    assert command.main(["04", *flags, f"--export={path}"]) == 0
    return path, questions.questions(NAME, sheets.read(path).seed)[1]


def fill_in(path, answers):
    text = path.read_text()
    for i, answer in enumerate(answers, start=1):
        if path.suffix == ".json":
            sheet = json.loads(text)
            sheet["questions"][i - 1]["answer"] = answer
            text = json.dumps(sheet)
        else:
            text = text.replace(f"\nAnswer {i}: \n", f"\nAnswer {i}: {answer}\n")
    path.write_text(text)


def right_answers(asked):
    return [predict.in_words(question.value, question.unit) for question in asked]


def marks(capsys, *flags):
    capsys.readouterr()
    assert command.main(["--mark=class", "--json=marks.json", *flags]) == 0
    return capsys.readouterr().out, {
        entry["student"]: (entry["right"], entry["of"]) for entry in json.load(open("marks.json"))}


@pytest.mark.parametrize("suffix", ["md", "json"])
def test_a_sheet_has_no_answers_and_right_ones_are_right(folder, capsys, suffix):
    for student in ("ada", "bob", "eve"):
        path, asked = export(folder / student / f"predictions.{suffix}", "--seed=3")
        right = right_answers(asked)
        text = path.read_text()
        assert all(question.text.split()[-1] in text for question in asked)
        assert not any(predict.pretty(question.formula) in text or answer in text
                       for question, answer in zip(asked, right) if len(answer) > 4)
        fill_in(path, {"ada": right, "bob": [*right[:2], "", "much", "-1 B"], "eve": []}[student])
    assert marks(capsys, "04", "--seed=3")[1] == {"ada": (5, 5), "bob": (2, 5), "eve": (0, 5)}
    assert {*marks(capsys, "04", "--seed=4")[1].values()} == {(0, 5)}  # nobody was asked these
    marks(capsys, "04", "--seed=3")
    assert gradebook.predictions("marks.json") == {
        ("ada", "04"): (5, 5), ("bob", "04"): (2, 5), ("eve", "04"): (0, 5)}


def test_a_name_draws_a_sheet_and_an_easier_seed_is_no_way_out(folder, capsys):
    path, asked = export(folder / "ada.md", "--for=  ADA ")
    assert sheets.read(path).seed == 1781903406  # whatever is changed here: she may have a sheet
    fill_in(path, right_answers(asked))
    other, asked = export(folder / "bob.md", "--for=bob")
    assert sheets.read(other).seed != sheets.read(path).seed
    easy, asked = export(folder / "bob.md", "--seed=1")
    easy.write_text(easy.read_text().replace("seed 1\n", "seed 1, for bob\n"))
    fill_in(easy, right_answers(asked))
    assert marks(capsys)[1] == {"ada": (5, 5), "bob": (0, 5)}
    assert marks(capsys, "03")[1] == {"ada": (0, 5), "bob": (0, 5)}  # another chapter's
    (folder / "bob.md").write_text(path.read_text())  # in a class, a sheet has an owner
    (folder / "cyn.md").write_text(path.read_text().replace(", for ada", ""))
    assert marks(capsys)[1] == {"ada": (5, 5), "bob": (0, 5), "cyn": (0, 5)}


def test_hostile_sheets_cost_nothing(folder, capsys):
    path, asked = export(folder / "zoe.md", "--seed=3")
    fill_in(path, right_answers(asked))
    sheet, right = path.read_text(), json.dumps({"chapter": "04", "seed": 3, "for": None})
    answers = ("__import__('os').abort() B", "9**9**9 B", "(" * 150, "\x1b[2J", "1+" * 10**5 + "1")
    empty = re.sub("(Answer .: ).*", r"\1", sheet)
    hostile = {
        "answers.md": "\n".join([empty, *(f"Answer {i}: {a}" for i, a in enumerate(answers, 1))]),
        "huge.md": sheet + "#" * 10**6, "bytes.md": b"\xff\xfe", "deep.json": "[" * 10**5,
        "list.json": "[]", "number.json": right[:-1] + ', "questions": [{"number": [1]}]}',
        "chapter.md": sheet.replace("04, ", "99, "), "\x1b[2J.md": sheet}
    for name, text in hostile.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    said, found = marks(capsys, "04", "--seed=3")
    assert found == {"zoe": (5, 5), "answers": (0, 5), "\\x1b[2J": (5, 5)}
    assert len(said.splitlines()) == len(hostile) + 1
    assert all(line.isprintable() for line in said.splitlines())
