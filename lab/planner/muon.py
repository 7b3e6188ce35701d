"""What Muon costs a step, as chapter 11 does it, for the plans of chapter 10.

    python 10_planner.py --model 8b --gpus 64 --batch 512 --optimizer muon --explain

Muon updates the matrices of blocks, experts and routers among them; AdamW tables and norms.

    optimizer states    8 bytes a number of a matrix, a master and a momentum; elsewhere AdamW's 12.
    bytes of a step     4 fewer a number of a matrix than AdamW's: a momentum in and out in place of
                        two moments, and the update out and in, in bf16.
    Newton-Schulz       Five times two products of an (m, n), m <= n, and an (m, m), and a square of
                        that: 5 · (4·m²·n + 2·m³) FLOPs, as fast as any matmul of the planner.
    deal                Under ZeRO the N ranks that hold the same part of a matrix, dp · cp of them
                        or those of an expert, deal the whole matrices out, the largest first. The
                        busiest one sets the pace. Without ZeRO each rank has all the work.
    messages            Two all_to_alls of a deal, 2·(N-1)/N · Ψ/N numbers of 2 bytes. And for each
                        matrix that tp cuts, a gather of its update: all t ranks compute the whole
                        one, which sends (t-1)/t · m·n. Nothing of this hides.

Where neighbours of tp hold the same head of keys, chapter 09 gathers keys and values, in place of a
deal. Bytes and FLOPs are held to runs of chapters 03, 04 and 09 (tests/chapters/test_10_muon.py).
Not counted: what starts kernels, of which small matrices have many; what a deal holds meanwhile,
two bytes of each number that a rank was dealt. And who is busiest with experts need not be so with
all else: here it is.
"""

import functools
from collections import Counter, defaultdict, namedtuple
from dataclasses import astuple, dataclass, replace

STEPS = 5               # of Newton-Schulz
WIDTH = 2               # bytes of a number that is sent: updates are rounded to bf16
Matrix = namedtuple("Matrix", "m n parts")      # m <= n; in how many parts tp cuts it


# -------------------------------------------------------------------------------- what Muon updates

def matrices(model):
    """{kind: {(m, n): how many}} of a layer, whole, by how chapter 10 cuts them; and routers."""
    (q, queries), (kv, _) = model.projections
    h, gates, experts = model.dim, 3 if model.gated else 2, model.experts
    turns = 0 if model.kv_latent else model.rope_dim        # else it is a part of the latents
    key, value = (model.kv_heads * width for width in (model.head + turns, model.head))
    kinds = {"queries": [(q, queries, 1), (model.values, h, 1)],
             "keys": [(kv, key, 1), (kv, value, 1)],
             "latents": [(h, model.q_latent, 1), (h, model.latents - model.q_latent, 1)],
             "mlp" if experts == 1 else "experts": [(h, model.ffn, gates * experts)],
             "shared": [(h, model.ffn * model.shared, gates)],
             "routers": [(h, experts, 1)] if experts > 1 else []}
    of_layer = {kind: Counter() for kind in kinds}
    for kind, shapes in kinds.items():
        for rows, columns, count in shapes:
            if columns:
                of_layer[kind][min(rows, columns), max(rows, columns)] += count
    return of_layer


def numbers(model, layout, software, held):
    """That Muon updates on a GPU, of held: chapter 10's parameters_of_gpu. A router, which is among
    the norms there, has a row for each expert, and an expert two or three of ffn."""
    if software.optimizer == "adamw":
        return 0
    updated = {kind: both for kind, both in held.items() if kind not in ("norms", "tables")}
    if "experts" in held:
        rows = (3 if model.gated else 2) * model.ffn
        updated["routers"] = held["experts"][0] * layout.ep / rows, layout.stage
    return sum(size / (n if layout.zero else 1) for size, n in updated.values())


def groups(kinds, layout, software):
    """{(ranks that hold the same, whether neighbours of tp are among them): {Matrix: how many}} of
    a GPU. kinds: chapter 10's layers_of_stage. An expert is whole on its GPU."""
    owned = defaultdict(Counter)
    for model, layers in kinds:
        cuts = layout.cuts(model, software) | {"routers": 1}
        for kind, shapes in matrices(model).items():
            group = layout.stage // cuts[kind], kind == "keys" and layout.tp > cuts[kind]
            parts, shared = (1, layout.ep) if kind == "experts" else (cuts[kind], 1)
            for (m, n), count in shapes.items():
                owned[group][Matrix(m, n, parts)] += layers * count // shared
    return {group: +own for group, own in owned.items() if +own}


# ------------------------------------------------------------------------------------ who does what

def work(m, n):
    """FLOPs of Newton-Schulz on an (m, n), m <= n."""
    return STEPS * (4 * m * m * n + 2 * m**3)


