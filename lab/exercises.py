"""The exercises, and the chapters with holes: lab/classroom/exercises.py."""

from lab.classroom import exercises
from lab.run import commands

if __name__ == "__main__":
    commands.program(exercises.main)
