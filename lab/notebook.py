"""Writes the notebook, for who has installed nothing: Colab, Kaggle, or Jupyter.

    python -m lab.notebook                          write fivefold.ipynb
    python -m lab.notebook --repository ADDRESS     one that clones the course from there

What it says stands in lab/notebook.md: a block of Python there is a cell to run, and what lies
between two blocks is a cell to read. Without --repository, who opens it types the address.
"""

import json
import re
import sys
from pathlib import Path

from lab.run import commands, refusals

SOURCE = Path(__file__).with_suffix(".md")
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
NO_ADDRESS = 'REPOSITORY = ""'


def cell(number: int, kind: str, text: str) -> dict:
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"cell-{number:02}", "metadata": {}, **more,
            "source": text.strip("\n").splitlines(keepends=True)}


def notebook(repository: str) -> dict:
    """In version 4.5 of Jupyter's format. repository: what its first cell clones, or ""."""
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(NO_ADDRESS) == 1
    text = text.replace(NO_ADDRESS, f"REPOSITORY = {json.dumps(repository)}")
    parts = BLOCK.split(text)                           # in turn what is read, and what is run
    cells = [cell(number, "code" if number % 2 else "markdown", part)
             for number, part in enumerate(parts)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "cells": cells,
            "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}}}


def text_of(repository: str = "") -> str:
    """Of the file."""
    return json.dumps(notebook(repository), indent=1, ensure_ascii=False) + "\n"


def parse(argv):
    parser = commands.Parser("-m lab.notebook", description=__doc__)
    parser.add_argument("--repository", default="", metavar="ADDRESS",
                        help="what the notebook clones; default: its reader types it")
    parser.add_argument("--out", type=commands.output("fivefold.ipynb"), metavar="FILE",
                        default=Path("fivefold.ipynb"), help="default: fivefold.ipynb")
    return parser.parse_args(argv)


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text_of(args.repository), encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    commands.program(main)
