"""One line for each run whose JSON is given: lab/run/runs.py."""

from lab.run import commands, runs

if __name__ == "__main__":
    commands.program(runs.main)
