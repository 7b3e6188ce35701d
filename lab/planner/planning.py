"""The command line of chapter 10, which plans: its flags are the fields of the chapter's classes.

    python 10_planner.py --help

Like the chapter, it needs no torch: an answer takes a second. Where no layout fits, it names a
change with which one does.
"""

import argparse
import functools
import inspect
import json
import math
import re
import sys
from dataclasses import asdict, fields, replace

from lab.planner import batch as batches
from lab.planner import misfits, muon
from lab.run import commands, refusals
from lab.run.commands import number
from lab.run.refusals import refusal

CAUSES = ("matmul", "attention", "elementwise", "weights", "tp", "cp", "ep", "pp", "dp", "bubble",
          "optimizer")
MOST = 300_000          # layouts of a search, which takes some seconds
MOST_OF_A_TRY = 15_000  # of what would work instead
LIMITS = {              # of whole numbers: the first one that is too high, and one that would work
    "layers": (10**5, 32), "experts": (2**16, 8), "gpus": (2**24, 8),
    "max_micro_batch": (2**16, 16), "weight_bytes": (9, 2), "gradient_bytes": (9, 4),
    "master_bytes": (9, 4), "moment_bytes": (17, 8), "sent_bytes": (5, 4)}
NONE = "gradient_bytes", "master_bytes", "moment_bytes"         # whole numbers that may be 0
GPUS = 8                # where nothing says how many
AXES = "dp", "tp", "cp", "pp"
SHARES = {"matmul": (0.001, 1), "attention": (0.001, 1), "ep_units": (0, 0.9)}  # others: to 1


def whole(name, lowest=1):
    """An argparse type: a whole number above 0, or one that may be 0."""
    return number(int, lowest, *LIMITS.get(name, (2**31, 1)))


def share(lowest, most):
    """An argparse type: a number from one to another."""
    def convert(text):
        try:
            if lowest <= float(text) <= most:
                return float(text)
        except ValueError:
            pass
        raise refusal()(f"{text or repr(text)} is no number from {lowest} to {most}", "0.5")

    return convert


def large(text):
    """An argparse type: FLOP/s, bytes or bytes/s, and not a number of GB."""
    try:
        if 1e6 <= float(text) <= 1e24:
            return float(text)
    except ValueError:
        pass
    raise refusal()(f"{text or repr(text)} is no number of FLOP/s, bytes or bytes/s from 1e6 to "
                    "1e24", "80e9")


@functools.cache
def comments(kind):
    """{field: what stands behind it in the chapter}, which --help says of its flag."""
    file = inspect.getsource(sys.modules[kind.__module__])      # of the class, it would be parsed
    _, rest = file.split(f"\nclass {kind.__name__}:\n")
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", rest.split("\n\n\n")[0], re.MULTILINE))


def parser(ten):
    parser = commands.Parser("10_planner.py", description=ten.__doc__)
    add = parser.add_argument
    add("--model", choices=ten.MODELS, help="default: 8b, or a GPT of the sizes that are given")
    add("--cluster", choices=ten.CLUSTERS, default="h100", help="its GPUs, and what links them")
    add("--gpus", type=whole("gpus"),
        help=f"default: dp x tp x cp x pp where --dp is given, or {GPUS}")
    add("--batch", type=whole("batch"), help="sequences of a step; default: 64")
    add("--micro-batches", type=whole("micro_batches"),
        help="of a rank and a step; the batch is dp x micro-batch x these")
    add("--software", choices=ten.SOFTWARE, default="megatron-2024",
        help="what it keeps, sends and hides")
    groups = {ten.Model: "in place of the model's", ten.Layout: "else what is fastest",
              ten.Cluster: "in place of the cluster's: FLOP/s, bytes, bytes/s, shares, seconds",
              ten.Software: "in place of the software's"}
    for kind, title in groups.items():
        group = parser.add_argument_group(title)
        for field in fields(kind):
            if field.type is bool:
                options = {"action": argparse.BooleanOptionalAction}
            elif field.name in ten.CHOICES:
                options = {"choices": ten.CHOICES[field.name], "type": field.type}
            elif field.type is int:
                least = 0 if field.default == 0 or field.name in NONE else 1
                options = {"type": whole(field.name, least)}
            elif "hidden" in field.name or "alpha" in field.name or field.name in SHARES:
                options = {"type": share(*SHARES.get(field.name, (0, 1)))}
            else:
                options = {"type": large}
            group.add_argument(as_flag(field.name), **options,
                               help=comments(kind).get(field.name, "").replace("%", "%%"))
    add("--untie", dest="tie", action="store_false", default=None, help="as --no-tie")
    add("--no-pp", dest="pp", action="store_const", const=1, help="as --pp 1")
    add("--max-micro-batch", type=whole("max_micro_batch"), default=16,
        help="the most sequences of a micro-batch that are tried")
    add("--noise-scale", type=number(float, 1, 1e15, 4_000_000), metavar="TOKENS",
        help="of the gradient: how many GPUs, and which batch, shorten the way to the same loss")
    add("--explain", action="store_true", help="what limits the best, and what would change it")
    add("--published", action="store_true", help="published tables, beside what is predicted")
    add("--problems", action="store_true",
        help="worked problems of the scaling book, the playbook and Megatron's paper")
    add("--contexts", action="store_true",
        help="long sequences on many ranks: what a ring, Ulysses, and both take on this cluster")
    add("--json", type=commands.output("plan.json"), help="write the best plan, and all that fit")
    return parser


