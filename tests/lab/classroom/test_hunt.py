"""Hunts: written from a seed, told from what a user sees, and graded."""

import shlex

import pytest

from lab.classroom import checks, hunt, sandbox
from lab.museum import observe
from tests.conftest import ROOT


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


@pytest.fixture
def written(tmp_path):
    """written("06 --seed 3"): the file of that hunt."""

    def write(flags):
        assert hunt.main([*shlex.split(flags), f"--out={tmp_path}"]) == 0
        [path] = tmp_path.rglob("*.py")
        return path

    return write


def test_a_seed_draws_and_all_exhibits_are_drawn(written):
    path = written("06 --seed 3")
    text = path.read_text()
    assert hunt.hunt_of(text) == ("06", 3, "easy")
    assert written("6 --seed 3").read_text() == text        # as it was: it may be written over
    drawn = {hunt.draw("06", seed).number for seed in range(200)}
    assert drawn == {exhibit.number for exhibit in hunt.huntable()["06"]}


def test_a_name_draws_a_students_own_seed(written):
    """The same however the name is typed, and not the same in each chapter."""
    names = [f"student {i}" for i in range(60)]
    seeds = {chapter: [hunt.arguments([chapter, f"--for={name}"]).seed for name in names]
             for chapter in ("06", "07")}
    assert len({*seeds["06"], *seeds["07"]}) == 120
    assert len({hunt.draw("06", seed) for seed in seeds["06"]}) == len(hunt.huntable()["06"])
    assert hunt.arguments(["6", "--for=  Ada  LOVELACE"]).seed == 578758239
    assert hunt.hunt_of(written("06 --for 'ada lovelace'").read_text())[1] == 578758239


@pytest.mark.parametrize("chapter", hunt.huntable())
def test_a_hunt_has_one_bug_and_does_not_tell_which(chapter, written, capsys):
    exhibit, path = hunt.draw(chapter, 1), written(f"{chapter} --seed 1")
    right, planted = observe.sources(exhibit)
    text, said = path.read_text(), capsys.readouterr().out
    assert text.startswith(planted.rstrip()) and text != right
    assert exhibit.number not in text + said and exhibit.title not in text + said
    assert f"--nproc_per_node={exhibit.ranks} {exhibit.chapter or path} {exhibit.flags}" in said
    assert said.count("--optimizer") == (chapter != "00")
    hint, *_ = said.partition("    PYTHONPATH")
    assert not any(word in hint for word in ("gradient", "norm", "sum", "clip"))


def test_a_hunt_is_in_its_chapters_file():
    assert all(exhibit.file.startswith(chapter) for chapter, those in hunt.huntable().items()
               for exhibit in those)


@pytest.mark.full
def test_what_another_chapter_shows_is_run_by_that(written, capsys):
    """It imports the hunted file from the hunts."""
    seed = next(seed for seed in range(99) if hunt.draw("11", seed).chapter)
    path, exhibit = written(f"11 --seed {seed}"), hunt.draw("11", seed)
    assert f"PYTHONSAFEPATH=1 PYTHONPATH={path.parent}:. torchrun" in capsys.readouterr().out
    assert hunt.main(["--grade", str(path)]) == 1
    assert f"{path.name}  {hunt.SAME}" in capsys.readouterr().out
    path.write_text(path.read_text().replace(exhibit.new, exhibit.old))
    assert hunt.main(["--grade", str(path)]) == 0


def test_a_hard_one_is_not_compared(written, capsys):
    written("09 --seed 2 --level hard")
    assert capsys.readouterr().out.count("--no-verify") == 1


def test_the_story_is_revealed(written, capsys):
    path, exhibit = written("04 --seed 2"), hunt.draw("04", 2)
    assert hunt.main(["--reveal", str(path)]) == 0
    said = capsys.readouterr().out
    assert exhibit.number in said and exhibit.title in said
    assert f"+ {exhibit.new.splitlines()[0]}" in said and "What sees it: " in said


@pytest.mark.parametrize(("change", "verdict"), [
    (lambda text, exhibit: text, hunt.SAME),
    (lambda text, exhibit: text.replace(exhibit.new, exhibit.old), hunt.MENDED),
    (lambda text, exhibit: text.replace(exhibit.new, exhibit.old).replace(
        "loss_sum(forward(tokens), targets) / valid", "loss_sum(forward(tokens), targets)"),
     hunt.OTHER),
    (lambda text, exhibit: text.replace("def accumulate(", "def accumulated("), hunt.OTHER)])
def test_a_mended_hunt_is_told_from_others(monkeypatch, written, capsys, change, verdict):
    """By its own run, and one that nobody has seen."""
    monkeypatch.setattr(hunt, "runs_of", lambda chapter: [])
    path, exhibit = written("01 --seed 2"), hunt.draw("01", 2)
    path.write_text(change(path.read_text(), exhibit))
    assert hunt.main(["--grade", str(path)]) == (0 if verdict == hunt.MENDED else 1)
    assert f"{path.name}  {verdict}" in capsys.readouterr().out


@pytest.mark.parametrize("change", [
    ("loss.detach() * len(micro_batches)", "loss.detach() * 2 * len(micro_batches)"),
    ("(forward(tokens), targets) / valid", "(forward(tokens), targets) / valid * 1.5")])
