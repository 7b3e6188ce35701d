"""What differs from student to student: the numbers of questions, and hunts. A name draws them, so
that a teacher who knows the name can draw the same again."""

import hashlib
import unicodedata

from common import Refused

LONGEST = 100           # letters of a name


def name(text):
    """An argparse type: a student's name, in one line. How it is spaced and whether its letters are
    large makes no difference. Raises Refused for none."""
    found = unicodedata.normalize("NFC", " ".join(text.split())).casefold()
    if not found or len(found) > LONGEST or not found.isprintable():
        raise Refused(f"{text!r} is no name of 1 to {LONGEST} letters", "ada")
    return found


def seed_of(student, what, below):
    """The seed in [0, below) of a student for this: the same on every machine."""
    found = hashlib.sha256(f"{what}\n{student}".encode(errors="surrogateescape")).digest()
    return int.from_bytes(found[:8], "big") % below
