"""What lab/ knows of chapter 00 alone."""

from lab.chapters import Stop

PLAYS = {"A collective is an operation": (
    "collectives", {"collective": "all_reduce_ring", "ranks": 3})}
TOUR = (
    Stop("00_collectives.py --device=cpu",
         "who has what after each round", 1, name="00_collectives", ranks=8),
)
TRAINS = False          # it trains no model
LIMITS = {"numbers": (0, 2**20, 1000)}
