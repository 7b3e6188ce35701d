"""Context parallelism of long sequences: what goes inside of a machine, what between machines, and
what a layer waits for.

    python 10_planner.py --contexts                 (of a machine: with --nic, --per-node, ...)

N ranks hold s/N tokens each (chapter 06). U neighbours exchange heads, all_to_all, and N/U of them,
U apart, are a ring: of U = 1 it is the ring alone, of U = N Ulysses alone. With kv numbers of keys
and values of a token, and q + o of its queries and outputs, of e bytes, a rank sends in forward

    exchange      (U-1)/U · (s/N) · (q + kv + o) · e    kv: repeated, until each of U has a head
    ring          (N/U - 1) · (s/N) · kv · e            in N/U - 1 hops

and in backward as much, and the gradients of keys and values in fp32 around the ring. Compute waits
for exchanges and for what is gathered. Of a hop it waits for what its block does not hide: of the
N/U blocks of a zig-zag, which are all as long with a core that skips what is masked. In backward
keys, values and their gradients are on their way at once; the last gradients come home unhidden.

A ring's hop out of a machine goes through the card of one rank, and all wait for it: so a ring that
goes rank by rank has one card of a machine, and U rings have U of them. (LoongTrain says so too; an
all_gather of NCCL has many rings, and all cards.) In an exchange each rank has its own card.

Not counted: tp (one of 8 takes a machine, and cp is between machines: as in U rings, a rank has an
eighth of the heads, and its own card), recomputation, which sends forward's messages again, SMs
that messages take, and that small blocks are slower. One sequence; bytes in bf16; ten: chapter 10.

Sources: chapter 06's `traffic`; Fang and Zhao, USP (arXiv 2405.07719), 4; Gu et al., LoongTrain
(2406.18485), 4; Megatron Core's `hierarchical_context_parallel_sizes` ("a2a+p2p").
"""

from collections import Counter
from dataclasses import dataclass, replace

MODELS = "8b", "70b"
CASES = (131_072, 16), (131_072, 64), (2**20, 64), (2**20, 256)     # tokens, ranks


@dataclass(frozen=True)
class Cut:
    """Of a sequence. inner: ranks that exchange heads; gathers: keys and values, in place of rings.
    """
    ranks: int
    inner: int = 1
    gathers: bool = False

    @property
    def parts(self):
        return self.ranks // self.inner

    def places(self, per_node):
        """Yield of each rank how many of those with which it exchanges heads are in its machine,
        how many in others, and whether the next one of its ring is in another."""
        for rank in range(self.ranks):
            first, machine = rank - rank % self.inner, rank // per_node
            begin, end = machine * per_node, (machine + 1) * per_node
            near = min(first + self.inner, end) - max(first, begin) - 1
            far = self.inner - 1 - near
            yield near, far, (rank + self.inner) % self.ranks // per_node != machine


def inners(model, ranks):
    """All U that share heads, and kv heads or copies of them, evenly."""
    heads, kv_heads = model.heads, model.kv_heads
    return [inner for inner in range(1, ranks + 1) if ranks % inner == heads % inner == 0
            and (kv_heads % inner == 0 or inner % kv_heads == 0)]


# -------------------------------------------------------------------------------------- the bytes

def keys_of_token(model, cut):
    """Numbers of a token that are sent as its keys and values, with a head for each of U ranks."""
    return model.keys // model.kv_heads * max(model.kv_heads, cut.inner)


def sent(model, seq, cut, e=2):
    """Of a layer's forward, and of its backward: {op: bytes that a rank sends}."""
    tokens, keys = seq // cut.ranks, keys_of_token(model, cut)
    exchanged = tokens * (model.queries + keys + model.values) * e
    exchange = {"all_to_all": exchanged * (cut.inner - 1) / cut.inner}
    around = (cut.parts - 1) * tokens * keys
    if cut.gathers:
        return exchange | {"all_gather": around * e}, exchange | {"reduce_scatter": around * e}
    return exchange | {"send": around * e}, exchange | {"send": around * (e + max(e, 4))}