def test_the_same_bug_with_other_numbers_is_the_same_bug(monkeypatch, change):
    """Rewritten, so that its lines are not there; or kept, and something beside it is wrong, too.
    """
    monkeypatch.setattr(hunt, "runs_of", lambda chapter: [])
    _, planted = observe.sources(hunt.draw("01", 2))
    assert planted.count(change[0]) == 1
    verdict, said = hunt.grade(planted.replace(*change), "01", 2)
    assert verdict == hunt.SAME and said


def test_a_constant_that_fits_the_known_runs_is_not_mended(monkeypatch, written, capsys):
    """Six micro-batches of two are the twelve sequences of the run."""
    monkeypatch.setattr(hunt, "runs_of", lambda chapter: [])        # it passes them all
    path, exhibit = written("08 --seed 1"), hunt.draw("08", 1)
    assert exhibit.new.endswith("balance / len(x)") and "--batch 12" in exhibit.flags
    path.write_text(path.read_text().replace(exhibit.new, f"{exhibit.new} / 6"))
    assert hunt.main(["--grade", str(path), "--secret", "monday"]) == 1
    assert f"{path.name}  {hunt.FITTED}" in capsys.readouterr().out


def test_the_day_or_a_secret_draws_the_run_that_nobody_has_seen():
    exhibit = hunt.draw("01", 2)
    found = hunt.second_run(exhibit, "monday")
    assert found != hunt.second_run(exhibit, "tuesday")
    assert found[1].startswith(exhibit.flags) and found[1] != exhibit.flags


@pytest.mark.full
@pytest.mark.skipif(bool(sandbox.why_not()), reason="there are no namespaces")
def test_in_a_sandbox_nobody_hands_in_the_chapter_that_lies_there(monkeypatch, written, capsys):
    path, exhibit = written("01 --seed 2"), hunt.draw("01", 2)
    monkeypatch.setattr(hunt, "runs_of", lambda chapter: [])
    monkeypatch.setattr(sandbox, "REQUIRED", False)     # as it is again after this
    path.write_text(path.read_text().replace(exhibit.new, exhibit.old))
    assert hunt.main(["--grade", str(path), "--sandbox"]) == 0
    path.write_text("import common\nfrom pathlib import Path\nexec(Path(common.__file__).with_name("
                    "'01_single_gpu.py').read_text())\n# hunt 01 2 easy\n")
    assert hunt.main(["--grade", str(path), "--sandbox"]) == 1
    assert "No such file" in capsys.readouterr().out


@pytest.mark.full
def test_what_breaks_another_run_of_the_chapter_is_seen(monkeypatch):
    """The bug is gone; but gradients are never clipped, which its own run does not do."""
    clipped = [run for run in hunt.runs_of("01") if "--clip" in run[1]]
    monkeypatch.setattr(hunt, "runs_of", lambda chapter: clipped[:1])
    text = (ROOT / "01_single_gpu.py").read_text()
    broken = text.replace("(clip / (norm + 1e-6))", "(2 * clip / norm)", 1)
    assert broken != text and "--clip" not in hunt.draw("01", 2).flags
    verdict, said = hunt.grade(broken, "01", 2)
    assert verdict == hunt.OTHER and said


def test_what_was_changed_is_not_written_over(written, capsys):
    path = written("02")
    path.write_text(path.read_text().replace("import torch\n", "import torch  # mine\n", 1))
    with pytest.raises(SystemExit) as leaving:
        hunt.main(["02", "--seed", "5", f"--out={path.parent}"])
    assert leaving.value.code == 2 and "--force" in capsys.readouterr().err
    assert hunt.main(["02", "--seed", "5", f"--out={path.parent}", "--force"]) == 0


@pytest.mark.parametrize("data", [
    b"\xff\x00", b"# hunt 02 " + b"9" * 5000 + b" easy\n", b"# hunt 77 1 easy\n"])
def test_what_is_no_hunt_is_neither_graded_nor_revealed_nor_written_over(tmp_path, capsys, data):
    path = tmp_path / "02_data_parallel.py"
    path.write_bytes(data)
    for flags in (["--grade", str(path)], ["--reveal", str(path)], ["02", f"--out={tmp_path}"]):
        with pytest.raises(SystemExit) as leaving:
            hunt.main(flags)
        assert leaving.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert len(line) < 400 + len(str(path)) and path.read_bytes() == data


@pytest.mark.parametrize(("flags", "words"), [
    ("12", "CHAPTER 12 has no hunt"), ("12", "11 in place of 12 would work"),
    ("", "with 06 would work"), ("02 --for= ", "--for: '' is no name of 1 to 100 letters"),
    ("02 --for ada --seed 3", "--for ada means nothing beside --seed; without --for"),
    ("02 --seed x", "--seed"), ("02 --level 1", "--level"),
    ("--grade no.py", "no.py is no file with a text in UTF-8; `python -m lab.hunt 06` writes one"),
    ("--grade 02_data_parallel.py", "is no hunt"), ("--grade lab", "lab is no file"),
    ("02 --secret x", "without --secret would work"),
    ("02 --reveal x.py", "without --reveal would work"),
    ("02 --sandbox", "without --sandbox would work")])
def test_a_bad_argument_costs_one_line(monkeypatch, capsys, flags, words):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as leaving:
        hunt.main(shlex.split(flags))
    assert leaving.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
