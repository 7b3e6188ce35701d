"""What lab/ knows of chapter 07 alone."""

from lab.bench.stop import Stop

PLAYS = "schedules"
TOUR = (
    Stop("07_pipeline_parallel.py --device=cpu --steps=5 --layers=8",
         "who computes when", 5, name="07_pipeline_parallel"),
    Stop("-m lab.schedules 1f1b --micro-batches=8 --sleep=10",
         "the same schedule, asleep: cores are enough", 1, name="07_asleep"),
)
