"""What lab/ knows of chapter 10 alone."""

PLAYS = "planner"
