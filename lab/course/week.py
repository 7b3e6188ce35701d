"""What a week of the course is."""

from typing import NamedTuple

from lab.classroom.exercises import EXERCISES, chosen, short

TABLE = {exercise.number: (file, exercise)
         for file, exercises in EXERCISES.items() for exercise in exercises}


class Point(NamedTuple):
    """What a lecture says in one slide: pieces of a lesson; or a figure; or the numbers that answer
    a question of lab.questions."""

    title: str
    lesson: str = ""        # a file: "04_tensor_parallel"
    begins: tuple = ()      # how paragraphs and pictures of its lesson begin, in their order
    figure: str = ""        # figures/NAME.png
    question: int = 0


class Hunt(NamedTuple):
    chapter: str
    seed: int
    level: str = "easy"

    @property
    def command(self):
        level = f" LEVEL={self.level}" if self.level != "easy" else ""
        return f"make hunt CHAPTER={self.chapter} SEED={self.seed}{level}"


class Week(NamedTuple):
    number: int
    title: str
    reads: tuple            # files, by their names without .py
    texts: dict             # {a text's name: places of it, as lab.questions --seed has them}
    required: tuple         # numbers of exercises, in the order in which they are best solved
    rest: tuple             # chapters whose other exercises are optional in this week: "00", "elu"
    hunt: Hunt
    predicts: str           # the chapter that lab.predict asks about
    outline: tuple          # of Points

    @property
    def optional(self):
        """Numbers of exercises that nobody has to solve."""
        if not self.rest:
            return ()
        listed = [exercise.number for exercises in chosen(self.rest).values()
                  for exercise in exercises]
        return tuple(number for number in listed if number not in self.required)

    @property
    def prediction(self):
        """The same five questions for all of a class."""
        return f"python -m lab.predict {self.predicts} --seed {self.number}"


def room_of(number):
    """What an exercise's number begins with: "04" of "04.2"."""
    return short(TABLE[number][0])


def point(title, lesson, *begins):
    return Point(title, lesson, begins)


def picture(title, name):
    return Point(title, figure=name)


def numbers(title, question):
    return Point(title, question=question)
