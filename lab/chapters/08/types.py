"""The types of chapter 08: rows that travel to their experts, and a loss that is added on the way.
See lab/types.py."""

from spmd_types import rules

from lab.typecheck.rules import add_loss, all_to_all, exchanged

USUAL = 4, "--ep=2"     # ranks, and flags
TOKENS = "holders", "ep", "across", "inside"


def depart(*, rows, trip):
    sent, received, group, under_way = trip
    return exchanged(rows, group)


def arrive(*, rows, trip):
    return rules.einsum("...->...", rows)


RULES = {"AddLoss": add_loss, "AllToAll": all_to_all, "Depart": depart, "Arrive": arrive}
