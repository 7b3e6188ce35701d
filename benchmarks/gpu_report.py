"""What the steps of benchmarks/gpu.py have shown, and the report of all of them, in Markdown."""

import dataclasses
import datetime
import json
import re
import statistics
from typing import NamedTuple

import common
from benchmarks.gpu_machine import GB, described, last_of
from benchmarks.gpu_steps import Step
from lab import ROOT, chapters
from lab.bench import overlap
from lab.bench.formulas import WATCHED_STEPS
from lab.bench.machines import PEAK_FLOPS
from lab.cli import refusals


class Row(NamedTuple):
    """What became of a step: ok, failed, skipped, left out; and what it showed."""

    step: Step
    outcome: str
    seconds: float = 0
    showed: str = ""
    run: dict | None = None             # the JSON of a chapter
    tables: str = ""                    # that a benchmark has printed


def report(rows, machine, number, minutes):
    """Lines of Markdown, of the steps that were played so far, of so many."""
    taken = sum(row.seconds for row in rows)
    ran = sum(row.outcome in ("ok", "failed") for row in rows)
    yield (f"{datetime.date.today()}, {described(machine)}. {ran} of {number} steps ran, "
           f"{taken:.0f} of {60 * minutes:.0f} seconds.\n")
    yield "| step | ranks | outcome | seconds | what it showed |"
    yield "|" + " --- |" * 5
    left_out = [row.step.name for row in rows if row.outcome == "left out" and not row.seconds]
    for row in rows:
        if row.step.name in left_out:
            continue
        yield (f"| {row.step.name} | {row.step.ranks} | {row.outcome} | {row.seconds:.0f} | "
               f"{in_a_cell(row.showed)} |")
    if left_out:
        yield f"\nFor these no time was left: {', '.join(left_out)}."
    gpu = machine["gpus"][0]["name"] if machine["gpus"] else None
    paces = [(row, pace(row.run, gpu)) for row in rows
             if row.run and row.run["config"].get("preset") in ("gpt2", "1b")]
    if any(found for _, found in paces):
        yield ("\nThe median step after the first ones. MFU: of the GPU's peak in bf16, FP8 too. "
               "Memory: what PyTorch has allocated at the most, on rank 0.\n")
        yield "| step | ms | tokens/s | MFU | memory | flags |"
        yield "|" + " --- |" * 6
    for row, found in paces:
        if found:
            ms, tokens, mfu = found
            peak = [check["measured"] for check in row.run["checks"]
                    if check["what"].startswith("allocated at the peak")]
            yield (f"| {row.step.name} | {ms:.1f} | {tokens:,.0f} | "
                   f"{'-' if mfu is None else f'{mfu:.1%}'} | "
                   f"{f'{peak[0] / GB:.1f} GB' if peak else '-'} | "
                   f"{' '.join(word for word in row.step.words[1:] if 'profile' not in word)} |")
    for row in rows:
        if row.tables:
            yield f"\n{row.step.name}:\n{row.tables}"


def in_a_cell(text):
    """Of a table: on one line, and no longer than one would read."""
    text = refusals.one_line(" ".join(text.split())).replace("|", "\\|")
    return text if len(text) <= 300 else f"{text[:299]}…"


# -------------------------------------------------------------------------------- what it showed

def told_by(step, lines, written):
    """What a step has shown: in words; and a chapter's run, or tables."""
    if not written.exists():
        tables = "\n".join(["```", *lines, "```"]) if step.is_a_table else tables_of(lines)
        return {"showed": "its table is below" if tables else last_of(lines), "tables": tables}
    run = json.loads(written.read_text())
    words = [line.strip() for line in lines if line.startswith("  --")]     # what cannot be here
    off = [f"{name} {run[f'max_{kind}_diff']:.0e}" for kind, name in
           (("loss", "loss"), ("grad", "gradients"), ("param", "parameters"))
           if run.get(f"max_{kind}_diff") is not None and run["tolerance"][name]]
    if off:
        words.append(f"from one GPU: {', '.join(off)}")
    checks = [check["ok"] for check in run["checks"] if check["ok"] is not None]
    if checks:
        words.append(f"{sum(checks)} of {len(checks)} formulas")
    words += [f"{op} {100 * seen['hidden']:.0f}% hidden"
              for op, seen in run["recorded"].get("overlap", {}).items()]
    words += [traced(ROOT / word.removeprefix("--profile=")) for word in step.words
              if word.startswith("--profile=")]
    wrong = run["problems"]
    words.append(f"✗ {wrong[0]}" if wrong else "✓")
    return {"showed": ", ".join(words), "run": run}


def traced(path):
    """What a profiler's timeline has of the GPU: how busy it is, and what NCCL's kernels hide."""
    if not path.exists():
        return "no timeline"
    kernels = [(event["name"], [event["ts"], event["ts"] + event["dur"]])
               for event in json.loads(path.read_text())["traceEvents"]
               if event.get("cat") == "kernel"]
    if not kernels:
        return "a timeline without a GPU's kernel"
    all_of_them = overlap.union(times for _, times in kernels)
    sending = overlap.union(times for name, times in kernels if "nccl" in name.lower())
    rest = overlap.union(times for name, times in kernels if "nccl" not in name.lower())
    busy = overlap.seconds_of(all_of_them) / (all_of_them[-1][1] - all_of_them[0][0])
    words = f"a timeline of {len(kernels):,} kernels, the GPU busy {busy:.0%}"
    if sending:
        hidden = overlap.seconds_of(overlap.both(sending, rest)) / overlap.seconds_of(sending)
        words += f", {hidden:.0%} of NCCL's time beside other kernels"
    return words


def pace(run, gpu):
    """Milliseconds of a step (the median, without those that are watched), tokens a second, and
    MFU of all GPUs together; None where there is no step, or no peak."""
    seconds = run["step_seconds"][WATCHED_STEPS:]
    if not seconds:
        return None
    config, step = run["config"], statistics.median(seconds)
    shape = {field.name: config[field.name] for field in dataclasses.fields(common.Config)}
    flops = chapters.chapter("01").model_flops(common.Config(**shape), config["batch"])
    peak = PEAK_FLOPS.get(gpu)
    mfu = flops / step / run["world_size"] / peak if peak else None
    return 1e3 * step, config["batch"] * config["seq"] / step, mfu


def tables_of(lines):
    """The tables of Markdown, each with the line above it."""
    kept = []
    for i, line in enumerate(lines):
        if line.startswith("|"):
            if i == 0 or not lines[i - 1].startswith("|"):
                kept += ["", *[above for above in lines[:i] if above.strip()][-1:], ""]
            kept.append(line)
    return "\n".join(kept)


def error_of(lines):
    """The line that says why: the first error, since torchrun's own summary is the last."""
    errors = [line for line in lines if re.search(r"\w(Error|Exception)\b.*: |^error: ", line)]
    return re.sub(r"^\[rank\d+\]:", "", errors[0]).strip() if errors else last_of(lines)
