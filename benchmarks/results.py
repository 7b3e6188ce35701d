"""What the benchmarks share: lines of their tables, and RESULTS.md, a section for each of them."""

import datetime
import os
import platform
import statistics
import sys
from pathlib import Path

import torch

from common import Refused
from lab.run import commands

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
TITLE = "# Measured\n\nMachines are noisy: trust the ratios, within the ranges, and not the rest."


def machine():
    """Date, machine and versions, for the line above a table."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (f"{datetime.date.today()}, {os.cpu_count()} CPU cores{gpu}, torch {torch.__version__}, "
            f"Python {platform.python_version()}")


def on_ranks(ranks, *words):
    """The words that start a program of Python: on more than one rank, with torchrun."""
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *launcher, *map(str, words)]


def header(*names):
    """The first two lines of a table in Markdown."""
    return f"| {' | '.join(names)} |\n|{' --- |' * len(names)}"


def row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def middle(values, digits=1):
    """The median, with the range of the middle half."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def record(section, lines, path=None):
    """Replace the section (`## name`) of RESULTS.md, or of another such file, or add it; the others
    stay as they are."""
    path = path or RESULTS
    text = path.read_text() if path.exists() else ""
    _, *parts = text.split("\n## ")
    sections = dict(part.split("\n", 1) for part in parts)
    sections[section] = "\n" + "\n".join(lines) + "\n"
    body = "\n".join(f"## {name}\n{content.rstrip()}\n" for name, content in sections.items())
    whole = path.with_name(f"{path.name}.new")
    whole.write_text(f"{TITLE}\n\n{body}")
    whole.replace(path)                                 # Ctrl-C leaves one of them whole


def tell(lines, section, is_recorded):
    """Print each line as it comes; then record all, if they are to be."""
    printed = []
    for line in lines:
        print(line, flush=True)
        printed.append(line)
    if is_recorded:
        record(section, printed)


def refuse_record():
    """Raise Refused where RESULTS.md cannot be written: before anything is measured."""
    try:
        commands.try_to_write(RESULTS, is_file=True)
    except OSError as error:
        raise Refused(f"--record cannot write {RESULTS}: {error.strerror}",
                      "without --record") from None
