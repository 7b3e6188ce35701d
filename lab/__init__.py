"""The bench that a run is put on: nothing here has to be read to follow the course.

The files here are commands, `python -m lab.NAME`; what they are made of lies in the rooms beside.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent           # of the course
