"""What lab/ knows of chapter 07 alone."""

PLAYS = "schedules"
