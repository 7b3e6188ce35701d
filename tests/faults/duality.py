"""Faults of lab/chapters/04/duality.py, and who sees each."""

from tests.faults import Fault, Graded

FAULTS = [
    Fault("REPLICATED: PARTIAL, PARTIAL: REPLICATED", "REPLICATED: REPLICATED, PARTIAL: PARTIAL",
          Graded("duality.1", "the duals of R, P, V and I")),
    Fault("INVARIANT: INVARIANT", "INVARIANT: PARTIAL",
          Graded("duality.1", "the duals of R, P, V and I")),
    Fault("return INVARIANT, REPLICATED", "return REPLICATED, INVARIANT",
          Graded("duality.2", "the passes of copy_in")),
    Fault("return PARTIAL, INVARIANT", "return VARYING, INVARIANT",
          Graded("duality.3", "the passes of sum_out")),
    Fault("return PARTIAL, INVARIANT", "return PARTIAL, REPLICATED",
          Graded("duality.3", "the passes of sum_out")),
    Fault("return VARYING, REPLICATED", "return VARYING, INVARIANT",
          Graded("duality.4", "the passes of gather_in")),
    Fault("return PARTIAL, VARYING", "return VARYING, VARYING",
          Graded("duality.4", "the passes of scatter_out")),
    Fault("given == PARTIAL != wanted", "given == PARTIAL and wanted in (REPLICATED, INVARIANT)",
          Graded("duality.5", "for which pairs of types misfit gives")),
    Fault("if wanted == PARTIAL and given in (REPLICATED, INVARIANT)",
          "if wanted == PARTIAL and given == REPLICATED",
          Graded("duality.5", "for which pairs of types misfit gives")),
]
