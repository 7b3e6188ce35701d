"""Other catalogues of silent bugs: each bug has an exhibit here, or a reason why it has none."""

import re

import pytest

from lab import museum
from lab.museum import __main__ as command
from lab.museum import published
from lab.museum.observe import OBSERVABLES

BUGS = [bug for those in published.CATALOGUES.values() for bug in those]
OURS = {(room, one.number): one for room, those in museum.exhibits().items() for one in those}


def test_each_bug_has_an_exhibit_or_a_reason():
    for bug in BUGS:
        assert bool(bug.exhibit) != bool(bug.why), bug
        assert not bug.exhibit or bug.exhibit in OURS, bug
        assert bug.thread and bug.what, bug
    assert len({bug.thread for bug in BUGS}) == len(BUGS)


def test_a_thread_that_the_museum_has_is_told_as_the_same():
    numbers = {number for _, number in OURS}
    for bug in BUGS:
        assert (bug.thread in numbers) == bool(bug.exhibit and bug.is_same_thread), bug


def test_there_are_as_many_as_was_published():
    """Of TrainCheck those that it detects, and threads that its authors have opened."""
    detected = [bug for bug in published.TRAINCHECK if bug.name != "its authors' thread"]
    assert len(detected) == 18 and len({bug.name for bug in detected}) == 18
    assert published.UNREAD.startswith(f"not listed: {20 - 18} of TrainCheck's 20")
    of_table = [bug for bug in published.TTRACE if bug.name == "of table 1"]
    assert published.UNREAD.endswith(f"and {14 - len(of_table)} of TTrace's 14")


def test_the_command_prints_the_table_and_plays_nothing(monkeypatch, capsys):
    monkeypatch.setattr(command, "play_all", None)
    assert command.main(["--published"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 102 and all(line == line.rstrip() for line in lines)
    said = [f"  {bug.thread}: {bug.what}" for bug in BUGS]
    assert [line for line in lines if line in said] == said

    told = dict(zip([bug.thread for bug in BUGS],
                    re.split(r"\n  \S+#?\d+: ", "\n" + "\n".join(lines[:-3]))[1:], strict=True))
    for bug in BUGS:
        text = " ".join(told[bug.thread].split())
        assert f"theirs: {bug.theirs or '(not told)'} " in text
        if bug.why:
            assert f"not here: {bug.why}" in text and "ours:" not in text
        else:                       # as its exhibit says, which test_museum holds to real runs
            caught = OURS[bug.exhibit].caught_by
            later = [name for name in OBSERVABLES if name in caught and name != "first loss"]
            first = "sees it" if "first loss" in caught else "does not"
            assert f": {', '.join(later)}; the first loss {first}" in text
            assert (f"by the mechanism of {bug.exhibit[1]}" in text) == (not bug.is_same_thread)
    same = sum(bool(bug.exhibit) and bug.is_same_thread for bug in BUGS)
    here = sum(bool(bug.exhibit) for bug in BUGS)
    assert lines[-3].startswith(f"{len(BUGS)} published bugs: {same} are exhibits, {here - same} ")
    assert lines[-3].endswith(f" {len(BUGS) - here} are not here")
    assert lines[-2].startswith(f"of the {here} here, the first loss sees ")


def test_the_first_loss_is_counted_where_it_sees_one(monkeypatch):
    see = [bug for bug in BUGS if bug.exhibit and "first loss" in OURS[bug.exhibit].caught_by]
    assert published.summary(OURS)[1].endswith(f"the first loss sees {len(see)}") and see
    monkeypatch.setattr(published, "CATALOGUES", {"one": see[:1]})
    assert published.summary(OURS)[1] == "of the 1 here, the first loss sees 1"


def test_an_exhibit_that_is_gone_is_missed():
    with pytest.raises(KeyError):
        published.table({"00": museum.exhibits()["00"]})


@pytest.mark.parametrize("words, said", [
    (["--published", "06"], "EXHIBIT 06 means nothing beside --published, which plays none; "
     "without 06 would work"),
    (["--json=x.json", "--published"], "--json means nothing beside --published, which plays no "
     "exhibit; without --json would work"),
    (["--published", "--stories"], "--stories means nothing beside --published, which plays no "
     "exhibit; without --stories would work")])
def test_what_means_nothing_beside_it_costs_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as leaving:
        command.main(words)
    assert leaving.value.code == 2 and capsys.readouterr().err == f"error: {said}\n"
