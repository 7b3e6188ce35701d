"""The course as a site, made from the files themselves: `python -m lab.site`.

    build       writes all of it to a folder, which any server of files can serve
    pages       the pages that are read: chapters, the front page, what search looks through
    source      a file in pieces: a function, its docstring, its lines with links
    prose       a docstring as HTML
    markdown    the pages of pages/ as HTML
    texts       the five texts: what does not hold, and where they differ
    tools       what plays in a lesson, or on a page of its own
    answers     what the tools ask: plans, schedules, rings, collectives, cuts, memory, rooflines
    in_browser  the same answers in the reader's browser, by a Python that browsers run
    files/      templates (Jinja), style, and scripts without a library
"""
