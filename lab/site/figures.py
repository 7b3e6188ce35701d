"""The figures of the course, light enough for a page: as WebP, and as small ones for its cards.

They are made when they are asked for, and kept while their file stays as it is. A figure has few
colors, so a palette loses nothing that is seen, and WebP then keeps each number as it is.
"""

import io
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from PIL import Image

from lab import ROOT

FOLDER = ROOT / "figures"
COLORS = 64
UPPER = 0.45                # of the width
CARD = 320, 180             # pixels: its upper left, if it is taller than that


def upper_height(width):
    return round(width * UPPER)


class Figure(NamedTuple):
    name: str
    shows: str              # in words
    width: int
    height: int

    @property
    def address(self):
        return f"figures/{self.name}.webp"

    @property
    def upper(self):
        """What a page shows first: (address, height). Most are pictures below each other, and of
        what is tall the upper part is enough; else it is all."""
        if self.height <= self.width / 2:
            return self.address, self.height
        return f"figures/{self.name}-upper.webp", upper_height(self.width)

    @property
    def card(self):
        return f"figures/{self.name}-card.webp"

    def files(self):
        """{address: function that makes it}."""
        files = {self.upper[0]: upper, self.card: card, self.address: whole}
        return {address: lambda of=of: made(self.name, of) for address, of in files.items()}


def figure(name, shows):
    """What a page says of a figure, or None: there is no such file."""
    path = FOLDER / f"{name}.png"
    return Figure(name, " ".join(shows.split()), *size(path, path.stat().st_mtime)) \
        if path.exists() else None


@lru_cache(maxsize=64)
def size(path, changed):
    with Image.open(path) as image:
        return image.size


def sides(address):
    """(width, height) of what lies at figures/NAME.webp or figures/NAME.svg, for a page that keeps
    a place for it."""
    file = FOLDER / Path(address).name
    if file.suffix == ".svg":
        drawn = ElementTree.parse(file).getroot()
        return drawn.get("width"), drawn.get("height")
    path = file.with_suffix(".png")
    return size(path, path.stat().st_mtime)


def made(name, of):
    """The bytes of what `of`, such as `whole`, makes of a figure."""
    path = FOLDER / f"{name}.png"
    return as_webp(path, path.stat().st_mtime, of)


@lru_cache(maxsize=128)
def as_webp(path, changed, of):
    """What `of` writes of a file's picture. changed: when the file was: a new one is read."""
    written = io.BytesIO()
    with Image.open(path) as image:
        of(image.convert("RGB"), written)
    return written.getvalue()


def whole(image, written):
    few = image.quantize(COLORS, dither=Image.Dither.NONE).convert("RGB")
    few.save(written, "WEBP", lossless=True, method=2)


def upper(image, written):
    whole(image.crop((0, 0, image.width, upper_height(image.width))), written)


def card(image, written):
    width, height = CARD
    small = image.resize((width, round(image.height * width / image.width)),
                         Image.Resampling.LANCZOS)
    small.crop((0, 0, width, min(height, small.height))).save(written, "WEBP", quality=75, method=4)
