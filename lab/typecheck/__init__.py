"""What `python -m lab.types` is made of: a chapter's step, with a type for each tensor and axis."""
