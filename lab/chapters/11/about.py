"""What lab/ knows of chapter 11 alone."""

from lab.chapters import Stop
from lab.run.verify import name_of_rounded

TOUR = (
    Stop("11_muon.py --device=cpu --steps=5", "matrices dealt to ranks", 4, name="11_muon"),
    Stop("11_muon.py --device=cpu --steps=5 --variant=gather", "gathered by all", 4,
         name="11_muon-gather"),
    Stop("11_muon.py --device=cpu --steps=5 --variant=owner", "each on one rank", 4,
         name="11_muon-owner"),
)
LIMITS = {"zero": (1, 4, 2)}


def rounding(args):
    """PyTorch's Muon computes in bf16 always."""
    return "bfloat16" if args.variant == "torch" else name_of_rounded(args)
