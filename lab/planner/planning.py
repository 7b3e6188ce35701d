"""The command line of chapter 10, which plans: its flags are the fields of the chapter's classes.

    python 10_planner.py --help

Like the chapter, it needs no torch: an answer takes a second. Where no layout fits, it names a
change with which one does. ten: chapter 10's module.
"""

import argparse
import contextlib
import functools
import inspect
import json
import math
import sys
from dataclasses import asdict, fields, replace

from lab.planner import batch as batches
from lab.planner import muon
from lab.run import commands, refusals
from lab.run.commands import number
from lab.run.refusals import refusal

CAUSES = ("matmul", "attention", "elementwise", "weights", "tp", "cp", "ep", "pp", "dp", "bubble",
          "optimizer")
MOST = 300_000          # layouts of a search, which takes some seconds
MOST_OF_A_TRY = 15_000  # of what would work instead
LIMITS = {              # of whole numbers: the first one that is too high, and one that would work
    "layers": (10**5, 32), "experts": (2**16, 8), "gpus": (2**24, 8),
    "weight_bytes": (9, 2), "gradient_bytes": (9, 4),
    "master_bytes": (9, 4), "moment_bytes": (17, 8), "sent_bytes": (5, 4)}
NONE = "gradient_bytes", "master_bytes", "moment_bytes"         # whole numbers that may be 0
GPUS = 8                # where nothing says how many
AXES = "dp", "tp", "cp", "pp"
SHARES = {"matmul": (0.001, 1), "attention": (0.001, 1), "ep_units": (0, 0.9)}  # others: to 1
RATE = "number of FLOP/s, bytes or bytes/s from 1e6 to 1e24"


# ---------------------------------------------------------------------------------------- the flags

def whole(name, lowest=1):
    """An argparse type: a whole number above 0, or one that may be 0."""
    return number(int, lowest, *LIMITS.get(name, (2**31, 1)))


def between(lowest, highest, what, example):
    """An argparse type: a number within these bounds. what: how a refusal describes it."""
    def convert(text):
        with contextlib.suppress(ValueError):
            if lowest <= float(text) <= highest:
                return float(text)
        raise refusal()(f"{text or repr(text)} is no {what}", example)

    return convert


@functools.cache
def comments(kind):
    """{field: the comment behind it in the chapter}, which is the help of its flag."""
    source = inspect.getsource(sys.modules[kind.__module__])    # of the class, it would be parsed
    names, texts = {field.name for field in fields(kind)}, {}
    _, _, rest = source.partition(f"\nclass {kind.__name__}:\n")
    for line in rest.split("\n\n\n")[0].splitlines():
        code, _, comment = line.partition("  # ")
        name = code.partition(":")[0].strip()
        if comment and name in names:
            texts[name] = comment
    return texts


def options_of(ten, field):
    """What argparse is told of a field's flag."""
    name = field.name
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if name in ten.CHOICES:
        return {"choices": ten.CHOICES[name], "type": field.type}
    if field.type is int:
        may_be_0 = field.default == 0 or name in NONE
        return {"type": whole(name, 0 if may_be_0 else 1)}
    if name in SHARES or "hidden" in name or "alpha" in name:
        lowest, highest = SHARES.get(name, (0, 1))
        return {"type": between(lowest, highest, f"number from {lowest} to {highest}", "0.5")}
    return {"type": between(1e6, 1e24, RATE, "80e9")}


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
            text = comments(kind).get(field.name, "").replace("%", "%%")
            group.add_argument(as_flag(field.name), **options_of(ten, field), help=text)
    add("--no-pp", dest="pp", action="store_const", const=1, help="as --pp 1")
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


def as_flags(change):
    """As they are typed, of {field: value}."""
    return " ".join(as_flag(name, value) for name, value in change.items())


# ------------------------------------------------------------------------------------- the question

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


def model_of(ten, args):
    """The model that is named, or a GPT of the sizes that are given."""
    sizes = args.layers, args.dim, args.heads
    if args.model or not any(sizes):
        return ten.MODELS[args.model or "8b"]
    if not all(sizes):
        raise refusal()("a model of one's own has --layers, --dim and --heads; with --model they "
                        "are put in place of its own", "--model 8b")
    return ten.gpt(*sizes)


def refuse_model(model):
    """Raise Refused for sizes that don't fit each other, whatever the layout."""
    if not model.head_dim and model.dim % model.heads:
        raise refusal()(f"--dim {model.dim} is not a multiple of --heads = {model.heads}",
                        f"--heads {math.gcd(model.dim, model.heads)}")
    if model.heads % model.kv_heads:
        raise refusal()(f"--heads {model.heads} is not a multiple of --kv-heads = "
                        f"{model.kv_heads}", f"--kv-heads {math.gcd(model.heads, model.kv_heads)}")
    if model.dense_layers > model.layers:
        raise refusal()(f"--dense-layers {model.dense_layers} are more than --layers = "
                        f"{model.layers}", f"--dense-layers {model.layers}")
    for flag, value in {"--shared": model.shared, "--node-limit": model.node_limit}.items():
        if model.experts == 1 and value:
            raise refusal()(f"{flag} {value} is about experts, of which there are none",
                            "--experts 8")
    if model.top_k > model.experts:
        raise refusal()(f"--top-k {model.top_k} is more than --experts = {model.experts}",
                        f"--top-k {model.experts}")


