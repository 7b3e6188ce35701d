"""What lab/ knows of chapter 02 alone."""

LIMITS = {"bucket_mb": (0, 2**31, 25), "batch_ramp": (1, 10**6, 8)}
