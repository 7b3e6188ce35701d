"""The folder that students get: lab/classroom/bundle.py."""

from lab.classroom import bundle
from lab.run import commands

if __name__ == "__main__":
    commands.program(bundle.main)
