"""The museum: each plant applies once, is caught by what it names, and by nothing that is blind."""

import json
import re
import subprocess
from functools import partial

import pytest

from lab import chapters, museum
from lab.bench.about import KINDS, as_check
from lab.classroom import checks, hunt
from lab.museum import __main__ as command
from lab.museum import observe
from lab.museum.exhibit import Exhibit
from tests.conftest import ROOT

EXHIBITS = [exhibit for those in museum.exhibits().values() for exhibit in those]
NAMES = [f"{room}-{exhibit.number}"
         for room, those in museum.exhibits().items() for exhibit in those]


ALWAYS = "02", "04", "07", "10", "checkpoints"  # of these rooms the first exhibit
MOST = 12  # of all rooms that a change touches, spread over them


def changed():
    """The files that a change touches, as git knows it: since it left origin/main, or else since
    the commit before, and what is not committed."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True
                                        ).stdout.split()  # fmt: skip
    [head], base = git("rev-parse", "HEAD") or [""], git("merge-base", "HEAD", "origin/main")
    since = base if base not in ([], [head]) else ["HEAD~1"]
    return [*git("diff", "--name-only", *since), *git("ls-files", "--others", "--exclude-standard")]


def room_of(file):
    """Of a file: the room of lab/chapters that has exhibits of it; None if it has none of its own.
    """
    folder, _, rest = file.partition("/")
    if file.startswith("lab/chapters/"):
        return file.split("/")[2]
    if file.startswith("lab/checkpoints/"):
        return "checkpoints"
    return "kernels" if folder == "kernels" else file[:2] if not rest else None


def sampled(names, files):
    """Those of `names` that `make test` plays: always the same, and some that these files touch."""
    touched = {room_of(file) for file in files}
    chosen = [name for name in names if name.partition("-")[0] in touched]
    chosen = chosen[:: -(-len(chosen) // MOST) or 1]
    return {*chosen, *(next(name for name in names if name.startswith(f"{room}-"))
                       for room in ALWAYS)}  # fmt: skip


SAMPLE = sampled(NAMES, changed())
SOME = pytest.mark.parametrize("exhibit", [
    pytest.param(exhibit, marks=[] if name in SAMPLE else pytest.mark.full, id=name)
    for name, exhibit in zip(NAMES, EXHIBITS)])


def test_what_a_change_touches_is_played():
    """Of many exhibits a part, but of each room that is touched one; and the same ones always."""
    least = sampled(NAMES, ["README.md", "common.py", "lab/bench/report.py"])
    assert [name.partition("-")[0] for name in NAMES if name in least] == [*ALWAYS]
    for files, room in ((["06_context_parallel.py"], "06"), (["lab/chapters/03/figure.py"], "03"),
                        (["kernels/elu.py"], "kernels"),
                        (["lab/checkpoints/saving.py"], "checkpoints")):  # fmt: skip
        of_room = [name for name in NAMES if name.startswith(f"{room}-")]
        part = of_room[::2] if len(of_room) > MOST else of_room     # 06 has more than that
        assert len(part) <= MOST and sampled(NAMES, files) == least | {*part}
    every = sampled(NAMES, [f"lab/chapters/{room}/exhibits.py" for room in chapters.ROOMS])
    assert least <= every and len(every) <= MOST + len(ALWAYS)
    assert len({name.partition("-")[0] for name in every}) >= len(chapters.ROOMS) - 2


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


def test_there_are_as_many_of_each_room_as_is_said():
    counts = {room: len(those) for room, those in museum.exhibits().items()}
    assert [*counts] == chapters.ROOMS and min(counts.values()) >= 5
    assert len({(exhibit.file, exhibit.old, exhibit.new) for exhibit in EXHIBITS}) == len(EXHIBITS)
    page = (ROOT / "pages/museum.md").read_text(encoding="utf-8")
    assert f"[`lab/museum/`](../lab/museum) has {len(EXHIBITS)} such bugs" in page


def test_every_observable_is_needed():
    """But for a schedule's time: what is slow is not silent."""
    for name in {*observe.OBSERVABLES} - {"time"}:
        assert any(name in exhibit.caught_by for exhibit in EXHIBITS), name


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=NAMES)
def test_an_exhibit_is_told_and_applies(exhibit):
    """Once; and the file with it is still Python."""
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", exhibit.number)
    assert 3 <= len(re.findall(r"[.?!](?: |$)", exhibit.story)) <= 6, exhibit.story
    assert exhibit.caught_by and not {*exhibit.caught_by} & {*exhibit.blind}
    assert bool(exhibit.rehearsal) == ("rehearsal" in exhibit.caught_by)
    right, planted = observe.sources(exhibit)
    assert right != planted
    compile(planted, exhibit.file, "exec")


