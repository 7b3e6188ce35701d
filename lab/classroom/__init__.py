"""Exercises, their grading, predictions, and the bundle for students."""
