"""What was found of students, as a teacher, Gradescope and a CI read it."""

import json
import textwrap
import xml.etree.ElementTree as xml

from lab.classroom.grading import OPEN, RIGHT, WRONG

WIDTH = 100


def lines_of(result, columns):
    """A line, and those that go on with it."""
    number, what = columns
    head = f"{result.number:{number}}  {result.what:{what}}  {result.mark}  "
    text = textwrap.wrap(result.words, WIDTH - len(head), break_long_words=False) or [""]
    return [f"{head}{text[0]}".rstrip(), *(" " * len(head) + line for line in text[1:])]


def summary(results, seconds):
    counts = {mark: sum(r.exercises for r in results if r.mark == mark)
              for mark in (RIGHT, WRONG, OPEN)}
    points, most = sum(r.score for r in results), sum(r.points for r in results)
    return (f"{counts[RIGHT]} of {sum(counts.values())} right, {counts[WRONG]} wrong, "
            f"{counts[OPEN]} not begun; {points} of {most} points; {seconds:.0f} s")


def as_json(students):
    """What Gradescope's autograder reads: results.json."""
    from lab.cli.refusals import one_line

    tests = []
    for student, results in students.items():
        student = one_line(student)                     # a folder's name may be any bytes
        for r in results:
            name = f"{r.number} {r.what}"
            tests.append({"name": f"{student}: {name}" if len(students) > 1 else name,
                          "score": r.score, "max_score": r.points,
                          "status": "passed" if r.mark == RIGHT else "failed",
                          "output": r.words or "right", "visibility": "visible"})
    every = [r for results in students.values() for r in results]
    results = {"output": summary(every, sum(r.seconds for r in every)), "tests": tests}
    return json.dumps(results, indent=1) + "\n"


def as_junit(students):
    """JUnit's XML, which GitLab, Jenkins and others show: a suite for each student."""
    from lab.cli.refusals import one_line

    root = xml.Element("testsuites")
    for student, results in students.items():
        student = one_line(student)                     # XML has no word for a control character
        marks = [r.mark for r in results]
        suite = xml.SubElement(root, "testsuite", name=student, tests=str(len(results)),
                               failures=str(marks.count(WRONG)), skipped=str(marks.count(OPEN)),
                               time=f"{sum(r.seconds for r in results):.3f}")
        for r in results:
            case = xml.SubElement(suite, "testcase", classname=student,
                                  name=f"{r.number} {r.what}", time=f"{r.seconds:.3f}")
            if r.mark != RIGHT:
                xml.SubElement(case, "failure" if r.mark == WRONG else "skipped", message=r.words)
    xml.indent(root)
    return xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
