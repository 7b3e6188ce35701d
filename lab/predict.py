"""Five predictions about a run: lab/classroom/predict.py."""

from lab.classroom import predict
from lab.cli import commands

if __name__ == "__main__":
    commands.program(predict.main)
