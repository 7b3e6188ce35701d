"""What lab/ knows of chapter 03 alone."""

from lab.run.verify import name_of_rounded

PLAYS = {"Ψ parameters in fp32": ("memory", {}),
         "When it pays.": ("roofline", {"cluster": "h100", "strategy": "zero-3", "chips": 8,
                                         "zero_axes": 1, "tokens": 2048})}
LIMITS = {"prefetch": (0, 3, 1), "shard_size": (1, 2**31, 2), "stage": (1, 4, 3)}


def rounding(args):
    """ZeRO++ may gather its weights as int8."""
    if args.variant == "zeropp" and args.quantized_weights:
        return "int8"
    return name_of_rounded(args)
