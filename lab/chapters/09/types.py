"""The types of chapter 09, which makes its groups itself. See lab/types.py."""

from lab.typecheck.duality import gather_in, scatter_out
from lab.typecheck.mesh import V
from lab.typecheck.rules import add_loss, all_to_all

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


RULES = {"GatherIn": gather_in, "ScatterOut": scatter_out, "AddLoss": add_loss,
         "AllToAll": all_to_all}
