"""What lab/ knows of chapter 00 alone."""

PLAYS = {"A collective is an operation": (
    "collectives", {"collective": "all_reduce_ring", "ranks": 3})}
TRAINS = False          # it trains no model
LIMITS = {"numbers": (0, 2**20, 1000)}
