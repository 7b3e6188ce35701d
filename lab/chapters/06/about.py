"""What lab/ knows of chapter 06 alone."""

PLAYS = "rings"