def arguments(ten, argv):
    return parser(ten).parse_args(argv)


def given(args, kind):
    """What the flags put in place of its fields."""
    values = {field.name: getattr(args, field.name) for field in fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def as_flag(name, value=None):
    """The flag of a field; with a value, as it is typed."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return flag if value is None else f"{flag} {value}"


def gpus_of(args):
    """As they are given; or as many as the degrees say, those that are not given being 1."""
    if args.gpus or not args.dp:
        return args.gpus or GPUS
    gpus, (below, _) = math.prod(getattr(args, axis) or 1 for axis in AXES), LIMITS["gpus"]
    if gpus >= below:
        raise refusal()(f"--dp {args.dp}, with the other degrees, is {gpus:,} GPUs: {below - 1:,} "
                        "are the most", "--dp 1")
    return gpus


def batch_of(args):
    """Sequences of a step: as they are given, or micro-batches of all ranks of dp."""
    if not args.micro_batches:
        return args.batch or 64
    if args.batch:
        raise refusal()(f"--batch {args.batch} and --micro-batches {args.micro_batches} say the "
                        "same", "without --micro-batches")
    if not (args.dp and args.micro_batch):
        raise refusal()("--micro-batches make a batch with --dp and --micro-batch",
                        f"--dp {args.dp or GPUS} --micro-batch {args.micro_batch or 1}")
    batch = args.dp * args.micro_batch * args.micro_batches
    if batch >= 2**31:
        raise refusal()(f"--micro-batches {args.micro_batches} make a batch of {batch:,} "
                        "sequences, which is too many", "--micro-batches 1")
    return batch


class Question:
    """What the flags ask: model, cluster, software, gpus, batch, and the degrees that are fixed."""

    def __init__(self, ten, args):
        self.ten, self.name = ten, args.model
        model, sizes = ten.MODELS[args.model or "8b"], (args.layers, args.dim, args.heads)
        if all(sizes) and not args.model:
            model = ten.gpt(*sizes)
        elif any(sizes) and not args.model:
            raise refusal()("a model of one's own has --layers, --dim and --heads; with --model "
                            "they are put in place of its own", "--model 8b")
        self.model = replace(model, **given(args, ten.Model))
        self.cluster = replace(ten.CLUSTERS[args.cluster], **given(args, ten.Cluster))
        self.software = replace(ten.SOFTWARE[args.software], **given(args, ten.Software))
        self.fixed, self.most = given(args, ten.Layout), args.max_micro_batch
        self.gpus, self.batch = gpus_of(args), batch_of(args)
        if self.software.fp8 and not self.cluster.has_fp8:
            raise refusal()(f"--cluster {args.cluster} has no matmuls in FP8",
                            "without --fp8" if args.fp8 else "--no-fp8")
        if self.model.dense_layers > self.model.layers:
            raise refusal()(f"--dense-layers {self.model.dense_layers} are more than --layers = "
                            f"{self.model.layers}", f"--dense-layers {self.model.layers}")
        experts, top_k = self.model.experts, self.model.top_k
        about = {"--shared": self.model.shared, "--node-limit": self.model.node_limit}
        for flag, value in about.items():
            if experts == 1 and value:
                raise refusal()(f"{flag} {value} is about experts, of which there are none",
                                "--experts 8")
        if top_k > experts:
            raise refusal()(f"--top-k {top_k} is more than --experts = {experts}",
                            f"--top-k {experts}")

    def degrees(self, gpus, fixed):
        return self.ten.degrees(self.model, self.cluster, self.software, gpus, fixed, self.most)

    def layouts(self, gpus, fixed):
        """How many a search tries."""
        return math.prod(map(len, self.degrees(gpus, fixed).values()))

    def refuse_long_searches(self):
        degrees, layouts = self.degrees(self.gpus, self.fixed), self.layouts(self.gpus, self.fixed)
        if layouts > MOST:
            free = [name for name in degrees if name not in self.fixed]
            free.sort(key=lambda name: -len(degrees[name]))
            change = {}
            while self.layouts(self.gpus, self.fixed | change) > MOST:
                name = free[len(change)]
                change[name] = degrees[name][0]
            raise refusal()(f"{layouts:,} layouts are more than the {MOST:,} of a search",
                            as_flags(change))

    def caveats(self):
        """What is to be known of the answer."""
        if self.name == "deepseek-v3":
            yield "without the module that predicts one token more, 4% of its FLOPs"
        if self.model.experts > 1:
            yield ("of 29 published speeds of mixtures, 22 are within 20% of what is planned, "
                   "and 6 ran slower, by up to 3 times: --published")
        if self.model.node_limit and not self.software.two_hops:
            yield "--node-limit counts only with --two-hops: else a row goes to each expert"
        if self.software.fp8:
            yield "MFU is of the peak in bf16: FP8 has twice that"

    def find(self, gpus, fixed, batch=None):
        """The plans that fit, and the others (see the chapter's `search`)."""
        return self.ten.search(self.model, self.cluster, self.software, gpus, batch or self.batch,
                               fixed, self.most)

    def find_least(self, gpus=None, fixed=None, batch=None):
        """As `find`, of plans with a sequence a micro-batch and a slice a stage, which keep least:
        if any plan fits, one of those does. None where it is too much for one of many tries."""
        gpus, fixed = gpus or self.gpus, self.fixed if fixed is None else fixed
        fixed = {"micro_batch": 1, "v": 1} | fixed
        if self.layouts(gpus, fixed) <= MOST_OF_A_TRY:
            return self.find(gpus, fixed, batch)
        return None

    def least(self, gpus=None, fixed=None, batch=None):
        """A plan that fits, or None."""
        found = self.find_least(gpus, fixed, batch)
        return best(found) if found else None


def has_tables(args):
    """Whether tables are asked for, and no plan."""
    return args.published or args.problems or args.contexts


def question(ten, argv):
    """The arguments, and what they ask."""
    args = arguments(ten, argv)
    asked = Question(ten, args)
    asked.refuse_long_searches()
    return args, asked


def some_plan_fits(ten, argv):
    """Whether a question has an answer: False for one that is refused, too."""
    try:
        _, asked = question(ten, argv)
    except refusal():
        return False
    return asked.least() is not None


def best(found):
    """The fastest plan that fits, of what a search has found."""
    fit, _ = found
    return fit[0] if fit and not fit[0].why else None


def nearest_of(others):
    """Of plans that do not fit, the one that needs least; or one that does not divide."""
    return min(others, key=lambda plan: plan.bytes if plan.memory else math.inf)


def mends(asked, nearest, argv):
    """[(field, value)]: what may let the numbers of a plan divide, first those that are given."""
    if nearest.memory:
        return []
    changes = misfits.changes(asked.model, nearest.layout, asked.gpus, asked.batch)
    given = {word.partition("=")[0] for word in argv}
    return sorted(changes, key=lambda change: as_flag(change[0]) not in given)


def remedies(asked, nearest, argv):
    """[{field: value}]: changes of the question, with each of which some plan fits; [] if none was
    found. nearest: a plan that doesn't fit."""
    of_micro_batch = nearest.layout.dp * nearest.layout.micro_batch
    batch = -(-asked.batch // of_micro_batch) * of_micro_batch
    if not nearest.memory and batch != asked.batch and asked.least(batch=batch):
        return [{"batch": batch}]
    changes = []
    for name in asked.fixed:
        other = asked.least(fixed={flag: asked.fixed[flag] for flag in asked.fixed if flag != name})
        if other:
            changes.append({name: getattr(other.layout, name)})
    if changes:
        return changes
    mending = [{name: value} for name, value in mends(asked, nearest, argv)]
    most, _ = LIMITS["gpus"]
    doubled = [{"gpus": asked.gpus * 2**k} for k in range(1, 12) if asked.gpus * 2**k < most]
    for change in [*mending, *doubled, *(one | gpus for one in mending for gpus in doubled)]:
        if some_plan_fits(asked.ten, [*argv, *as_flags(change).split()]):
            return [change]
    return []


def as_flags(change):
    """As they are typed, of {field: value}."""
    return " ".join(as_flag(name, value) for name, value in change.items())


def advice(asked, others, argv):
    """Why there is no plan, and the changes that would work."""
    nearest = nearest_of(others)
    why = f"{in_words(asked.ten, nearest.layout)}: {nearest.why}"
    return why, remedies(asked, nearest, argv)


def in_a_line(why, changes):
    """The two of `advice`."""
    if not changes:
        return f"{why}; no change was found to work"
    return f"{why}; {' or '.join(map(as_flags, changes))} would work"


def as_json(asked, fit):
    """What --json writes: of the best plan, and of all that fit. TFLOP/s and MFU count all scores
    of attention; tflops_causal their half; tflops_hfu also what is computed twice."""
    ten, model, batch = asked.ten, asked.model, asked.batch
    best, rate = fit[0], 1 / fit[0].total / asked.gpus
    flops = {scores: ten.step_flops(model, batch, scores) * rate for scores in ("all", "causal")}
    hardware = ten.step_flops(model, batch, recompute=best.layout.recompute) * rate
    return {"fits": not best.why, "seconds": best.total,
            "parameters": model.parameters(),
            "parameters_of_a_token": model.parameters(model.top_k),
            "tokens_per_second_per_gpu": batch * model.seq * rate,
            "tflops": flops["all"] / 1e12, "tflops_causal": flops["causal"] / 1e12,
            "tflops_hfu": hardware / 1e12, "mfu": flops["all"] / asked.cluster.peak,
            "time": {cause: best.seconds.get(cause, 0) for cause in CAUSES},
            "memory": best.memory | {"total": best.bytes},
            "layout": asdict(best.layout),
            "found": [{"seconds": plan.total, "fits": not plan.why, "layout": asdict(plan.layout)}
                      for plan in fit]}


def in_words(ten, layout):
    """The degrees that are not 1, and what else differs from a Layout()."""
    usual = ten.Layout()
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in asdict(layout).items()
                     if value != getattr(usual, name) and name != "sp") or "nothing is shared"


def difference(plan, other):
    """In which cause a plan differs most from another one, in seconds."""
    seconds = {cause: plan.seconds.get(cause, 0) - other.seconds.get(cause, 0)
               for cause in plan.seconds | other.seconds}
    cause = max(seconds, key=lambda cause: abs(seconds[cause]))
    return f"{cause} {seconds[cause]:+.2g} s"


def print_plans(asked, fit):
    """The ten best: seconds, speed, memory, layout, causes, and why it loses to the best."""
    ten = asked.ten
    for plan in fit[:10]:
        told = as_json(asked, [plan])
        print(f"{plan.total:9.3f} s {told['tokens_per_second_per_gpu']:7.0f} tokens/s "
              f"{told['tflops']:4.0f} TFLOP/s {told['mfu']:4.0%} {plan.bytes / 1e9:4.0f} GB  "
              f"{in_words(ten, plan.layout)}: {ten.largest(plan.seconds, 3)}"
              + (f"; {difference(plan, fit[0])}" if plan.total > fit[0].total else "")
              + (f"; {plan.why}: may not fit" if plan.why else ""))


def neighbours(ten, model, layout, software):
    """Yield what could be otherwise: ("tp 4", the layout with dp as it was), and so on."""
    missing = ["v"] * (layout.pp == 1) + ["ep"] * (model.experts == 1)
    for axis in (axis for axis in ("tp", "cp", "pp", "v", "ep", "micro_batch")
                 if axis not in missing):
        now = getattr(layout, axis)
        for degree in [now // 2] * (now > 1) + [now * 2]:
            other = replace(layout, **{axis: degree})
            if axis == "pp":                            # a slice has as many layers as it had
                other = replace(other, v=max(1, layout.v * now // degree) if degree > 1 else 1)
            yield f"{axis.replace('_', '-')} {degree}", other
    for name in ("zero", "recompute"):
        for choice in ten.CHOICES[name]:
            if choice != getattr(layout, name) and not (choice == "selective" and software.flash):
                yield f"{name} {choice}", replace(layout, **{name: choice})


def explain(ten, model, cluster, software, gpus, batch, plan):
    """Yield what limits a plan, and what the next degrees of each axis would change."""
    yield f"{in_words(ten, plan.layout)}: its {plan.total:.3g} s are {ten.largest(plan.seconds)}."
    yield f"Its {plan.bytes / 1e9:.0f} GB of a GPU are {ten.largest(plan.memory)}."
    of_micro_batch = plan.layout.micro_batch * plan.layout.dp
    yield (f"Its batch of {batch:,} is micro-batch {plan.layout.micro_batch} x accumulated "
           f"{batch // of_micro_batch} x dp {plan.layout.dp}.")
    if software.optimizer == "muon":
        layers = ten.layers_of_stage(model, math.ceil(model.layers / plan.layout.pp))
        yield from muon.explain(layers, plan.layout, ten.Machine(cluster, software), plan.total)
    for name, layout in neighbours(ten, model, plan.layout, software):
        layout = replace(layout, dp=gpus // (layout.tp * layout.cp * layout.pp) or 1,
                         sp=layout.tp > 1 and (layout.sp or plan.layout.tp == 1))
        other = ten.Plan(model, layout, cluster, software, gpus, batch)
        if not other.memory:
            yield f"  with {name}: {other.why}"
            continue
        change = other.total / plan.total - 1
        time = f"{abs(change):.0%} {'more' if change > 0 else 'less'} time"
        room = f"but it {other.why}" if other.why else f"and {other.bytes / 1e9:.0f} GB"
        yield f"  with {name} it would take {time} (mostly {difference(other, plan)}), {room}"


def program(ten):
    """Chapter 10 as a program."""
    commands.program(lambda: main(ten, sys.argv[1:]))


def main(ten, argv):
    """Answer the words `argv`; returns the exit status. ten: chapter 10, as a module."""
    try:
        args, asked = question(ten, argv)
    except refusal() as refused:
        refusals.complain(refused, alone=True)
    if has_tables(args):
        from lab.planner import contexts, problems, published

        print(*(published.tables(ten) if args.published else problems.problems(ten)
                if args.problems else contexts.tables(ten, asked.cluster)), sep="\n")
        return 1 if args.published and published.beyond(ten) else 0
    model, gpus, batch = asked.model, asked.gpus, asked.batch
    fit, others = asked.find(gpus, asked.fixed)
    if not fit:
        refusals.fail(in_a_line(*advice(asked, others, argv)))
    of_token = (f" ({model.parameters(model.top_k) / 1e9:.1f} G of a token)"
                if model.experts > 1 else "")
    print(f"{model.parameters() / 1e9:.1f} G parameters{of_token} on {gpus} x {args.cluster}, "
          f"{args.software}: {batch} sequences of {model.seq:,} a step; {len(fit)} layouts "
          + ("may fit, and none does for sure" if fit[0].why else "fit"))
    if fit[0].why:
        print(f"({in_a_line(*advice(asked, fit, argv))})")
    print_plans(asked, fit)
    print(*[f"({caveat})\n" for caveat in asked.caveats()], sep="", end="")
    if args.explain:
        print(*explain(ten, model, asked.cluster, asked.software, gpus, batch, fit[0]), sep="\n")
    told = {}
    if args.noise_scale:
        ways = batches.best_ways(asked, fit[0], args.noise_scale)
        print(*batches.table(ways, model.seq, args.noise_scale), sep="\n")
        told = {"batches": [batches.as_data(way) for way in ways]}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(as_json(asked, fit) | told, indent=1) + "\n")
    return 0