class Question:
    """What the flags ask: model, cluster, software, gpus, batch, and the degrees that are fixed."""

    most = 16           # sequences of a micro-batch that a search tries

    def __init__(self, ten, args):
        self.ten, self.name = ten, args.model
        self.model = replace(model_of(ten, args), **given(args, ten.Model))
        self.cluster = replace(ten.CLUSTERS[args.cluster], **given(args, ten.Cluster))
        self.software = replace(ten.SOFTWARE[args.software], **given(args, ten.Software))
        self.fixed = given(args, ten.Layout)
        self.gpus, self.batch = gpus_of(args), batch_of(args)
        if self.software.fp8 and not self.cluster.has_fp8:
            raise refusal()(f"--cluster {args.cluster} has no matmuls in FP8",
                            "without --fp8" if args.fp8 else "--no-fp8")
        refuse_model(self.model)

    def degrees(self, gpus, fixed):
        return self.ten.degrees(self.model, self.cluster, self.software, gpus, fixed, self.most)

    def layouts(self, gpus, fixed):
        """How many a search tries."""
        return math.prod(map(len, self.degrees(gpus, fixed).values()))

    def refuse_long_searches(self):
        """Raise Refused, with the degrees to fix: those of which most would be tried."""
        degrees, change = self.degrees(self.gpus, self.fixed), {}
        layouts = self.layouts(self.gpus, self.fixed)
        for name in sorted(degrees, key=lambda name: -len(degrees[name])):
            if self.layouts(self.gpus, self.fixed | change) > MOST:
                change[name] = degrees[name][0]
        if change:
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

    def find(self, gpus=None, fixed=None, batch=None):
        """The plans that fit, and the others (see the chapter's `search`); what is given here is
        put in place of the question's."""
        return self.ten.search(self.model, self.cluster, self.software, gpus or self.gpus,
                               batch or self.batch, self.fixed if fixed is None else fixed,
                               self.most)

    def find_fitting(self, gpus=None, fixed=None, batch=None):
        """A plan that fits if the question is changed so, or None. Of all plans, those with a
        sequence a micro-batch and a slice a stage keep least: only these are tried."""
        gpus, fixed = gpus or self.gpus, self.fixed if fixed is None else fixed
        least = {"micro_batch": 1, "v": 1} | fixed
        if self.layouts(gpus, fixed) > MOST or self.layouts(gpus, least) > MOST_OF_A_TRY:
            return None
        fit, _ = self.find(gpus, least, batch)
        return fit[0] if fit and not fit[0].why else None


def question(ten, argv):
    """The arguments, and what they ask."""
    args = arguments(ten, argv)
    asked = Question(ten, args)
    asked.refuse_long_searches()
    return args, asked


# ----------------------------------------------------------------------------- where no layout fits

def nearest_of(others):
    """Of plans that do not fit, the one that needs least; or one that does not divide."""
    return min(others, key=lambda plan: plan.bytes if plan.memory else math.inf)


