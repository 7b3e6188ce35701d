"""Answers in the reader's browser, where a page is files and nobody else computes.

files/python.js starts Python there and gives it these sources. `begin` is called once, before
anything else of ours is imported; then each question is one call of `answer`.
"""

import json
from urllib.parse import parse_qsl

from lab.site import without_torch


def begin():
    """Import what answers, with names in place of torch; and search here: there are no processes.
    A search that takes too long is ended by ending Python."""
    without_torch.install()
    from lab.site import plans

    plans.searched = searched


def answer(query):
    """JSON of the answer to a question such as "memory?ranks=4", or of {"error": a line}."""
    from common import Refused
    from lab.run.refusals import one_line
    from lab.site import answers

    name, _, asked = query.partition("?")
    try:
        asked = dict(parse_qsl(asked, keep_blank_values=True))
        return json.dumps(answers.QUESTIONS[name](asked))
    except Refused as refused:
        return json.dumps({"error": one_line(refused.args[0])})


def searched(argv, seconds, is_gone):
    """In place of `plans.searched`."""
    from lab.run.refusals import one_line, refusal
    from lab.site import plans, search

    ten = plans.ten()
    forgetful = {name: getattr(ten, name) for name in search.READS}
    try:
        return json.loads(json.dumps(search.found(search.remembering(ten), argv)))
    except refusal() as refused:
        why = plans.in_words_of_the_page(one_line(refused.args[0]))
        raise plans.Refused(why) from None
    finally:
        vars(ten).update(forgetful)                     # the next search may be of another machine
