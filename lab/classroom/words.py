"""What became of a check, in sentences, with the lines that the student has written."""

import ast
import signal

from lab.classroom import holes

MISMATCH = ("since it got more or less than it expected: not all ranks call the same collectives "
            "in the same order, with tensors of the same size")


def in_words(outcome, source, line_of_student):
    """Why it is not right, in sentences. line_of_student(line): where in the student's file a line
    of this source is; None: it is not the student's."""
    def where(lines):
        return place_in_words(lines, source, line_of_student)

    if outcome.stuck:
        return [no_end(outcome, where)]
    if outcome.errors:
        return [what_was_raised(outcome, where)]
    if outcome.problems:
        return list(outcome.problems)
    if outcome.ended:
        return [end_of_a_process(outcome, where)]
    return ["the ranks have lost each other"]


def names_of(ranks):
    """`rank 2`, or `ranks 1, 2`."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


def no_end(outcome, where):
    """Which rank waits where."""
    groups = {}
    for rank, (collective, lines) in outcome.stuck.items():
        place = where(lines) or "the end of the run"
        groups.setdefault((collective, place), []).append(rank)
    sentences = []
    for (collective, place), ranks in groups.items():
        is_one = len(ranks) == 1
        if collective:
            verb = "waits" if is_one else "wait"
            sentences.append(f"{names_of(ranks)} {verb} in {collective}, {place}")
        else:
            sentences.append(f"{names_of(ranks)} {'is' if is_one else 'are'} at {place}")
    others = [rank for rank in range(outcome.world) if rank not in outcome.stuck]
    if others:
        sentences.append(f"{names_of(others)} {'has' if len(others) == 1 else 'have'} ended")
    return f"no end: {'; '.join(sentences)}"


def what_was_raised(outcome, where):
    """By the first rank, and by those that have raised such an error in the same place."""
    text, lines = outcome.errors[min(outcome.errors)]
    kind = text.split(":")[0]
    ranks = [rank for rank, (other, there) in outcome.errors.items()
             if there == lines and other.split(":")[0] == kind]
    who = "" if len(ranks) == outcome.world else names_of(ranks)
    place = ", ".join(filter(None, [who, where(lines)]))
    return ": ".join(filter(None, [place, text]))


def end_of_a_process(outcome, where):
    """The exit status or the signal of the first that has handed in nothing."""
    rank, (status, collective, lines) = min(outcome.ended.items())
    who = names_of([rank]) if outcome.world > 1 else ""
    place = ", ".join(filter(None, [who, collective, where(lines)]))
    words = f"the process has ended {status_in_words(status)}"
    if status < 0 and collective:
        words = f"{words}, {MISMATCH}"
    return f"{place}: {words}" if place else words


def status_in_words(status):
    """`with status 1`, or `by SIGSEGV`."""
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


def place_in_words(lines, source, line_of_student):
    """The innermost of these lines that the student has written; or else the solution's function in
    which the innermost one is. Its text is not shown: it may be what another exercise asks for."""
    count = source.count("\n") + 1
    lines = [line for line in lines if 0 < line <= count]       # they come from a student's process
    if not lines:
        return ""
    students = [line for line in lines if line_of_student(line)]
    tree = holes.parsed(source)
    if students:
        function = function_of(tree, students[0])
        number = line_of_student(students[0])
        return f"line {number} of {function}" if function else f"line {number}"
    function = function_of(tree, lines[0])
    return f"in the solution's {function}" if function else "in the solution"


def function_of(tree, line):
    """The name of the function around a line: "SumOut.backward"; "": there is none."""
    names = []
    for node in ast.walk(tree):                         # from the outside
        is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if is_definition and node.lineno <= line <= node.end_lineno:
            names.append(node.name)
    return ".".join(names)
