"""The command line of chapter 10, which plans: its flags are the fields of the chapter's classes.

    python 10_planner.py --help

Like the chapter, it needs no torch: an answer takes a second.
"""

import argparse
import functools
import inspect
import json
import math
import re
import signal
import sys
from dataclasses import asdict, fields, replace

CAUSES = ("matmul", "attention", "elementwise", "weights", "tp", "cp", "ep", "pp", "dp", "bubble",
          "optimizer")


class Refused(Exception):
    """A question that cannot be answered: why, and what would work. (common's would need torch.)"""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(f"{message}; python 10_planner.py --help lists what would work")


def above_zero(kind):
    """An argparse type: an int or a float above 0."""
    def number(text):
        if not 0 < kind(text) < 1e30:
            raise ValueError
        return kind(text)
    number.__name__ = f"positive {kind.__name__}"
    return number


def large(text):
    """An argparse type: FLOP/s, bytes or bytes/s, and not a number of GB."""
    if not 1e6 <= float(text) < 1e30:
        raise argparse.ArgumentTypeError(f"{text} is in FLOP/s, bytes or bytes/s: such as 80e9")
    return float(text)


def share(text):
    """An argparse type: from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


def writable(path):
    """An argparse type: a file to write."""
    try:
        open(path, "a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


@functools.cache
def comments(kind):
    """{field: what stands behind it in the chapter}, which --help says of its flag."""
    file = inspect.getsource(sys.modules[kind.__module__])      # of the class, it would be parsed
    _, rest = file.split(f"\nclass {kind.__name__}:\n")
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", rest.split("\n\n\n")[0], re.MULTILINE))


def arguments(ten, argv):
    parser = Parser("10_planner.py", description=ten.__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=ten.MODELS, help="default: 8b, or a GPT of the sizes that are given")
    add("--cluster", choices=ten.CLUSTERS, default="h100")
    add("--gpus", type=above_zero(int), default=8)
    add("--batch", type=above_zero(int), default=64, help="sequences of a step")
    add("--software", choices=ten.SOFTWARE, default="megatron-2024")
    groups = {ten.Model: "in place of the model's", ten.Layout: "else what is fastest",
              ten.Cluster: "in place of the cluster's: FLOP/s, bytes, bytes/s, shares, seconds",
              ten.Software: "in place of the software's"}
    for kind, title in groups.items():
        group = parser.add_argument_group(title)
        for field in fields(kind):
            options = {"type": above_zero(field.type)}
            if "hidden" in field.name or "alpha" in field.name:
                options = {"type": share}
            elif kind is ten.Cluster and field.type is float:
                options = {"type": share if field.name in ("matmul", "attention") else large}
            elif field.type is bool:
                options = {"action": argparse.BooleanOptionalAction}
            elif field.name in ten.CHOICES:
                options = {"choices": ten.CHOICES[field.name], "type": field.type}
            group.add_argument(f"--{field.name.replace('_', '-')}", **options,
                               help=comments(kind).get(field.name, "").replace("%", "%%"))
    add("--untie", dest="tie", action="store_false", default=None, help="as --no-tie")
    add("--no-pp", dest="pp", action="store_const", const=1, help="as --pp 1")
    add("--max-micro-batch", type=above_zero(int), default=16)
    add("--explain", action="store_true", help="what limits the best, and what would change it")
    add("--published", action="store_true", help="published tables, beside what is predicted")
    add("--problems", action="store_true", help="the scaling book's worked problems")
    add("--json", type=writable, help="write the best plan, and all that fit")
    return parser.parse_args(argv)


def given(args, kind):
    """What the flags put in place of its fields."""
    values = {field.name: getattr(args, field.name) for field in fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def as_flag(name):
    return f"--{name.replace('_', '-')}"


def advice(asked, others):
    """Why there is no plan, and what would work."""
    ten, find, gpus, fixed = asked.ten, asked.find, asked.gpus, asked.fixed
    nearest = min(others, key=lambda plan: plan.bytes if plan.memory else math.inf)
    why = f"{ten.in_words(nearest.layout)}: {nearest.why}"
    batch = nearest.layout.dp * nearest.layout.micro_batch
    if not nearest.memory and best(find(gpus, fixed, batch)):
        return f"{why}; --batch {batch} would work"
    others = {name: best(find(gpus, {flag: fixed[flag] for flag in fixed if flag != name}))
              for name in fixed}
    changes = [f"{as_flag(name)} {getattr(other.layout, name)}" for name, other in others.items()
               if other]
    if changes:
        return f"{why}; {' or '.join(changes)} would work"
    for more in (gpus * 2**k for k in range(1, 12)):
        if best(find(more, fixed)):
            return f"{why}; --gpus {more} would work"
    return f"{why}; fewer flags may work"


class Question:
    """What the flags ask: model, cluster, software, gpus, batch, and the degrees that are fixed."""

    def __init__(self, ten, args):
        self.ten, self.name, self.gpus, self.batch = ten, args.model, args.gpus, args.batch
        model, sizes = ten.MODELS[args.model or "8b"], (args.layers, args.dim, args.heads)
        if all(sizes) and not args.model:
            model = ten.gpt(*sizes)
        elif any(sizes) and not args.model:
            raise Refused("a model of one's own has --layers, --dim and --heads; --model 8b would "
                          "change that of a known one")
        self.model = replace(model, **given(args, ten.Model))
        self.cluster = replace(ten.CLUSTERS[args.cluster], **given(args, ten.Cluster))
        self.software = replace(ten.SOFTWARE[args.software], **given(args, ten.Software))
        self.fixed, self.most = given(args, ten.Layout), args.max_micro_batch

    def caveats(self):
        """What is to be known of the answer."""
        if self.name == "deepseek-v3":
            yield "without its latent attention, its shared expert and its three dense layers"
        if self.model.experts > 1:
            yield "the time of expert parallelism has been held to nothing: do not rely on it"

    def find(self, gpus, fixed, batch=None):
        """The plans that fit, and the others (see the chapter's `search`)."""
        return self.ten.search(self.model, self.cluster, self.software, gpus, batch or self.batch,
                               fixed, self.most)


def best(found):
    """The fastest plan that fits, of what a search has found."""
    fit, _ = found
    return fit[0] if fit and not fit[0].why else None


def as_json(asked, fit):
    """What --json writes: of the best plan, and of all that fit. TFLOP/s and MFU count all scores
    of attention; tflops_causal their half; tflops_hfu also what is computed twice."""
    ten, model, batch = asked.ten, asked.model, asked.batch
    best, rate = fit[0], 1 / fit[0].total / asked.gpus
    flops = {scores: ten.step_flops(model, batch, scores) * rate for scores in ("all", "causal")}
    hardware = ten.step_flops(model, batch, recompute=best.layout.recompute) * rate
    return {"fits": not best.why, "seconds": best.total,
            "tokens_per_second_per_gpu": batch * model.seq * rate,
            "tflops": flops["all"] / 1e12, "tflops_causal": flops["causal"] / 1e12,
            "tflops_hfu": hardware / 1e12, "mfu": flops["all"] / asked.cluster.peak,
            "time": {cause: best.seconds.get(cause, 0) for cause in CAUSES},
            "memory": best.memory | {"total": best.bytes},
            "layout": asdict(best.layout),
            "found": [{"seconds": plan.total, "fits": not plan.why, "layout": asdict(plan.layout)}
                      for plan in fit]}


def print_plans(asked, fit):
    """The ten best: seconds, speed, memory, layout, causes, and why it loses to the best."""
    ten = asked.ten
    for plan in fit[:10]:
        told = as_json(asked, [plan])
        print(f"{plan.total:9.3f} s {told['tokens_per_second_per_gpu']:7.0f} tokens/s "
              f"{told['tflops']:4.0f} TFLOP/s {told['mfu']:4.0%} {plan.bytes / 1e9:4.0f} GB  "
              f"{ten.in_words(plan.layout)}: {ten.largest(plan.seconds, 3)}"
              + (f"; {ten.difference(plan, fit[0])}" if plan.total > fit[0].total else "")
              + (f"; {plan.why}: may not fit" if plan.why else ""))


def program(ten):
    """Chapter 10 as a program, which `| head` ends without a word (and `main` ends no test)."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        sys.exit(main(ten, sys.argv[1:]))
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        sys.exit(2)


def main(ten, argv):
    """Answer the words `argv`; returns the exit status. ten: chapter 10, as a module."""
    args = arguments(ten, argv)
    if args.published or args.problems:
        from lab import published

        print(*published.tables() if args.published else published.problems(), sep="\n")
        return 1 if args.published and published.beyond() else 0
    asked = Question(ten, args)
    model, gpus, batch = asked.model, asked.gpus, asked.batch
    fit, others = asked.find(gpus, asked.fixed)
    if not fit:
        raise Refused(advice(asked, others))
    print(f"{model.parameters() / 1e9:.1f} G parameters on {gpus} x {args.cluster}, "
          f"{args.software}: {batch} sequences of {model.seq:,} a step; {len(fit)} layouts "
          + ("may fit, and none does for sure" if fit[0].why else "fit"))
    if fit[0].why:
        print(f"({advice(asked, fit)})")
    print_plans(asked, fit)
    print(*[f"({caveat})\n" for caveat in asked.caveats()], sep="", end="")
    if args.explain:
        print(*ten.explain(model, asked.cluster, asked.software, gpus, batch, fit[0]), sep="\n")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(as_json(asked, fit), file, indent=1)
    return 0