@SOME
def test_an_exhibit_is_caught_by_what_it_names(exhibit):
    flags = observe.flags_of(exhibit, "sgd")
    if observe.trains(exhibit) and not exhibit.before:
        flags += " --steps=5"                               # as many as are compared
    right, planted = observe.play_both(exhibit, flags)
    assert (right.status, right.caught) == (0, ()), right.said
    assert planted.status == 1 and {*exhibit.caught_by} <= {*planted.caught}, planted
    assert not {*exhibit.blind} & {*planted.caught}, planted


def test_what_shows_at_full_size_alone_is_in_no_hunt():
    """A hunt's file is run, and would call itself right."""
    at_full_size = {exhibit for exhibit in EXHIBITS if exhibit.rehearsal}
    assert len(at_full_size) >= 5
    assert all(exhibit.caught_by == ("rehearsal",) for exhibit in at_full_size)
    assert not any(at_full_size & {*those} for those in hunt.huntable().values())


def test_a_plant_that_does_not_apply_says_so():
    exhibit = EXHIBITS[0]._replace(old="there is no such line")
    with pytest.raises(ValueError, match="has 0 times: there is no such line"):
        observe.sources(exhibit)


def test_kinds_of_checks_are_observables():
    assert {*KINDS} <= {*observe.OBSERVABLES}
    with pytest.raises(ValueError, match="a check of tp: send, calls is of no kind 'sends'"):
        as_check(("sends", "send", "calls", "tp"), 1, 2, False)


def test_what_a_run_says_becomes_observables():
    check = partial(as_check, measured=1, expected=2)
    run = {"checks": [check(("sent", "send", "payload"), ok=False),
                      check(("states", "parameters"), ok=True), check(("kept", "all"), ok=None)],
           "tolerance": {"loss": 1e-5}, "loss": [1.0, 2.0, None], "reference_loss": [1.0, 2.1, 3.0],
           "unlike": ["loss", "gradient norm", "gradients"]}
    assert observe.of_record(run) == ("loss", "gradients", "gradient norm", "sent")
    clean, seen = (observe.Seen(0, (), losses, ()) for losses in ([4.0, 3.0, 2.0], [4.0, 3.3, 1.0]))
    assert observe.first_step(clean, seen) == 2 and observe.first_step(clean, clean) is None
    assert observe.silence(clean, seen) == (0, 0.5)
    assert observe.silence(clean, seen._replace(loss=[4.0, None, 1.0])) == (None, None)


def test_the_command_tells_of_an_exhibit_and_draws_it(tmp_path, capsys):
    figure, file = tmp_path / "museum.png", tmp_path / "museum.json"
    status = command.main(["unsloth-zoo#1023", f"--out={figure}", f"--json={file}", "--stories"])
    said = capsys.readouterr().out
    assert status == 0 and "✓ unslothai/unsloth-zoo#1023" in said and "hides it" in said
    assert "1 of 1 caught; AdamW hides 1; without a bug nothing was found" in said
    assert "divided by the tokens, and by the micro-batches" in said
    [told] = json.loads(file.read_text())
    assert told["first loss"] == 0 and told["step"] == 2 and figure.stat().st_size > 5000


def test_an_exhibit_that_is_not_caught_fails_the_command(monkeypatch, capsys):
    blind = EXHIBITS[2]._replace(new=EXHIBITS[2].old + "        pass\n")
    monkeypatch.setattr(museum, "exhibits", lambda: {"01": [Exhibit(*blind)]})
    assert command.main([]) == 1
    assert "✗ NOT caught" in capsys.readouterr().out


def test_an_exhibit_that_is_not_there_costs_one_line(capsys):
    with pytest.raises(SystemExit) as leaving:
        command.main(["12"])
    assert leaving.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "EXHIBIT 12" in line
