"""What lab/ knows of chapter 02 alone."""

from lab.chapters import Stop

TOUR = (
    Stop("02_data_parallel.py --device=cpu --steps=5",
         "the same numbers as one GPU", 4, name="02_data_parallel"),
    Stop("02_data_parallel.py --device=cpu --steps=5 --variant=naive",
         "communication after all of backward", 3, name="02_data_parallel-naive"),
    Stop("02_data_parallel.py --device=cpu --steps=5 --variant=overlap",
         "an all_reduce for each gradient, during backward", 3, name="02_data_parallel-overlap"),
)
LIMITS = {"bucket_mb": (0, 2**31, 25), "batch_ramp": (1, 10**6, 8)}
