"""benchmarks/RESULTS.md: a section for each benchmark, each written anew by its --record."""

from pathlib import Path

from common import Refused
from lab.cli import commands

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
TITLE = "# Measured\n\nMachines are noisy: trust the ratios, within the ranges, and not the rest."


def record(section, lines, path=None):
    """Replace the section (`## name`) of RESULTS.md, or add it; the others stay as they are. path:
    of another such file."""
    path = path or RESULTS
    text = path.read_text() if path.exists() else ""
    _, *parts = text.split("\n## ")
    sections = dict(part.split("\n", 1) for part in parts)
    sections[section] = "\n" + "\n".join(lines) + "\n"
    body = "\n".join(f"## {name}\n{content.rstrip()}\n" for name, content in sections.items())
    whole = path.with_name(f"{path.name}.new")
    whole.write_text(f"{TITLE}\n\n{body}")
    whole.replace(path)                                 # who is killed now leaves one of them whole


def tell(lines, section, is_recorded):
    """Print each line as it comes; then record all, if they are to be."""
    told = []
    for line in lines:
        print(line, flush=True)
        told.append(line)
    if is_recorded:
        record(section, told)


def refuse_record():
    """Raise Refused where RESULTS.md cannot be written: before anything is measured."""
    try:
        commands.try_to_write(RESULTS, is_file=True)
    except OSError as error:
        raise Refused(f"--record cannot write {RESULTS}: {error.strerror}",
                      "without --record") from None
