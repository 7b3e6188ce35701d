"""Exercises, their grading, predictions and hunts."""
