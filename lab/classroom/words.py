"""What became of a check, in sentences, with the lines that the student has written."""

import ast
import signal

from lab.classroom import holes


def in_words(outcome, source, line_of_student):
    """Why it is not right, in sentences. line_of_student(line): where in the student's file a line
    of this source is; None: it is not the student's."""
    where = lambda lines: place_in_words(lines, source, line_of_student)
    if outcome.stuck:
        return [no_end(outcome, where)]
    if outcome.errors:
        return [what_was_raised(outcome, where)]
    if outcome.problems:
        return list(outcome.problems)
    if outcome.ended:
        return [end_of_a_process(outcome, where)]
    return ["the ranks have lost each other"]


def named(ranks, one="", more=""):
    """`rank 2 is`, `ranks 1, 2 are`."""
    words = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"{words} {one if len(ranks) == 1 else more}".rstrip()


def no_end(outcome, where):
    """Which rank waits where."""
    groups = {}
    for rank, (collective, lines) in outcome.stuck.items():
        place = where(lines) or "the end of the run"
        groups.setdefault((collective, place), []).append(rank)
    said = []
    for (collective, place), ranks in groups.items():
        if collective:
            said.append(f"{named(ranks, 'waits', 'wait')} in {collective}, {place}")
        else:
            said.append(f"{named(ranks, 'is', 'are')} at {place}")
    others = [rank for rank in range(outcome.world) if rank not in outcome.stuck]
    if others:
        said.append(named(others, "has ended", "have ended"))
    return f"no end: {'; '.join(said)}"


def what_was_raised(outcome, where):
    """By the first rank, and by those that have raised such an error in the same place."""
    text, lines = outcome.errors[min(outcome.errors)]
    kind = text.split(":")[0]
    ranks = [rank for rank, (other, there) in outcome.errors.items()
             if there == lines and other.split(":")[0] == kind]
    who = "" if len(ranks) == outcome.world else named(ranks)
    place = ", ".join(filter(None, [who, where(lines)]))
    return ": ".join(filter(None, [place, text]))


def end_of_a_process(outcome, where):
    rank, (status, collective, lines) = min(outcome.ended.items())
    how = f"with status {status}"
    if status < 0:
        known = -status in [*map(int, signal.Signals)]
        how = f"by {signal.Signals(-status).name if known else f'signal {-status}'}"
        if collective:
            how += (", since it got more or less than it expected: not all ranks call the same "
                    "collectives in the same order, with tensors of the same size")
        elif -status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
            how += ", as if it had used memory beyond the end of a tensor"
    who = named([rank]) if outcome.world > 1 else ""
    place = ", ".join(filter(None, [who, collective, where(lines)]))
    return ": ".join(filter(None, [place, f"the process has ended {how}"]))


def place_in_words(lines, source, line_of_student):
    """The innermost of these lines that the student has written; or else the solution's function in
    which the innermost one is. Its text is not shown: it may be what another exercise asks for."""
    count = source.count("\n") + 1
    lines = [line for line in lines if 0 < line <= count]       # what a student's process says
    if not lines:
        return ""
    theirs = [line for line in lines if line_of_student(line)]
    line = (theirs or lines)[0]
    function = function_of(holes.parsed(source), line)
    if theirs:
        return f"line {line_of_student(line)}{' of ' * bool(function)}{function}"
    return f"in the solution's {function}" if function else "in the solution"


def function_of(tree, line):
    """The name of the function around a line: "SumOut.backward"; "": there is none."""
    names = []
    for node in ast.walk(tree):                         # from the outside
        is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if is_definition and node.lineno <= line <= node.end_lineno:
            names.append(node.name)
    return ".".join(names)
