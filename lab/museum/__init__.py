"""The museum of silent bugs: training goes on, the loss falls, and the numbers are wrong."""

from lab import chapters


def exhibits():
    """{room: its exhibits}, of all rooms that have some."""
    return {room: module.EXHIBITS for room, module in chapters.rooms_with("exhibits").items()}
