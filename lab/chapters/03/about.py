"""What lab/ knows of chapter 03 alone."""

LIMITS = {"prefetch": (0, 3, 1), "shard_size": (1, 2**31, 2), "stage": (1, 4, 3)}


def rounding(args):
    """ZeRO++ may gather its weights as int8."""
    if args.variant == "zeropp" and args.quantized_weights:
        return "int8"
    return "bfloat16" if args.precision == "bf16" else args.dtype
