"""Mutants of tests/lab/classroom/mutants.py that no check can find, and why.

The name of each, as the command prints it, and a reason: it computes the same, or differs in what
the exercise does not ask for.
"""

EQUAL = {}
