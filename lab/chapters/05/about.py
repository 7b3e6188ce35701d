"""What lab/ knows of chapter 05 alone."""

from lab.chapters import Stop
from lab.run.verify import name_of_rounded

TOUR = (
    Stop("05_sequence_parallel.py --device=cpu --steps=5",
         "what tensor parallelism left whole, cut by tokens", 7, name="05_sequence_parallel"),
)


def rounding(args):
    """In FP8 it has one GPU in FP8 beside it, so that float64 is as exact as without."""
    if args.precision == "fp8":
        return {"float64": "float64", "float32": "float32 and fp8"}.get(args.dtype, "fp8")
    return name_of_rounded(args)
