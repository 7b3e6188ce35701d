"""What lab/ knows of chapter 01 alone."""

LIMITS = {"loss_scale": (1, 2**31, 65536)}


def rounding(args):
    """Mixed precision rounds as what its matmuls are in."""
    return {"bf16": "bfloat16", "bf16-fp32grad": "bfloat16", "fp16": "float16", "fp8": "fp8",
            "fp32": args.dtype}[args.precision]
