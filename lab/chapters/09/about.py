"""What lab/ knows of chapter 09 alone."""

from lab.chapters import Stop

PLAYS = {"The mesh.": ("cuts", {"controls": "pp dp cp tp ep experts kv_heads"})}
TOUR = (
    Stop("09_5d.py --device=cpu --steps=5 --dp=2 --pp=2 --tp=2 --node-size=4",
         "three axes on two machines of 4 ranks", 5, name="09_5d", ranks=8),
    Stop("09_5d.py --device=cpu --steps=5 --pp=2 --cp=2 --ep=2 --experts=8",
         "a mixture of experts on four axes", 5, name="09_5d-experts", ranks=8),
)
LIMITS = {"zero": (0, 4, 1), "documents": (1, 2**31, 32)}
HELD = "06", "07", "08"
