"""Faults of lab/typecheck/duality.py, and who sees each."""

from tests.faults import Fault, Graded

FAULTS = [
    Fault("R: P, P: R", "R: R, P: P", Graded("duality.1", "the duals of R, V, P and I")),
    Fault("I: I", "I: P", Graded("duality.1", "the duals of R, V, P and I")),
    Fault("src=I, dst=R", "src=R, dst=I",
          Graded("duality.2", "what copy_in gives of R, V, P and I")),
    Fault("src=parts(x, group)", "src=P",
          Graded("duality.3", "what sum_out gives of R, V, P and I")),
    Fault("dst=I", "dst=R", Graded("duality.3", "what sum_out gives of R, V, P and I")),
    Fault("dst=R", "dst=I", Graded("duality.4", "what gather_in gives of R, V, P and I")),
    Fault("src=parts(x, group)", "src=V",
          Graded("duality.4", "what scatter_out gives of R, V, P and I")),
    Fault("or wanted is V and found is P", "",
          Graded("duality.5", "for which pairs of types misfit gives")),
    Fault("if wanted is P and found in (R, I)", "if wanted is P and found is R",
          Graded("duality.5", "for which pairs of types misfit gives")),
]
