"""What is found in the evidence of a step that does not match: a function for each finding."""
