"""What lab/ knows of chapter 06 alone."""

PLAYS = {"Who has to compute?": ("rings", {"ranks": 4})}
LIMITS = {"documents": (1, 2**31, 32), "window": (1, 2**31, 32)}
