"""The ten weeks: nothing is lost, everything that they name exists, and times are as promised."""

import shlex

import pytest

from lab import ROOT, chapters, pictures, plans, tour
from lab.classroom import exercises, hunt, predict
from lab.course import drawn, times
from lab.course.week import TABLE, Hunt, Week, room_of
from lab.course.weeks import WEEKS
from lab.museum import observe
from lab.page import reading
from lab.sources import SOURCES, texts

EVERY = pytest.mark.parametrize("week", WEEKS, ids=lambda week: str(week.number))


def test_every_exercise_belongs_to_one_week():
    numbers = [number for week in WEEKS for number in (*week.required, *week.optional)]
    assert sorted(numbers) == sorted(TABLE)
    rooms = [room for week in WEEKS for room in week.rest]
    assert sorted(rooms) == sorted(set(map(room_of, TABLE)))


def test_an_exercise_that_nobody_requires_is_optional():
    week = Week(1, "", (), {}, ("02.3",), ("02",), Hunt("02", 0), "02", ())
    assert len(week.optional) == len(exercises.EXERCISES["02_data_parallel"]) - 1
    assert "02.3" not in week.optional and week._replace(rest=()).optional == ()


def test_weeks_are_counted():
    assert [week.number for week in WEEKS] == list(range(1, 11))


@EVERY
def test_a_week_takes_as_long_as_promised(week):
    least, most = times.PROMISED
    assert 60 * least <= sum(times.of_week(week).values()) <= 60 * most


@EVERY
def test_files_are_read_before_they_are_needed(week):
    """What an exercise, a hunt and a prediction are about; and what their chapters build on."""
    read = [name for one in WEEKS[:week.number] for name in one.reads]
    known = {exercises.short(name) for name in read}
    assert set(map(room_of, week.required)) <= known
    assert {week.hunt.chapter, week.predicts} <= known
    for room in set(map(room_of, week.required)):
        assert set(times.builds_on(room)) <= known, room
    assert set(week.reads) <= reading.files_to_read().keys()


@EVERY
def test_what_a_solution_calls_is_no_later_week(week):
    sofar = {number for one in WEEKS[:week.number] for number in (*one.required, *one.optional)}
    for number in (*week.required, *week.optional):
        assert set(times.calls(number)) <= sofar, number


@EVERY
def test_its_hunt_is_there(week):
    """On no more ranks than a laptop has; and no two weeks have the same bug."""
    exhibit = hunt.draw(week.hunt.chapter, week.hunt.seed)
    assert exhibit in hunt.huntable()[week.hunt.chapter] and exhibit.ranks <= 4
    assert week.hunt.level in times.HUNT and observe.sources(exhibit)
    drawn_by_all = [hunt.draw(one.hunt.chapter, one.hunt.seed).title for one in WEEKS]
    assert len(set(drawn_by_all)) == len(WEEKS)


@EVERY
def test_its_prediction_asks_five_questions(week):
    program, words = week.prediction.split(" lab.predict ")
    args = predict.parse(shlex.split(words))
    _, asked = predict.questions(args.chapter, args.seed)
    assert program == "python -m" and args.seed == week.number and len(asked) == 5


@EVERY
def test_the_places_of_texts_are_there(week):
    numbers = {source.name: source.number for source in SOURCES}
    for name, places in week.texts.items():
        known = {row.where for row in texts.MODULES[numbers[name]].ROWS}
        assert set(places) <= known, name


@EVERY
def test_each_point_shows_one_thing(week):
    assert 8 <= len(week.outline) <= 14
    titles = [point.title for point in week.outline]
    assert len(set(titles)) == len(titles)
    for point in week.outline:
        assert sum(map(bool, (point.begins, point.figure, point.question))) == 1, point.title


# --------------------------------------------------------------------------------------- figures

@pytest.mark.parametrize("figure", sorted({point.figure for week in WEEKS
                                           for point in week.outline if point.figure}))
def test_a_figure_is_there_and_its_command_draws_it(figure):
    assert drawn.file_of(figure).exists()
    for command in drawn.by(figure).split("; "):
        words = shlex.split(command)
        if words[:2] == ["make", "figures"]:
            room = words[2].removeprefix("ONLY=")
            assert room in tour.rooms() and figure in pictures.FIGURES
            assert any(stop.drawn_on is not None for stop in tour.stops_of(room, figures=True))
        elif words[:3] == ["python", "-m", "lab.plans"]:
            assert plans.parse(words[3:]).picture == [figure] and figure in plans.PICTURES
        elif words[0] == "make":
            made = (ROOT / "Makefile").read_text().partition(f"\n{words[1]}:")[2].split("\n\n")[0]
            assert f"figures/{figure}.png" in made or figure in pictures.FIGURES
            assert made
        elif words[1] == "-m":
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists()
            assert f"figures/{figure}.png" in command or figure in pictures.FIGURES
        else:
            text = (ROOT / words[1]).read_text()
            assert f"figures/{figure}.png" in text


# ----------------------------------------------------------------------------------------- times

def test_lines_of_a_solution_are_counted_without_what_nobody_writes():
    assert times.lines_to_write("04.1") == 1            # return summed(...), None
    source = exercises.solution("04_tensor_parallel")
    at = source.index("    def forward(ctx, logits, targets")
    body = source[at:source.index("\n\n\n", at)]
    assert 10 < times.lines_to_write("04.3") < body.count("\n")


def test_an_exercise_takes_longer_if_its_level_or_its_solution_does():
    numbers = sorted(TABLE, key=times.lines_to_write)
    for level in times.BEFORE:
        minutes = [times.of_exercise(n) for n in numbers if TABLE[n][1].level == level]
        assert minutes == sorted(minutes)
    assert times.of_exercise("04.1") == 5 and times.in_hours(390) == "6.5 h"


def test_who_calls_whom():
    assert times.calls("00.9") == ("00.2", "00.3", "00.4", "00.5", "00.6")
    assert times.calls("00.1") == () and "02.3" in times.calls("02.4")
    assert times.before(WEEKS[0]) == [] and times.before(WEEKS[5]) == ["00", "01", "04"]
    assert set(times.BUILDS_ON) <= set(map(room_of, TABLE))
    for room, others in times.BUILDS_ON.items():
        assert set(others.split()) <= set(map(room_of, TABLE)) | set(chapters.ROOMS), room