def remedies(asked, nearest):
    """[{field: value}]: changes of the question, with each of which some plan fits: another batch,
    one degree that is not fixed, or more GPUs. nearest: a plan that doesn't fit."""
    of_micro_batch = nearest.layout.dp * nearest.layout.micro_batch
    batch = -(-asked.batch // of_micro_batch) * of_micro_batch
    if not nearest.memory and batch != asked.batch and asked.find_fitting(batch=batch):
        return [{"batch": batch}]
    changes = []
    for name in asked.fixed:
        others = {flag: value for flag, value in asked.fixed.items() if flag != name}
        plan = asked.find_fitting(fixed=others)
        if plan:
            changes.append({name: getattr(plan.layout, name)})
    if changes:
        return changes
    most, _ = LIMITS["gpus"]
    for gpus in (asked.gpus * 2**k for k in range(1, 12)):
        if gpus < most and asked.find_fitting(gpus):
            return [{"gpus": gpus}]
    return []


def advice(asked, others):
    """Why there is no plan, and the changes that would work."""
    nearest = nearest_of(others)
    return f"{in_words(asked.ten, nearest.layout)}: {nearest.why}", remedies(asked, nearest)


def in_a_line(why, changes):
    """The two of `advice`."""
    if not changes:
        return f"{why}; no change was found to work"
    return f"{why}; {' or '.join(map(as_flags, changes))} would work"


# --------------------------------------------------------------------------------------- the answer

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


def title(asked, args, fit):
    """The first line of an answer."""
    model = asked.model
    size = f"{model.parameters() / 1e9:.1f} G parameters"
    if model.experts > 1:
        size += f" ({model.parameters(model.top_k) / 1e9:.1f} G of a token)"
    verdict = "may fit, and none does for sure" if fit[0].why else "fit"
    return (f"{size} on {asked.gpus} x {args.cluster}, {args.software}: {asked.batch} sequences of "
            f"{model.seq:,} a step; {len(fit)} layouts {verdict}")


def print_plans(asked, fit):
    """The ten best: seconds, speed, memory, layout, causes, and why it loses to the best."""
    for plan in fit[:10]:
        answer = as_json(asked, [plan])
        line = (f"{plan.total:9.3f} s {answer['tokens_per_second_per_gpu']:7.0f} tokens/s "
                f"{answer['tflops']:4.0f} TFLOP/s {answer['mfu']:4.0%} {plan.bytes / 1e9:4.0f} GB  "
                f"{in_words(asked.ten, plan.layout)}: {asked.ten.largest(plan.seconds, 3)}")
        if plan.total > fit[0].total:
            line += f"; {difference(plan, fit[0])}"
        if plan.why:
            line += f"; {plan.why}: may not fit"
        print(line)


def neighbours(asked, layout):
    """Yield what could be otherwise: ("tp 4", the layout with dp as it was), and so on."""
    ten, model, software = asked.ten, asked.model, asked.software
    for axis in ("tp", "cp", "pp", "v", "ep", "micro_batch"):
        if axis == "v" and layout.pp == 1 or axis == "ep" and model.experts == 1:
            continue
        now = getattr(layout, axis)
        for degree in [now // 2] * (now > 1) + [now * 2]:
            other = replace(layout, **{axis: degree})
            if axis == "pp":                            # a slice has as many layers as it had
                slices = layout.v * now // degree if degree > 1 else 1
                other = replace(other, v=max(1, slices))
            yield f"{axis.replace('_', '-')} {degree}", other
    for name in ("zero", "recompute"):
        for choice in ten.CHOICES[name]:
            if choice != getattr(layout, name) and not (choice == "selective" and software.flash):
                yield f"{name} {choice}", replace(layout, **{name: choice})


def explain(asked, plan):
    """Yield what limits a plan, and what the next degrees of each axis would change."""
    ten, model, gpus, batch = asked.ten, asked.model, asked.gpus, asked.batch
    cluster, software = asked.cluster, asked.software
    yield f"{in_words(ten, plan.layout)}: its {plan.total:.3g} s are {ten.largest(plan.seconds)}."
    yield f"Its {plan.bytes / 1e9:.0f} GB of a GPU are {ten.largest(plan.memory)}."
    of_micro_batch = plan.layout.micro_batch * plan.layout.dp
    yield (f"Its batch of {batch:,} is micro-batch {plan.layout.micro_batch} x accumulated "
           f"{batch // of_micro_batch} x dp {plan.layout.dp}.")
    if software.optimizer == "muon":
        layers = ten.layers_of_stage(model, math.ceil(model.layers / plan.layout.pp))
        yield from muon.explain(layers, plan.layout, ten.Machine(cluster, software), plan.total)
    for name, layout in neighbours(asked, plan.layout):
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


def tables(ten, args, cluster):
    """Print the tables that are asked for, in place of a plan; the status."""
    from lab.planner import contexts, problems, published

    if args.problems:
        print(*problems.problems(ten), sep="\n")
    elif args.contexts:
        print(*contexts.tables(ten, cluster), sep="\n")
    if not args.published:
        return 0
    print(*published.lines(ten), sep="\n")
    return 1 if published.tables_missed(ten) else 0


def program(ten):
    """Chapter 10 as a program."""
    commands.program(lambda: main(ten, sys.argv[1:]))


def main(ten, argv):
    """Answer the words `argv`; returns the exit status."""
    try:
        args, asked = question(ten, argv)
    except refusal() as refused:
        refusals.complain(refused, alone=True)
    if args.published or args.problems or args.contexts:
        return tables(ten, args, asked.cluster)
    fit, others = asked.find()
    if not fit:
        refusals.fail(in_a_line(*advice(asked, others)))
    print(title(asked, args, fit))
    if fit[0].why:
        print(f"({in_a_line(*advice(asked, fit))})")
    print_plans(asked, fit)
    for caveat in asked.caveats():
        print(f"({caveat})")
    if args.explain:
        print(*explain(asked, fit[0]), sep="\n")
    answer = as_json(asked, fit)
    if args.noise_scale:
        ways = batches.best_ways(asked, fit[0], args.noise_scale)
        print(*batches.table(ways, asked.model.seq, args.noise_scale), sep="\n")
        answer["batches"] = [batches.as_data(way) for way in ways]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(answer, indent=1) + "\n")
    return 0
