"""What lab/ knows of checkpoints alone."""

from lab.chapters import Stop

FILES = {"lab/checkpoints/checkpoint": "faults"}
TOUR = (
    Stop("03_zero.py --device=cpu --steps=6 --save=runs/tour-saved",
         "a checkpoint, saved in ZeRO's shards", 3, name="03_zero-again", drawn_on=None),
    Stop("09_5d.py --device=cpu --steps=9 --pp=2 --tp=2 --resume=runs/tour-saved",
         "a run that goes on from it on other axes", 3, name="09_5d-again", drawn_on=None),
)
