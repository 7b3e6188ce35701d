"""What lab/ knows of chapter 10 alone."""

PLAYS = {"Chapters 02 to 09 each share out": ("planner", {"model": "70b", "gpus": 512})}
