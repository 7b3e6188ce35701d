"""What lab/ knows of checkpoints alone."""

FILES = {"lab/checkpoints/checkpoint": "faults"}
