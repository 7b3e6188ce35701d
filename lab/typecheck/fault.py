"""A fault of types, and the sentence that says it: line, axis and types."""

import torch

from lab.bench.lines import frame_in, source_of
from lab.typecheck.mesh import LETTERS, SAME, WORDS, I, P, V

FILES = {}              # {path: the name it is told by} of the sources in which a fault can lie
SUMS = {"add", "__add__", "add_", "__iadd__", "sub", "__sub__"}


class Fault(Exception):
    """where: "04_tensor_parallel.py:193"; source: that line; axis: its name, or ""; types: letters
    of what does not fit; sentence: why not."""

    def __init__(self, axis, kinds, sentence):
        super().__init__(sentence)
        self.axis, self.sentence = axis, sentence
        self.types = [LETTERS.get(kind, kind) for kind in kinds]
        self.where = self.source = ""
        frame = frame_in(FILES)
        if frame:
            self.place(frame.f_code.co_filename, frame.f_lineno)

    def place(self, path, line):
        self.where = f"{FILES[path]}:{line}"
        self.source = source_of((path, line))


def name_of(tensor, otherwise="an operand"):
    """What a sentence calls it: a parameter, an output of a module, or a variable."""
    if hasattr(tensor, "global_name"):
        return tensor.global_name
    said, frame = getattr(tensor, "_said", None), frame_in(FILES)
    local = [name for name, value in frame.f_locals.items() if value is tensor] if frame else []
    return f"{local[0]} ({said})" if said and local else said or (local or [otherwise])[0]


def of_operands(operation, axis, operands):
    """The sentence of an operator that does not take its operands. operands: [(tensor, kind)] along
    one axis."""
    named = lambda *kinds: next(name_of(x) for x, kind in operands if kind in kinds)
    kinds = {kind for _, kind in operands}
    if P in kinds:
        other = next((kind for _, kind in operands if kind is not P), None)
        beside = f", and {named(other)} is {WORDS[other]}" if other else ""
        return (f"{named(P)} is partial over {axis}{beside}: its sum is missing"
                + f" before {operation}" * (not other))
    if operation in SUMS and V in kinds:
        return (f"{named(V)} is varying over {axis}, and {named(*SAME)} is the same on all ranks: "
                "they are added before the ranks' parts have been summed or gathered")
    held = next(x for x, kind in operands if kind is I)
    other = next(kind for _, kind in operands if kind is not I)
    missing = (f"Nobody sums these: no p.partial of it names {axis}"
               if isinstance(held, torch.nn.Parameter) else
               "Their sum is missing: an f, from invariant to replicated")
    return (f"{name_of(held)} is invariant over {axis}, so that each rank must have its whole "
            f"gradient; {named(other)} is {WORDS[other]}, so that each has a part. {missing}")
