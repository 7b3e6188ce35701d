"""Prints how long files and folders are, next to their budgets of DESIGN.md. It never fails.

    python tests/support/budgets.py        a line that ends in `over` is above its budget by 10%
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOGETHER = {"lab benchmarks": 24_000, "tests": 17_000}
EACH = {"common": 440, "00_collectives": 430, "01_single_gpu": 580, "02_data_parallel": 400,
        "03_zero": 580, "04_tensor_parallel": 510, "05_sequence_parallel": 550,
        "06_context_parallel": 620, "07_pipeline_parallel": 730, "08_expert_parallel": 770,
        "09_5d": 1060, "10_planner": 700, "11_muon": 580}  # fmt: skip
MOST = 500  # of any other file; tables of data may be longer


def length(path):
    return path.read_text(encoding="utf-8").count("\n")


def main():
    rows = []
    for folders, budget in TOGETHER.items():
        files = [path for folder in folders.split() for path in (ROOT / folder).rglob("*.py")]
        rows.append((folders.replace(" ", " + "), sum(map(length, files)), budget))
        rows += [(path.relative_to(ROOT), length(path), MOST) for path in files
                 if length(path) > MOST]
    rows += [(f"{name}.py", length(ROOT / f"{name}.py"), budget) for name, budget in EACH.items()]
    for name, lines, budget in rows:
        print(f"{name!s:40} {lines:6,} of {budget:6,} lines{'  over' * (lines > 1.1 * budget)}")


if __name__ == "__main__":
    main()
