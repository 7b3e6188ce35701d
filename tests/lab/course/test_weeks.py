"""The ten weeks: nothing is lost, everything that they name exists, and times are as promised."""

import shlex

from lab.classroom import exercises, hunt, predict
from lab.course import drawn, times
from lab.course.week import TABLE, room_of
from lab.course.weeks import WEEKS
from lab.museum import observe
from lab.page import reading
from lab.sources import SOURCES, texts


def test_every_exercise_belongs_to_one_week():
    assert [week.number for week in WEEKS] == list(range(1, 11))
    numbers = [number for week in WEEKS for number in (*week.required, *week.optional)]
    assert sorted(numbers) == sorted(TABLE)
    rooms = [room for week in WEEKS for room in week.rest]
    assert sorted(rooms) == sorted(set(map(room_of, TABLE)))


def test_a_week_takes_as_long_as_promised():
    least, most = times.PROMISED
    for week in WEEKS:
        assert 60 * least <= sum(times.of_week(week).values()) <= 60 * most, week.number


def test_files_are_read_before_they_are_needed():
    """Those that an exercise, a hunt and a prediction are about, and those that they build on; and
    no solution calls what a later week asks for."""
    known, sofar = set(), set()
    for week in WEEKS:
        assert set(week.reads) <= reading.files_to_read().keys()
        known |= set(map(exercises.short, week.reads))
        assert {*map(room_of, week.required), week.hunt.chapter, week.predicts} <= known
        for room in set(map(room_of, week.required)):
            assert set(times.builds_on(room)) <= known, room
        numbers = *week.required, *week.optional
        sofar |= set(numbers)
        for number in numbers:
            assert set(times.calls(number)) <= sofar, number


def test_hunts_predictions_and_texts_are_there():
    """A hunt needs no more ranks than a laptop has, and no two weeks have the same bug."""
    found = {source.name: source.number for source in SOURCES}
    for week in WEEKS:
        exhibit = hunt.draw(week.hunt.chapter, week.hunt.seed)
        assert exhibit in hunt.huntable()[week.hunt.chapter] and exhibit.ranks <= 4
        assert week.hunt.level in times.HUNT and observe.sources(exhibit)
        program, words = week.prediction.split(" lab.predict ")
        args = predict.parse(shlex.split(words))
        assert program == "python -m" and args.seed == week.number
        for name, places in week.texts.items():
            assert set(places) <= {row.where for row in texts.MODULES[found[name]].ROWS}, name
    bugs = [hunt.draw(week.hunt.chapter, week.hunt.seed).title for week in WEEKS]
    assert len(set(bugs)) == len(WEEKS)


def test_figures_are_there_and_somebody_draws_them():
    for figure in {point.figure for week in WEEKS for point in week.outline if point.figure}:
        assert drawn.file_of(figure).exists() and drawn.by(figure), figure


def test_times_and_who_calls_whom():
    assert times.lines_to_write("04.1") == 1 and times.calls("00.1") == ()
    assert times.calls("00.9") == ("00.2", "00.3", "00.4", "00.5", "00.6")
    assert "02.3" in times.calls("02.4")
