"""The figures of the course, as a page shows them."""

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from PIL import Image

from lab import ROOT

FOLDER = ROOT / "figures"


class Figure(NamedTuple):
    address: str
    caption: str
    width: int
    height: int

    @property
    def is_tall(self):
        """Whether a page shows its upper part first. Most figures are pictures below each other."""
        return self.height > self.width / 2


def figure(name, caption):
    """The Figure of a file of figures/, or None: there is no such file."""
    path = FOLDER / f"{name}.png"
    if not path.exists():
        return None
    return Figure(f"figures/{path.name}", " ".join((caption or "").split()), *size(path))


def size(path):
    """(width, height) of a picture, so that a page keeps room for it."""
    path = Path(path)
    if path.suffix == ".svg":
        drawn = ElementTree.parse(path).getroot()
        return drawn.get("width"), drawn.get("height")
    with Image.open(path) as image:
        return image.size
