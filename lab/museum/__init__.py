"""The museum of silent bugs: training goes on, the loss falls, and the numbers are wrong."""

import importlib

ROOMS = [f"chapter_{number:02}" for number in range(11)] + ["kernels", "resume"]


def exhibits():
    """{room: its exhibits}, of all rooms that there are."""
    found = {}
    for room in ROOMS:
        try:
            found[room] = importlib.import_module(f"lab.museum.{room}").EXHIBITS
        except ModuleNotFoundError:
            continue
    return found
