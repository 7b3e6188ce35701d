"""What lab/ knows of chapter 00 alone."""

TRAINS = False          # it trains no model
LIMITS = {"numbers": (0, 2**20, 1000)}
