"""The project: a layout for a model and a cluster. Each group of students gets one of these."""

from typing import NamedTuple

from lab.chapters import chapter
from lab.planner import planning
from lab.sources.texts import shown

HOURS = 20              # of work for each student, an estimate


class Project(NamedTuple):
    model: str
    cluster: str
    gpus: int
    batch: int              # sequences of a step

    @property
    def words(self):
        return ["--model", self.model, "--cluster", self.cluster, "--gpus", str(self.gpus),
                "--batch", str(self.batch)]

    @property
    def command(self):
        return " ".join(["python 10_planner.py", *self.words])

    def best(self):
        """The fastest layout that fits, as the command finds it: (in words, seconds, bytes)."""
        ten = chapter("10")
        _, asked = planning.question(ten, self.words)
        plan = planning.best(asked.find(asked.gpus, asked.fixed))
        return (planning.in_words(ten, plan.layout), shown(plan.total, "s"),
                shown(plan.bytes, "B"))


PROJECTS = (
    Project("22b", "a100", 64, 256),
    Project("70b", "h100", 64, 256),
    Project("70b", "h100", 256, 512),
    Project("mixtral", "h100", 64, 256),
    Project("175b", "a100", 512, 1024),
    Project("405b", "h200", 1024, 512),
)
RUBRIC = (                  # (points, for what)
    (20, "On paper: bytes of model states and of activations of a GPU, by the formulas of chapters "
         "01 to 08, for three layouts. For one that does not fit it is said what is too much."),
    (20, "Measured: the same axes at a small size, on the ranks that there are. The report of "
         "09_5d.py is ✓ in each row, and each number that is sent is derived from a formula."),
    (15, "The planner's predictions beside this machine (python -m lab.here): how far off is it "
         "for the axes of the layout, and why?"),
    (20, "Planned beyond: the layout, and two others which were considered. Each differs in one "
         "axis, and is slower or larger for a reason that is told in seconds or bytes."),
    (10, "Rehearsed: one rank of it (python -m lab.rehearse). What does the planner leave out?"),
    (15, "The report: four pages. Each number says whether it is computed, measured or planned, "
         "and the command that gives it."),
)
