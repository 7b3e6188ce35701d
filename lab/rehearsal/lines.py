"""Lines of sources: which one runs, what it is told by, and what stands there."""

import linecache
import sys
from collections.abc import Container
from pathlib import Path

Line = tuple[str, int]      # file, number


def line_in(files: Container[str]) -> Line | None:
    """The line of these files that the innermost frame runs, or None."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename not in files:
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else None


def named(line: Line) -> str:
    """As in "09_5d.py:194"."""
    return f"{Path(line[0]).name}:{line[1]}"


def source_of(line: Line) -> str:
    """What stands there, without its comment."""
    return linecache.getline(*line).partition("  # ")[0].strip()
