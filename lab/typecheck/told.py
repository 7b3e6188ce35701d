"""The table of a step that is well typed: what of it has which type."""

import re

from lab.typecheck.mesh import DUAL, LETTERS, SAME
from lab.typecheck.run import Run

DUALS = {LETTERS[kind]: LETTERS[dual] for kind, dual in DUAL.items()}
WHOLE = {LETTERS[kind] for kind in SAME}


def in_order(run, kinds):
    """The letters, axis by axis; None: it is no tensor of numbers, or of several."""
    return " ".join(kinds[name] for name in run.checker.mesh.axes) if kinds else "-"


def seams_of(run: Run) -> dict[str, list]:
    """{module: [type of its input, of its output]}: of the first block, and of what is around."""
    found = {}
    for path, kinds in run.seams.items():
        path = re.sub(r"^\d+\.?", "", path)             # of a pipeline's stage
        if path and not re.match(r"block([2-9]|\d\d)", path):
            found.setdefault(path, kinds)
    return found


def calls_of(run: Run) -> list[dict]:
    """[{"name": of an autograd Function, "in": the type of its first input, "out": of its first
    output, "by_rule_alone": whether its body is not held to that}]: a row for each way of calling
    it, since what is varying may be a sum that is still to come, like what is partial."""
    found = []
    for name, by_rule_alone, *kinds in run.checker.calls:
        before, after = map(run.checker.mesh.told, kinds)
        row = {"name": name, "in": before, "out": after, "by_rule_alone": by_rule_alone}
        if row not in found:
            found.append(row)
    return found


def dual_of(kinds):
    return {axis: DUALS[letter] for axis, letter in kinds.items()}


def gradients_of(run: Run) -> dict[tuple, list[str]]:
    """{(type of a parameter, its dual, what the optimizer takes): the names, but for the block}."""
    found = {}
    for name, (kind, taken) in run.gradients.items():
        dual = dual_of(kind)
        taken = {axis: kind[axis] if letter in WHOLE and kind[axis] in WHOLE else letter
                 for axis, letter in taken.items()}
        key = tuple(in_order(run, one) for one in (kind, dual, taken))
        name = re.sub(r"^block\d+\.", "", name)
        if name not in found.setdefault(key, []):
            found[key].append(name)
    return found


def table(run: Run) -> list[str]:
    args, axes = run.args, run.checker.mesh.axes
    sizes = " x ".join(f"{name} {axis.size()}" for name, axis in axes.items())
    lines = [f"{args.chapter.replace('_', ' ')} · {args.variant} · {sizes} · well typed, and no "
             "number computed", "",
             "  R: the same on all ranks · V: another on each · P: a part of a sum that is to come",
             "  I: the same, and so is its gradient", "",
             f"  {'types along ' + ', '.join(axes):<34}{'goes in':>10}{'comes out':>12}"]
    for path, (before, after) in seams_of(run).items():
        lines.append(f"  {path:<34}{in_order(run, before):>10}{in_order(run, after):>12}")
    if run.checker.calls:
        lines += ["", f"  {'autograd Functions':<34}{'goes in':>10}{'comes out':>12}"
                  f"{'gradient: goes in':>20}{'comes out':>12}"]
    for row in calls_of(run):
        name = f"{row['name']}{' *' * row['by_rule_alone']}"
        before, after = (in_order(run, row[key]) for key in ("in", "out"))
        back = [in_order(run, dual_of(row[key])) for key in ("out", "in")]
        lines.append(f"  {name:<34}{before:>10}{after:>12}{back[0]:>20}{back[1]:>12}")
    if any(row["by_rule_alone"] for row in calls_of(run)):
        lines.append("  * by its rule alone: its body sums by messages, which types cannot see")
    lines += ["", f"  {'parameters':<34}{'type':>10}{'gradient':>12}{'in the optimizer':>20}"]
    for (kind, dual, taken), names in gradients_of(run).items():
        first, *others = folded(names)
        lines.append(f"  {first:<34}{kind:>10}{dual:>12}{taken:>20}")
        lines += [f"  {other}" for other in others]
    loss = run.loss_type()
    lines += ["", f"  {'the loss, where backward begins':<34}{in_order(run, loss):>10}"]
    lines += [f"  {f'the {what} that is reported':<34}{in_order(run, kinds):>10}"
              for what, kinds in run.reported.items()]
    return lines


def folded(names, width=32):
    """Names, comma by comma, in lines of a width."""
    lines = [names[0]]
    for name in names[1:]:
        if len(lines[-1]) + len(name) + 2 <= width:
            lines[-1] += f", {name}"
        else:
            lines[-1] += ","
            lines.append(name)
    return lines


def as_json(run: Run) -> dict:
    axes = {name: axis.size() for name, axis in run.checker.mesh.axes.items()}
    return {"chapter": run.args.chapter, "variant": run.args.variant, "axes": axes,
            "seams": seams_of(run), "functions": calls_of(run),
            "reported": run.reported, "loss": run.loss_type(),
            "parameters": {name: {"type": kind, "optimizer": taken}
                           for name, (kind, taken) in run.gradients.items()}, "fault": None}
