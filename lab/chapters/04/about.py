"""What lab/ knows of chapter 04 alone."""

PLAYS = {"Heads.": ("cuts", {"chapter": "04_tensor_parallel", "pp": 1, "dp": 1, "tp": 4,
                             "controls": "tp kv_heads"})}
FILES = {"lab/chapters/04/duality": None, "lab/chapters/04/sharding": None}
