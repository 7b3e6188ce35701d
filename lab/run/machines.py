"""What machines can do: machines.toml says what the numbers are, and from where."""

import tomllib
from pathlib import Path

TABLES = tomllib.loads(Path(__file__).with_name("machines.toml").read_text(encoding="utf-8"))
MACHINES = {name: tuple(speeds) for name, speeds in TABLES["machines"].items()}
LATENCY = TABLES["latency"]
PEAK_FLOPS = TABLES["peak_flops"]
