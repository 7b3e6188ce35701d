"""Wrong answers to the exercises of lab/typecheck/sharding.py."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "sharding.1": [
        Wrong("if a == contracted and b == contracted", "if contracted in (a, b)",
              "the product's cut"),
        Wrong("if a and b:", "if a == b and a:", "the product's cut"),
    ],
    "sharding.2": [
        Wrong('"reduce_scatter" if wanted else "all_reduce"', '"all_reduce"', "the collective"),
        Wrong('{"all_reduce": 2, "slice": 0}', '{"slice": 0}', "bytes on the wire"),
    ],
    "sharding.3": [
        Wrong("if cut not in (None, PARTIAL))", "if cut)", "bytes of a part"),
    ],
    "sharding.4": [
        Wrong("before = whole(found)", "before = c", "from a and b, at p and q, to c"),
        Wrong('*move("C", c, before, *to, "dC"), ', "", "from a and b, at p and q, to c"),
    ],
    "sharding.5": [
        Wrong("repeats(a, b, found, mesh), found.wire", "found.wire",
              "the cut of C, bytes on the wire, steps"),
    ],
}
