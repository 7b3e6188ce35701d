"""The museum: each plant applies once, and is caught by what it names, and by that alone."""

import pytest
from conftest import ROOT, run_main

from lab.museum import chapter_00, chapter_10, observe


def each(*exhibits):
    return pytest.mark.parametrize("exhibit", exhibits, ids=lambda exhibit: exhibit.number)


@each(*chapter_00.EXHIBITS, *chapter_10.EXHIBITS)
def test_an_exhibit_is_told_in_a_few_sentences(exhibit):
    repository, number = exhibit.number.split("#")
    assert repository.count("/") == 1 and number.isdecimal()
    assert 3 <= exhibit.story.count(". ") + 1 <= 6
    compile(exhibit.plant((ROOT / exhibit.file).read_text()), exhibit.file, "exec")


@each(*chapter_00.EXHIBITS)
def test_a_planted_bug_is_caught_by_what_it_names(ranks, tmp_path, exhibit):
    fault = exhibit.old, exhibit.new
    (status, run, output), *_ = ranks(exhibit.ranks)(
        run_main, exhibit.file.removesuffix(".py"), exhibit.flags.split(), tmp_path, fault)
    ok = {check["name"]: check["ok"] for check in run["checks"]}
    assert status == 1, output
    assert [ok[name] for name in exhibit.caught_by] == [False] * len(exhibit.caught_by), output
    assert [ok[name] for name in exhibit.blind] == [True] * len(exhibit.blind), output


def test_where_nothing_is_planted_nothing_is_found(ranks, tmp_path):
    (status, run, _), *_ = ranks(4)(run_main, "00_collectives", ["--numbers=3"], tmp_path)
    assert status == 0 and not run["problems"]


@each(chapter_10.EXHIBITS[0], *[pytest.param(exhibit, marks=pytest.mark.full)
                                for exhibit in chapter_10.EXHIBITS[1:]])
def test_a_planner_with_a_bug_is_caught_by_the_tables_that_are_named(exhibit):
    right, planted = (observe.play(exhibit.file, source, exhibit.ranks, exhibit.flags)
                      for source in observe.sources(exhibit))
    assert (right.status, right.caught) == (0, ())
    assert planted.status == 1 and {*exhibit.caught_by} <= {*planted.caught}
    assert not {*exhibit.blind} & {*planted.caught}
