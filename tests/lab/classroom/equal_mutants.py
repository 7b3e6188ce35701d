"""Mutants of tests/lab/classroom/mutants.py that no check can find, and why.

The name of each, as the command prints it, and a reason: it computes the same, or differs in what
the exercise does not ask for.
"""

EQUAL = {
    "00.3 reduce: net.rank < have -> net.rank <= have":
        "a rank that is `have` has come to the branch above",
    "00.11 halve_and_double: net.rank > partner -> net.rank >= partner":
        "no rank is its own partner",
    "01.4 LossScale.update: self.good + 1 -> self.good - 1":
        "it counts below zero, where the same steps are multiples of patience",
    "01.8 best_k: 1 -> 2 (2)": "a group of layers + 1 keeps more than one of all layers",
    "06.7 pairs: span >= 1 -> span > 1": "at 1, both lines give the same",
    "11.1 orthogonalize: x.shape[0] > x.shape[1] -> x.shape[0] >= x.shape[1]":
        "a square matrix may be transposed, and back",
    "11.4 share_out: 0 -> 1": "every owner is written later",
    "swiglu.1 backward_kernel: tl.load(dy_ptr + here, mask=inside, other=0) -> "
    "tl.load(dy_ptr + here, mask=inside)": "what the mask hides is not stored, whatever it is",
    "grouped_matmul.1 GroupedMatmul.backward: matrices.transpose(1, 2) -> "
    "matrices.transpose(2, 1)": "the same two dimensions change places",
    "sharding.5 cheapest: repeats(a, b, found, mesh) -> repeats(b, a, found, mesh)":
        "it asks whether an axis cuts A or B",
}