def inside_and_between(model, seq, cut, per_node, e=2):
    """Bytes of a layer's forward and backward together: what a rank sends in its machine, and to
    others, in the mean; and what goes through the card that has most."""
    sizes = sum(map(Counter, sent(model, seq, cut, e)), Counter())
    exchange = sizes.pop("all_to_all", 0) / max(1, cut.inner - 1)       # to each
    around = sum(sizes.values())
    cards = max(1, per_node // cut.inner) if cut.gathers else 1
    near, far, leave = zip(*cut.places(per_node))
    between = [exchange * peers + around * leaves for peers, leaves in zip(far, leave)]
    everything = exchange * (cut.inner - 1) + around
    mean = sum(between) / cut.ranks
    return everything - mean, mean, max(exchange * peers + around * leaves / cards
                                        for peers, leaves in zip(far, leave))


def tokens_to_hide(model, flops, bandwidth, inner=1, e=2):
    """Tokens of a rank from which on a zig-zag's hop hides in forward (chapter 06). On two levels a
    U-th of them: a block has U times as many queries, and keys, of a U-th of the heads. flops:
    FLOP/s of attention. bandwidth: bytes/s."""
    keys = keys_of_token(model, Cut(inner, inner))
    return keys * e / (model.queries + model.values) * flops / bandwidth / inner


# ------------------------------------------------------------------------------------ the seconds

@dataclass(frozen=True)
class Layer:
    """Seconds of a layer's forward and backward together: what it computes; what it waits for
    exchanges, and for hops, or for what is gathered. And of the pass whose hops are hidden least: a
    hop, and the block that hides it."""
    cut: Cut
    computing: float = 0
    exchange: float = 0
    around: float = 0
    hop: float = 0
    block: float = 1

    @property
    def waits(self):
        return self.exchange + self.around

    @property
    def seconds(self):
        return self.computing + self.waits


def layer(ten, model, seq, cluster, cut):
    """The Layer of a sequence of so many tokens."""
    machine, total = ten.Machine(cluster, ten.Software()), Layer(cut)
    for direction in zip(("forward", "backward"), ten.layer_seconds(
            replace(model, seq=seq), ten.Layout(cp=cut.ranks), machine), sent(model, seq, cut)):
        part = one_pass(machine, model, seq, cut, *direction)
        later = part if part.hop / part.block > total.hop / total.block else total
        total = Layer(cut, total.computing + part.computing, total.exchange + part.exchange,
                      total.around + part.around, later.hop, later.block)
    return total


def one_pass(machine, model, seq, cut, direction, seconds, sizes):
    """The Layer of a forward or a backward. seconds: what chapter 10 says of it, by cause."""
    cluster, tokens = machine.cluster, seq / cut.ranks
    near, far, leave = zip(*cut.places(cluster.per_node))
    computing, attention = sum(seconds.values()) - seconds["cp"], seconds["attention"]

    def across(leaves):
        """Latency and bandwidth to a neighbour, in this machine or in another."""
        alpha = cluster.nic_alpha if leaves else cluster.alpha
        return alpha, machine.link(cluster.per_node + 1 if leaves else 1)

    exchange = 0
    if cut.inner > 1:                                   # of q, k, v, and of the output
        to_each, (alpha, network) = sizes["all_to_all"] / (cut.inner - 1), across(any(far))
        busiest = max(max(far) / network, max(near) / across(False)[1])
        exchange = 4 * alpha + to_each * busiest
    if cut.parts == 1:
        return Layer(cut, computing, exchange)

    keys = tokens * keys_of_token(model, cut)
    if cut.gathers:
        return Layer(cut, computing, exchange,
                     machine.ring(2 * keys * cut.parts, cut.parts, cut.inner))

    (alpha, link), block = across(any(leave)), attention / cut.parts
    widths = [2] * (cut.parts - 1)                      # bytes of a number that leaves at each hop
    if direction == "backward":                         # and gradients, when their block is done
        widths = [2 * (hop < cut.parts - 1) + 4 * (hop > 1) for hop in range(cut.parts)]
    hops = [alpha + width * keys / link if width else 0 for width in widths]
    around = sum(max(0, hop - block) for hop in hops)
    if direction == "backward":
        around += alpha + 4 * keys / link               # the last gradients come home
    return Layer(cut, computing, exchange, around, max(hops), block)


def ways(ten, model, seq, cluster, ranks):
    """The Layers of a ring; of two levels, a machine inside, and the best U if that is another one;
    of Ulysses; of gathered keys."""
    def of(inner, **more):
        return layer(ten, model, seq, cluster, Cut(ranks, inner, **more))

    possible = inners(model, ranks)
    two = [of(inner) for inner in possible if 1 < inner < ranks]
    chosen = {1, cluster.per_node, ranks}.intersection(possible)
    if two:
        chosen.add(min(two, key=lambda way: way.seconds).cut.inner)
    return [*map(of, sorted(chosen)), of(1, gathers=True)]


# -------------------------------------------------------------------------------------- the tables

HEAD = (f"{'MB of a rank: inside':>40}{'between':>10}{'one card':>10}{'ms: a hop':>12}{'block':>8}"
        f"{'waits':>8}{'layer':>9}")


def title(cut):
    if cut.gathers:
        return "gathered keys"
    return {1: "ring", cut.ranks: "Ulysses"}.get(cut.inner, f"two levels, U = {cut.inner}")


def table(ten, name, model, cluster, seq, ranks):
    """Yield the lines of a model, a sequence and so many ranks."""
    layers = ways(ten, model, seq, cluster, ranks)
    yield (f"{name}: {seq:,} tokens on {ranks} GPUs, {seq // ranks:,} on each; computing takes "
           f"{1e3 * layers[0].computing:,.1f} ms")
    yield HEAD
    for way in layers:
        inside, between, card = inside_and_between(model, seq, way.cut, cluster.per_node)
        hop = f"{1e3 * way.hop:12.3g}{1e3 * way.block:8.3g}" if way.hop else f"{'-':>12}{'-':>8}"
        yield (f"  {title(way.cut):<26}{inside / 1e6:12,.0f}{between / 1e6:10,.0f}"
               f"{card / 1e6:10,.0f}{hop}{1e3 * way.waits:8,.1f}{1e3 * way.seconds:9,.1f}")
    if ranks not in inners(model, ranks):
        yield f"  Ulysses                   {model.heads} heads are not shared by {ranks} ranks"


def tables(ten, cluster):
    """Yield the lines of all tables, of a cluster."""
    yield "A layer's forward and backward. MB: that a rank sends in its machine and to others, in"
    yield "the mean, and that go through the network card that has most. A hop that takes longer"
    yield "than a block of attention doesn't hide behind it."
    flops, network = cluster.peak * cluster.attention, cluster.nic * ten.NIC
    for name in MODELS:
        alone, machine = (tokens_to_hide(ten.MODELS[name], flops, network, inner)
                          for inner in (1, 8))
        yield (f"\n{name}: a hop between machines hides in forward from {alone:,.0f} tokens of a "
               f"rank on; with U = 8 from {machine:,.0f}")
        for case in CASES:
            yield from table(ten, name, ten.MODELS[name], cluster, *case)
