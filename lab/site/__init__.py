"""The course in a browser, made from the files themselves: `python -m lab.site`.

    prose       a docstring as HTML
    source      a file in pieces: a function, what is said of it, its lines with links
    reading     pages that are read: chapters, the front page, what search looks through
    tables      the five texts: what does not hold, and where they differ
    answers     what the pages that compute ask: the planner's, the schedules', the ring's functions
    server      on 127.0.0.1; or all of it as files
    files/      templates (Jinja, which torch brings along), style, and scripts without a library
"""
