"""Hunts: written from a seed, told from what a user sees, and graded."""

import shlex

import pytest

from lab import hunt
from lab.museum import observe
from tests.conftest import ROOT, sample

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def written(tmp_path):
    """written("06 --seed 3"): the file of that hunt."""

    def write(flags):
        assert hunt.main([*shlex.split(flags), f"--out={tmp_path}"]) == 0
        [path] = tmp_path.rglob("*.py")
        return path

    return write


# ------------------------------------------------------------------------------------- to write it

def test_a_seed_draws_and_all_exhibits_are_drawn(written):
    assert hunt.read(written("06 --seed 3"))[2:] == ("06", 3)
    for chapter, those in hunt.huntable().items():
        drawn = {hunt.draw(chapter, seed).number for seed in range(200)}
        assert drawn == {exhibit.number for exhibit in those}


def test_a_hunt_has_one_bug_and_does_not_tell_which(tmp_path, capsys):
    for chapter in hunt.huntable():
        exhibit, path = hunt.draw(chapter, 1), tmp_path / hunt.draw(chapter, 1).file
        assert hunt.main([chapter, "--seed=1", f"--out={tmp_path}"]) == 0
        right, planted = observe.sources(exhibit)
        text, said = path.read_text(), capsys.readouterr().out
        assert text.startswith(planted.rstrip()) and text != right
        assert exhibit.number not in text + said and exhibit.title not in text + said
        assert hunt.main(["--reveal", str(path)]) == 0
        story = capsys.readouterr().out
        assert exhibit.title in story and f"+ {exhibit.new.splitlines()[0]}" in story
        run = f"--nproc_per_node={exhibit.ranks} {exhibit.chapter or path} {exhibit.flags}"
        assert run in said and said.count("--optimizer") == (chapter != "00")


def test_what_is_no_hunt_is_neither_graded_nor_revealed_nor_written_over(tmp_path, capsys):
    path = tmp_path / "02_data_parallel.py"
    for data in (b"\xff\x00", b"# hunt 02 " + b"9" * 5000 + b"\n", b"# hunt 77 1\n"):
        path.write_bytes(data)
        for flags in (["--grade", str(path)], ["--reveal", str(path)], ["02", f"--out={tmp_path}"]):
            with pytest.raises(SystemExit) as leaving:
                hunt.main(flags)
            assert leaving.value.code == 2
            [line] = capsys.readouterr().err.splitlines()
            assert len(line) < 400 + len(str(path)) and path.read_bytes() == data
    assert hunt.main(["02", f"--out={tmp_path}", "--force"]) == 0


@pytest.mark.parametrize(("flags", "named", "works"), [
    ("nan", "chapter: nan", "11 in place of nan"), ("''", "chapter: ''", "in place of ''"),
    ("", "a CHAPTER", "with 06"), ("--grade no.py", "no.py", "python -m lab.hunt 06")])
def test_a_bad_argument_costs_one_line(monkeypatch, capsys, flags, named, works):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as leaving:
        hunt.main(shlex.split(flags))
    assert leaving.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line and works in line


# ------------------------------------------------------------------------------------- to grade it

VALID = "loss_sum(forward(tokens), targets) / valid"


@pytest.mark.parametrize(("is_mended", "old", "new", "verdict"), sample([
    (True, "", "", hunt.MENDED), (False, "", "", hunt.SAME),
    (True, "(clip / (norm + 1e-6))", "(2 * clip / norm)", hunt.OTHER),  # in another run
    (False, VALID, f"{VALID} * 1.5", hunt.SAME),  # something else is wrong as well
], 2))
def test_a_mended_hunt_is_told_from_others(monkeypatch, written, capsys, is_mended, old, new,
                                           verdict):
    """By its own run, and one of another exhibit with --clip."""
    clipped = [run for run in hunt.runs_of("01") if "--clip" in run[1]][:1]
    monkeypatch.setattr(hunt, "runs_of", lambda chapter: clipped if "clip" in old else [])
    path, exhibit = written("01 --seed 2"), hunt.draw("01", 2)
    text = path.read_text()
    if is_mended:
        text = text.replace(exhibit.new, exhibit.old)
    assert old in text
    path.write_text(text.replace(old, new) if old else text)
    assert hunt.main(["--grade", str(path)]) == (0 if verdict == hunt.MENDED else 1)
    assert f"{path.name}  {verdict}" in capsys.readouterr().out


@pytest.mark.full
def test_what_another_chapter_shows_is_run_by_that(written):
    """It imports the hunted file from the hunts."""
    seed = next(seed for seed in range(99) if hunt.draw("11", seed).chapter)
    path, exhibit = written(f"11 --seed {seed}"), hunt.draw("11", seed)
    assert hunt.main(["--grade", str(path)]) == 1
    path.write_text(path.read_text().replace(exhibit.new, exhibit.old))
    assert hunt.main(["--grade", str(path)]) == 0
