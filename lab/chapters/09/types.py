"""The types of chapter 09, which makes its groups itself. See lab/types.py."""

from spmd_types import R, S, rules

from lab.typecheck.mesh import V
from lab.typecheck.rules import added, exchanged, scattered

USUAL = 8, "--dp=2 --cp=2 --tp=2"
TOKENS = "dp",          # along which ranks have other tokens,
LAYERS = "pp",          # and other layers


def axes(args):
    """{axis: its ranks}; along the last, ranks are neighbours."""
    return {axis: getattr(args, axis) for axis in args.order.split(",")}


def stage(checker, function, stage, *args):
    """Of a sequence, each rank of cp and tp takes its own places."""
    checker.change(stage.positions, [name for name in ("cp", "tp") if name in checker.mesh.axes], V)
    return function(stage, *args)


def edge(checker, function, out):
    """Of the loss, backward begins here."""
    if out.ndim == 0:
        checker.hold_loss(out)
    return function(out)


MARKS = {"Stage.forward": stage, "get_gradient_edge": edge}


def gather_in(*, x, group):
    return rules.all_gather(x, group, src=S(1), dst=R)


def scatter_out(*, x, group):
    return scattered(x, group, S(1))


def add_loss(*, x, loss):
    return added(x, loss)


def all_to_all(*, rows, sent, received, group):
    return exchanged(rows, group)


RULES = {"GatherIn": gather_in, "ScatterOut": scatter_out, "AddLoss": add_loss,
         "AllToAll": all_to_all}
