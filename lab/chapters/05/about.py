"""What lab/ knows of chapter 05 alone."""

from lab.run.verify import name_of_rounded


def rounding(args):
    """In FP8 it has one GPU in FP8 beside it, so that float64 is as exact as without."""
    if args.precision == "fp8":
        return {"float64": "float64", "float32": "float32 and fp8"}.get(args.dtype, "fp8")
    return name_of_rounded(args)
