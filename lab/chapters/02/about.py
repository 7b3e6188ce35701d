"""What lab/ knows of chapter 02 alone."""

LIMITS = {"bucket_mb": (0, 2**31, 25)}
