"""Answers in the reader's browser: files/files.js starts Python there, and calls `answer`."""

import json
from urllib.parse import parse_qsl

from lab.site import without_torch

without_torch.install()

from lab.site import answers  # noqa: E402 (it imports torch)


def answer(line):
    """The answer to a question such as "roofline?chips=64&model=8b", as JSON."""
    name, _, query = line.partition("?")
    asked = {key: number_or_text(value) for key, value in parse_qsl(query)}
    return json.dumps(answers.answer(name, asked))


def number_or_text(text):
    for kind in int, float:
        try:
            return kind(text)
        except ValueError:
            pass
    return text
