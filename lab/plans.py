"""Draws chapter 10: lab/planner/plans.py."""

from lab.cli import commands
from lab.planner import plans

if __name__ == "__main__":
    commands.program(plans.main)
