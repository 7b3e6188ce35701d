r"""A chapter, typechecked as a program of many ranks: with no number computed, and nothing sent.

    python -m lab.types 04_tensor_parallel.py
    python -m lab.types 09_5d.py --ranks 8 --dp 2 --cp 2 --tp 2
    python -m lab.types exercises/05_sequence_parallel.py --variant ring
    python -m lab.types --museum --json runs/types.json

Along each axis of the mesh a tensor is one of four things:

    type            on the ranks of the axis                      its gradient is
    R  replicated   the same                                      P  partial
    P  partial      parts of a sum that is still to come          R  replicated
    V  varying      another one on each                           V  varying
    I  invariant    the same, and so is its gradient              I  invariant

The last column is the dual type. f takes I to R, so its backward takes P to I: an all_reduce. g
takes P to I, so its backward takes I to R: nothing to send. A step is right if types fit in each
operator, in forward and in backward; if backward is called on a loss that is I or P; if no gradient
is still P where the norm or the optimizer takes it; and if the loss and the norm that are shown are
whole. If one is not, a sentence says the line, the axis and the types, and the status is 1.

The types of operators are those of `spmd_types` (`make types` installs it); the rules of chapters'
own autograd Functions are in lab/chapters/NN/types.py, and their bodies are held to them. What
types cannot see: factors, which rows of a tensor, in which order, which rank of an axis, whatever
is decided by numbers, and a sum that is made by sending messages. So of RingColumns and RingRow in
chapter 05, the rule is believed, and their rows of the table have a *.

Behind a single chapter come its own flags, and --ranks and --rank. --museum plants each exhibit of
lab/museum, and says which ones types see.
"""

import sys

from lab.cli import commands, refusals

MISSING = "there is no spmd_types here, which knows the types of operators: make types installs it"


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    try:
        import spmd_types  # noqa: F401
    except ImportError:
        refusals.fail(MISSING)
    from lab.typecheck import command

    return command.main(argv, __doc__)


if __name__ == "__main__":
    commands.program(main)
