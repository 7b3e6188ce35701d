"""The types of chapter 09, which makes its groups itself. See lab/types.py."""

import math

from common import Refused
from lab.typecheck.duality import gather_in, scatter_out
from lab.typecheck.mesh import V
from lab.typecheck.rules import add_loss, all_to_all, refuse_parts_of_tp

USUAL = 8, "--dp=2 --cp=2 --tp=2"
TOKENS = "dp", "dp_mod_ep", "dp_in_ep"      # along which ranks have other tokens,
LAYERS = "pp",          # and other layers


def axes(args):
    """{axis: its ranks}; along the last, ranks are neighbours. Of dp, ep may take a part: the
    neighbours along dp_in_ep have other experts, those along dp_mod_ep the same."""
    sizes = {axis: getattr(args, axis) for axis in args.order.split(",")}
    part = shared_by_ep(args, args.ep).get("dp", 1)
    if part in (1, args.dp):
        return sizes
    parts = {"dp_mod_ep": args.dp // part, "dp_in_ep": part}
    return {name: size for axis in sizes
            for name, size in (parts if axis == "dp" else {axis: sizes[axis]}).items()}


def shared_by_ep(args, ep):
    """{axis: how many of its neighbours are ranks of one ep}, the innermost axis first; {}, if ep
    ends within an axis and goes on in the next one."""
    found = {}
    for axis in args.order.split(",")[::-1]:
        if axis != "pp":
            size = getattr(args, axis)
            found[axis] = math.gcd(size, ep)
            ep //= found[axis]
            if ep > 1 and found[axis] < size:
                return {}
    return found


def has_axes(args, ep):
    """Whether the ranks of ep, and those that hold the same experts, lie along axes."""
    found = shared_by_ep(args, ep)
    return bool(found) and all(found[axis] in (1, getattr(args, axis)) for axis in ("cp", "tp"))


def requires(args):
    """Refuse groups that lie along a part of an axis."""
    refuse_parts_of_tp(args, args.tp)
    ranks = args.dp * args.cp * args.tp
    others = [ep for ep in range(1, ranks + 1) if ranks % ep == 0 and has_axes(args, ep)]
    if not has_axes(args, args.ep):
        others.sort(key=lambda ep: abs(ep - args.ep))
        raise Refused(f"--ep {args.ep} does not end where an axis does, or an equal part of dp: "
                      "there are no types along it", *(f"--ep {ep}" for ep in others))
    if args.model.tie and args.pp > 2 and args.schedule != "dualpipe-v":
        raise Refused(f"of --pp {args.pp} stages, the first and the last hold one tied matrix: "
                      "these two are no axis", "--schedule dualpipe-v",
                      f"--pp 2 --dp {args.dp * args.pp // 2}", "--preset tiny")


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