@functools.lru_cache(maxsize=2**12)
def share_out(kinds, ranks):
    """{how many of each kind a rank gets: how many ranks get those}, as chapter 11's `share_out`
    deals: the largest first, each to a rank that has least so far. kinds: ((FLOPs, how many), ...).
    Many at once: there may be a hundred thousand experts."""
    dealt = Counter({(0,) * len(kinds): ranks})

    def busy(own):
        """FLOPs of a rank that has so many of each kind."""
        return sum(flops * count for (flops, _), count in zip(kinds, own))

    for i in sorted(range(len(kinds)), key=lambda i: -kinds[i][0]):
        flops, left = kinds[i]
        while left:
            least, *others = sorted(dealt, key=busy)
            if left >= ranks and busy(max(dealt, key=busy)) - busy(least) <= flops:
                times, who = left // ranks, Counter(dealt)      # each gets one before any gets two
            else:                                       # until they have no less than the next ones
                count = min(left, dealt[least])
                behind = busy(others[0]) - busy(least) if others else 0
                times, who = max(1, min(left // count, -(-behind // flops))), {least: count}
            left -= times * sum(who.values())
            dealt = dealt - Counter(who) + Counter(
                {(*own[:i], own[i] + times, *own[i + 1:]): count for own, count in who.items()})
    return dealt


def of_busiest(own, ranks):
    """{Matrix: how many} of the one of so many ranks that has most to compute."""
    kinds = tuple((work(x.m, x.n), count) for x, count in own.items())

    def flops(counts):
        return sum(work * count for (work, _), count in zip(kinds, counts))

    return dict(zip(own, max(share_out(kinds, ranks), key=flops)))


# ------------------------------------------------------------------------------------ what it costs

@dataclass(frozen=True)
class Cost:
    """Of a step, on the busiest GPU: numbers whose momentum it keeps, FLOPs, bytes that it sends
    over tp and to those who hold the same (on average), and seconds."""
    numbers: float = 0
    flops: int = 0
    over_tp: float = 0
    to_holders: float = 0
    computing: float = 0
    sending: float = 0

    def __add__(self, other):
        return Cost(*map(sum, zip(astuple(self), astuple(other))))

    @property
    def seconds(self):
        return self.computing + self.sending


def orthogonalizing(machine, m, n):
    """Seconds of Newton-Schulz: x·x^T, its square, and a product with x."""
    return STEPS * (machine.matmul(m, n, m) + machine.matmul(m, m, m) + machine.matmul(m, m, n))


def exchange(machine, size, ranks, stride):
    """Seconds of an all_to_all of so many bytes of a rank, over ranks that lie `stride` apart. What
    leaves a machine goes through each rank's own card, beside what stays on NVLink."""
    cluster = machine.cluster
    near = min(ranks, max(1, cluster.per_node // stride))
    times = [(near - 1) / machine.link(1), (ranks - near) / machine.link(cluster.per_node + 1)]
    return size / ranks * max(times) + (cluster.nic_alpha if ranks > near else cluster.alpha)


def cost_of_group(own, ranks, layers, layout, machine, deals):
    """The Cost of {Matrix: how many} that so many ranks hold alike."""
    held, shared = sum(count * x.m * x.n / x.parts for x, count in own.items()), 1
    to_holders = over_tp = sending = 0
    if layout.zero and ranks > 1:
        stride, size, shared = layout.stage // ranks, WIDTH * held, ranks
        to_holders = (ranks - 1) / ranks * size
        if deals:
            own, to_holders = of_busiest(own, ranks), 2 * to_holders / ranks
            sending = 2 * exchange(machine, size / ranks, ranks, stride)
        else:
            sending = machine.ring(size, ranks, stride, layers)
    for x, count in own.items():
        if x.parts > 1:                                 # neighbours may hold the same part
            size = WIDTH * layout.tp * x.m * x.n / x.parts
            over_tp += count * (layout.tp - 1) / layout.tp * size
            sending += count * machine.ring(size, layout.tp, 1)
    return Cost(held / shared, sum(count * work(x.m, x.n) for x, count in own.items()), over_tp,
                to_holders, sum(count * orthogonalizing(machine, x.m, x.n)
                                for x, count in own.items()), sending)


def cost(kinds, layout, machine, way="deal"):
    """The Cost of a GPU. kinds: its layers, as chapter 10's layers_of_stage gives them. way:
    "gather", if under ZeRO each rank gathers all updates and has all the work."""
    layers = sum(count for _, count in kinds)
    return sum((cost_of_group(own, ranks, layers, layout, machine, way == "deal" and not are_copies)
                for (ranks, are_copies), own in groups(kinds, layout, machine.software).items()),
               Cost())


def seconds(kinds, layout, machine):
    """What a step takes longer than with AdamW alone, whose bytes are more."""
    if machine.software.optimizer == "adamw":
        return 0
    own = cost(kinds, layout, machine)
    spared = machine.software.moment_bytes - 2 * WIDTH
    return own.seconds - spared * own.numbers / machine.bandwidth


def explain(kinds, layout, machine, total):
    """Yield what it costs of a step of so many seconds, and what another way would cost instead."""
    dealt = cost(kinds, layout, machine)
    yield (f"Muon takes {in_words(dealt)}, {dealt.seconds / total:.2%} of the step: "
           f"{dealt.flops / 1e12:,.1f} TFLOP of Newton-Schulz on the busiest GPU.")
    if layout.zero:
        other = cost(kinds, layout, machine, "gather")
        times = f"{other.flops / dealt.flops:.1f} times these FLOPs"
        how = f"To gather, with {times} on each GPU, would take"
    else:
        other = cost(kinds, replace(layout, zero=1), machine)
        how = "Dealt out among those who hold the same, with --zero 1, it would take"
    if other.flops != dealt.flops:
        yield f"  {how} {in_words(other)}."


def in_words(cost):
    computing, sending = (f"{1e3 * seconds:,.1f} ms" for seconds in (cost.computing, cost.sending))
    return f"{computing} computing and {sending} sending"
