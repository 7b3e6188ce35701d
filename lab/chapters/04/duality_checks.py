"""Checks of the exercises of duality.py."""

import itertools


def duals(duality):
    return {kind: duality.dual(kind) for kind in "RPVI"}


def types_of(duality, name):
    """The types and collectives of f or g, in both passes."""
    return duality.passes(*getattr(duality, name)())


def misfits(duality):
    return {f"{given} for {wanted}": duality.misfit(given, wanted) is not None
            for given, wanted in itertools.product("RPVI", repeat=2)}
