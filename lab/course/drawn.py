"""Which command draws a figure of figures/."""

from lab import ROOT, chapters

PLANNED = "10_planner", "megatron", "playbook", "rooflines"
OTHERS = {
    "batch": "python benchmarks/draw_batch.py",
    "faults": "make faults; python -m lab.pictures runs/faults.json --out figures",
    "formats": "python -m lab.formats --out figures/formats.png",
    "fp8": "python benchmarks/draw_fp8.py",
    "museum": "make museum",
    "scaling": "make scaling",
    "warps": "python -m lab.warps --plot figures/warps.png",
}


def by(figure):
    """The command."""
    if figure in PLANNED:
        return f"python -m lab.plans {figure}"
    if figure in chapters.NAMES:
        return f"make figures ONLY={figure[:2]}"
    return OTHERS[figure]


def file_of(figure):
    return ROOT / f"figures/{figure}.png"
