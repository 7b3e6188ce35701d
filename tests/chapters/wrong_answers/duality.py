"""Wrong answers to the exercises of lab/typecheck/duality.py."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "duality.1": [
        Wrong("R: P, P: R", "R: R, P: P", "the duals of R, V, P and I"),
        Wrong("I: I", "I: P", "the duals of R, V, P and I"),
    ],
    "duality.2": [
        Wrong("src=I, dst=R", "src=R, dst=I", "what copy_in gives of R, V, P and I"),
    ],
    "duality.3": [
        Wrong("dst=I", "dst=R", "what sum_out gives of R, V, P and I"),
        Wrong("src=parts(x, group)", "src=P", "what sum_out gives of R, V, P and I"),
    ],
    "duality.4": [
        Wrong("dst=R", "dst=I", "what gather_in gives of R, V, P and I"),
        Wrong("src=parts(x, group)", "src=V", "what scatter_out gives of R, V, P and I"),
    ],
    "duality.5": [
        Wrong("or wanted is V and found is P", "", "for which pairs of types misfit gives"),
        Wrong("if wanted is P and found in (R, I)", "if wanted is P and found is R",
              "for which pairs of types misfit gives"),
    ],
}
