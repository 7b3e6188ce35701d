"""What lab/ knows of chapter 09 alone."""

LIMITS = {"zero": (0, 4, 1)}
