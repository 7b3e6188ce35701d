"""What lab/ knows of chapter 09 alone."""

PLAYS = "cuts"
LIMITS = {"zero": (0, 4, 1)}
