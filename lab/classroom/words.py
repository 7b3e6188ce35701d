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
        doing = f"waiting in {collective}," if collective else "at"
        sentences.append(f"{names_of(ranks)} {doing} {place}")
    others = [rank for rank in range(outcome.world) if rank not in outcome.stuck]
    if others:
        sentences.append(f"{names_of(others)} ended")
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
    how = f"with status {status}"
    if status < 0:
        how = f"by {signal.Signals(-status).name}"
    if status < 0 and collective:
        how = f"{how}, {MISMATCH}"
    return ": ".join(filter(None, [place, f"the process has ended {how}"]))


def place_in_words(lines, source, line_of_student):
    """The innermost of these lines that the student has written; or else the solution's function in
    which the innermost one is. Its text is not shown: it may be what another exercise asks for."""
    if not lines:
        return ""
    tree = holes.parsed(source)
    students = [line for line in lines if line_of_student(line)]
    if not students:
        return f"in the solution's {function_of(tree, lines[0]) or 'file'}"
    function = function_of(tree, students[0])
    number = line_of_student(students[0])
    return f"line {number} of {function}" if function else f"line {number}"


def function_of(tree, line):
    """The name of the function around a line: "SumOut.backward"; "": there is none."""
    names = []
    for node in ast.walk(tree):                         # from the outside
        is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if is_definition and node.lineno <= line <= node.end_lineno:
            names.append(node.name)
    return ".".join(names)
