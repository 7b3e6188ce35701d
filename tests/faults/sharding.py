"""Faults of lab/chapters/04/sharding.py, and who sees each."""

from tests.faults import Fault, Graded

FAULTS = [
    Fault("if a == contracted and b == contracted", "if contracted in (a, b)",
          Graded("sharding.1", "the product's cut")),
    Fault("if a and b:", "if a == b and a:", Graded("sharding.1", "the product's cut")),
    Fault('"reduce_scatter" if target else "all_reduce"', '"all_reduce"',
          Graded("sharding.2", "the collective")),
    Fault('{"all_reduce": 2, "slice": 0}', '{"slice": 0}',
          Graded("sharding.2", "bytes on the wire")),
    Fault("if cut not in (None, PARTIAL))", "if cut)", Graded("sharding.3", "bytes of a part")),
    Fault("dc = whole(c_at) ", "dc = c ",
          Graded("sharding.4", "from a and b, at p and q, to c")),
    Fault('*move("C", c, dc, *cluster, "dC"), ', "",
          Graded("sharding.4", "from a and b, at p and q, to c")),
    Fault("repeats(a, b, one, mesh), one.wire", "one.wire",
          Graded("sharding.5", "the cut of C, bytes on the wire, steps")),
]
