"""What a check is about, as data. The words of a report are made of it here, and read nowhere."""

from typing import NamedTuple

AS_COMPUTED = "kept", "actions after which that is as computed"     # a number of actions
KINDS = ("sent", "kept", "states", "parameters", "FLOPs", "values", "time")


class About(NamedTuple):
    """kind: one of KINDS. A chapter's `checks` have such tuples as keys."""
    kind: str
    what: str               # an operator, a kind of tensors, or words
    amount: str = ""        # calls, payload, on the wire, at the peak ...
    axis: str = ""          # of a mesh, or what a group is called

    @property
    def name(self) -> str:
        """As a line of the report begins: "tp: all_gather, payload"."""
        axis = f"{self.axis}: " if self.axis else ""
        return axis + ", ".join(filter(None, (self.what, self.amount)))


def as_check(about: tuple, measured: float, expected: float | None, ok: bool | None) -> dict:
    """What a run's JSON has of a check, all fields of About among it. Raises ValueError for a kind
    that is none."""
    about = About(*about)
    if about.kind not in KINDS:
        raise ValueError(f"a check of {about.name} is of no kind {about.kind!r}")
    return {"name": about.name, **about._asdict(), "measured": measured, "expected": expected,
            "ok": ok}


def about(check: dict) -> About:
    """Of a run's JSON."""
    return About(*(check[field] for field in About._fields))
