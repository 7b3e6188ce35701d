"""Programs in processes of their own (lab/run/ranks.py), with functions of theirs replaced."""

import functools
import sys
import time
from unittest import mock

import pytest

from lab.run import ranks

# Of a test in which ranks without a launcher, and without a short timeout, miss one that has ended.
gloo_tells = pytest.mark.skipif(
    sys.platform == "darwin", reason="on macOS, gloo waits for who has ended until a timeout")


def replace(patches):
    """Patch, until the process ends."""
    for patch in patches:
        mock.patch(*patch).start()  # until the process ends


class Ranks(ranks.Ranks):
    """patches: for mock.patch, {rank: a list}."""

    def __init__(self, *words, patches=None, **more):
        first = {rank: functools.partial(replace, of) for rank, of in (patches or {}).items()}
        super().__init__(*words, first=first, **more)

    def until(self, words, timeout=120):
        """Wait until rank 0 has printed that."""
        end = time.monotonic() + timeout
        while words not in self.out(0):
            assert time.monotonic() < end and self.processes[0].is_alive(), self.out() + self.err()
            time.sleep(0.01)


def run(*words, timeout=300, **more):
    """A program to its end: (exit status of each rank, what they printed, and to stderr)."""
    return ranks.run(*words, timeout=timeout, launch=Ranks, **more)
