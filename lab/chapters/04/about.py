"""What lab/ knows of chapter 04 alone."""

from lab.bench.stop import Stop

FILES = {"lab/typecheck/duality": None, "lab/typecheck/sharding": None}
TOUR = (
    Stop("04_tensor_parallel.py --device=cpu --steps=5",
         "every matrix cut", 5, name="04_tensor_parallel"),
)
