"""The figures of the README, light enough for a page: as WebP, and as small ones for its cards.

They are made when they are asked for, and kept while their file stays as it is. A figure has few
colors, so a palette loses nothing that is seen, and WebP then keeps each number as it is.
"""

import io
from functools import lru_cache
from typing import NamedTuple

from PIL import Image

from lab import ROOT

FOLDER = ROOT / "figures"
COLORS = 64
CARD = 320, 180             # pixels: its upper left, if it is taller than that


class Figure(NamedTuple):
    name: str
    shows: str              # in words
    width: int
    height: int

    @property
    def address(self):
        return f"figures/{self.name}.webp"

    @property
    def is_tall(self):
        """A page shows its upper part first."""
        return self.height > self.width / 2

    @property
    def card(self):
        return f"figures/{self.name}-card.webp"


def figure(name, shows):
    """What a page says of a figure, or None: there is no such file."""
    path = FOLDER / f"{name}.png"
    return Figure(name, " ".join(shows.split()), *size(path, path.stat().st_mtime)) \
        if path.exists() else None


@lru_cache(maxsize=64)
def size(path, changed):
    with Image.open(path) as image:
        return image.size


def whole(name):
    """Its bytes."""
    path = FOLDER / f"{name}.png"
    return as_webp(path, path.stat().st_mtime)


def card(name):
    """The bytes of the small one."""
    path = FOLDER / f"{name}.png"
    return as_webp(path, path.stat().st_mtime, *CARD)


@lru_cache(maxsize=128)
def as_webp(path, changed, width=None, height=None):
    """A file's picture, or a small one. changed: when the file was, so that a new one is read."""
    written = io.BytesIO()
    with Image.open(path) as image:
        image = image.convert("RGB")
        if width:
            shrunk = image.resize((width, round(image.height * width / image.width)),
                                  Image.Resampling.LANCZOS)
            shrunk.crop((0, 0, width, min(height, shrunk.height))).save(
                written, "WEBP", quality=75, method=4)
        else:
            few = image.quantize(COLORS, dither=Image.Dither.NONE).convert("RGB")
            few.save(written, "WEBP", lossless=True, method=2)
    return written.getvalue()
