"""Checkpoints: global tensors, their files, when they are saved, and from which a run goes on."""
