"""What lab/ knows of chapter 11 alone."""

from lab.run.verify import name_of_rounded

LIMITS = {"zero": (1, 4, 2)}


def rounding(args):
    """PyTorch's Muon computes in bf16 always."""
    return "bfloat16" if args.variant == "torch" else name_of_rounded(args)
