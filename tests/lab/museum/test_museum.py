"""The museum: each plant applies once, is caught by what it names, and by nothing that is blind."""

import re
from functools import partial

import pytest

from lab import chapters, hunt, museum
from lab.classroom import checks
from lab.museum import __main__ as command
from lab.museum import observe
from lab.museum.exhibit import read
from lab.run.about import as_check
from tests.conftest import FULL, sample

EXHIBITS = [exhibit for those in museum.exhibits().values() for exhibit in those]


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


def test_each_room_has_five_exhibits_or_more_and_none_is_there_twice():
    counts = {room: len(those) for room, those in museum.exhibits().items()}
    assert [*counts] == chapters.ROOMS and min(counts.values()) >= 5
    assert len({(exhibit.file, exhibit.old, exhibit.new) for exhibit in EXHIBITS}) == len(EXHIBITS)


def test_an_exhibit_is_told_and_applies():
    """Once; and the file with it is still Python."""
    for exhibit in EXHIBITS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", exhibit.number)
        assert exhibit.title and exhibit.story
        assert exhibit.caught_by and not {*exhibit.caught_by} & {*exhibit.blind}, exhibit.number
        assert bool(exhibit.rehearsal) == ("rehearsal" in exhibit.caught_by), exhibit.number
        right, planted = observe.sources(exhibit)
        assert right != planted
        compile(planted, exhibit.file, "exec")


def cost(exhibit):
    return exhibit.ranks, len(exhibit.before), exhibit.rehearsal


@pytest.mark.parametrize("exhibit", [
    pytest.param(exhibit, id=f"{room}-{exhibit.number}")
    for room, those in museum.exhibits().items() for exhibit in sample(sorted(those, key=cost))])
def test_an_exhibit_is_caught_by_what_it_names(exhibit):
    """`make test` plays the first one of each room that needs the fewest ranks; and not the run
    without its bug, in which nothing must be caught."""
    flags = observe.flags_of(exhibit, "sgd")
    if observe.trains(exhibit) and not exhibit.before:
        flags += " --steps=5"  # as many as are compared
    if FULL:
        right, planted = observe.play_both(exhibit, flags)
        assert (right.status, right.caught) == (0, ()), right.said
    else:
        planted = observe.play(exhibit.file, observe.sources(exhibit)[1], exhibit.ranks, flags,
                               exhibit.chapter, exhibit.before, exhibit.rehearsal)
    assert planted.status == 1 and {*exhibit.caught_by} <= {*planted.caught}, planted
    assert not {*exhibit.blind} & {*planted.caught}, planted


def test_what_shows_at_full_size_alone_is_in_no_hunt():
    """A hunt's file is run, and would call itself right."""
    at_full_size = {exhibit for exhibit in EXHIBITS if exhibit.rehearsal}
    assert len(at_full_size) >= 5
    assert all(exhibit.caught_by == ("rehearsal",) for exhibit in at_full_size)
    assert not any(at_full_size & {*those} for those in hunt.huntable().values())


def test_a_runs_json_becomes_observables():
    check = partial(as_check, measured=1, expected=2)
    run = {"checks": [check(("sent", "send", "payload"), ok=False),
                      check(("states", "parameters"), ok=True), check(("kept", "all"), ok=None)],
           "tolerance": {"loss": 1e-5}, "loss": [1.0, 2.0, None], "reference_loss": [1.0, 2.1, 3.0],
           "unlike": ["loss", "gradient norm", "gradients"]}
    assert observe.caught_in(run) == ("loss", "gradients", "gradient norm", "sent")
    clean, seen = (observe.Seen(0, (), losses, ()) for losses in ([4.0, 3.0, 2.0], [4.0, 3.3, 1.0]))
    assert observe.first_step(clean, seen) == 2 and observe.first_step(clean, clean) is None
    assert observe.relative_differences(clean, seen) == (0, 0.5)
    assert observe.relative_differences(clean, seen._replace(loss=[4.0, None])) == (None, None)


@pytest.mark.full
def test_the_command_prints_and_draws_an_exhibit(tmp_path, capsys):
    figure = tmp_path / "museum.png"
    assert command.main(["unsloth-zoo#1023", f"--out={figure}"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("✓")]
    assert line.split()[1:4] == ["unslothai/unsloth-zoo#1023", "2", "0"]
    assert figure.stat().st_size > 5000


@pytest.mark.full
def test_an_exhibit_that_is_not_caught_fails_the_command(monkeypatch, capsys):
    blind = EXHIBITS[2]._replace(new=EXHIBITS[2].old + "        pass\n")
    monkeypatch.setattr(museum, "exhibits", lambda: {"01": [blind]})
    assert command.main([]) == 1
    assert "✗ NOT caught" in capsys.readouterr().out


ROOM = (chapters.HERE / "10" / "exhibits.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("right", "wrong", "error"), [
    ('run = "published"', 'run = "publish"', "AI-Hypercomputer/maxtext#1972: .*runs.publish"),
    ('title = "one', 'titel = "one', "AI-Hypercomputer/maxtext#1972: title is missing"),
    ("blind = [", "blnd = [", "AI-Hypercomputer/maxtext#1972: blind is missing"),
    ('file = "10', 'ranks = 0\nfile = "10', "outside of all exhibits: there is no setting 'ranks'"),
    ("ranks = 0", "ranks = 1", "AI-Hypercomputer/maxtext#1972: 'table 1' is no observable"),
    ("ranks = 0", 'ranks = "0"', "AI-Hypercomputer/maxtext#1972: ranks .* is not a number"),
    ("[[exhibits]]", "[[exhibits]", "line")])
def test_a_wrong_file_is_one_clear_line(tmp_path, right, wrong, error):
    path = tmp_path / "exhibits.toml"
    path.write_text(ROOM.replace(right, wrong, 1))
    with pytest.raises(ValueError, match=error) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


def test_a_bad_argument_costs_one_line(capsys):
    with pytest.raises(SystemExit) as leaving:
        command.main(["12"])
    [line] = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and "EXHIBIT 12" in line
