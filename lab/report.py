"""One line for each run whose JSON is given: lab/bench/runs.py."""

from lab.bench import runs
from lab.cli import commands

if __name__ == "__main__":
    commands.program(runs.main)
