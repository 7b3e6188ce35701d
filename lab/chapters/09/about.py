"""What lab/ knows of chapter 09 alone."""

PLAYS = {"The mesh.": ("cuts", {"controls": "pp dp cp tp ep experts kv_heads"})}
LIMITS = {"zero": (0, 4, 1), "documents": (1, 2**31, 32)}
HELD = "06", "07", "08"
