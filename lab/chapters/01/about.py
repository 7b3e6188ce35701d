"""What lab/ knows of chapter 01 alone."""

from lab.chapters import Stop

TOUR = (
    Stop("01_single_gpu.py --device=cpu --steps=5",
         "where memory goes", 10, name="01_single_gpu", ranks=0, drawn_on=0),
)
LIMITS = {"loss_scale": (1, 2**31, 65536)}


def rounding(args):
    """Mixed precision rounds as what its matmuls are in."""
    return {"bf16": "bfloat16", "bf16-fp32grad": "bfloat16", "fp16": "float16", "fp8": "fp8",
            "fp32": args.dtype}[args.precision]
