"""The playbook's plots: what it has measured on its H100s, or computed, and what chapter 10 says.

    python -m lab.texts --draw figures              figures/playbook.png

Its runs are Nanotron's, of four Llama-like models with all of their kv heads and a vocabulary of
131,072, on nodes of 8 H100s. Sequences have 4,096 tokens, and a step 1 M of them. Of a run it gives
MFU and tokens/s of a GPU: so it gives the FLOPs of a token, and by them the parameters, 1.34, 3.57,
8.86 and 80.0 G, which are those of the shapes below. (Where embedding and head are two matrices,
its MFU counts both, and ours the head alone: of the 8B it says 45% where we say 43%.)

None of the planner's numbers is fitted to these. Of 74 runs 42 are within 20%, half of all within
15%; of the 13 of the 8B on a node, ten are within 11%. What the planner leaves out shows in others:

    small kernels   They take time to start. With a micro-batch of one sequence on tp 8, the 1B ran
                    at a third of the speed that is planned.
    full memory     The 8B that took 71.5 GiB ran at a third, too, and the 80B on 4 nodes at less.
    the network     It gets slower with the nodes: on 64, an all_reduce of 256 MB had a twelfth of
                    the rate of a node's 8 cards. With the bandwidths that they have measured in
                    place of the data sheet's, the plot over dp is met within 16%; with the data
                    sheet's, what is planned for 256 GPUs is 61% too fast.

All runs took more memory than is planned, half of them more than 1.4 times as much. Why, is not
told. A token has 131,072 logits, and two copies of them in fp32 are all that the planner counts.

ten: chapter 10's module. Source: Tazi et al., The Ultra-Scale Playbook (2025), its plots, most of
which show their numbers to a mouse.
"""

import functools
from dataclasses import replace

GIB = 2**30             # its plots are in GiB, and say GB
BATCH = 256             # sequences of a step, of 4,096 tokens
SHAPES = {              # layers, dim, heads, ffn, whether embedding and head are one matrix
    "1B": (16, 2048, 16, 8192, True), "3B": (28, 3072, 24, 8192, True),
    "8B": (32, 4096, 32, 14336, False), "80B": (80, 8192, 64, 28672, False)}

# Tokens/s of a GPU over a degree: of the 1B over dp, and of the 3B over tp; and the largest
# micro-batch that went into memory there.
THROUGHPUT = {
    "dp": {8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23, 128: 26446.44, 256: 15700.38},
    "tp": {2: 13923.18, 4: 12420.76, 8: 10903.32, 16: 6245.6, 32: 2146.44},
    "tp + sp": {2: 14167.25, 4: 13460.16, 8: 10888.53, 16: 6159.3, 32: 3609.73}}
LARGEST = {"tp": {2: 3, 4: 8, 8: 12, 16: 16, 32: 20},
           "tp + sp": {2: 4, 4: 10, 8: 20, 16: 40, 32: 100}}
MEMORY_OF_DP = 36.66    # GiB of a GPU, whatever dp is

# GB/s of an all_reduce and of an all_gather of 256 MB, as nccl-tests' busbw, over nodes: medians.
BANDWIDTH = {"all_reduce": {1: 436.0, 2: 361.7, 4: 160.1, 8: 99.6, 16: 84.7, 32: 64.9, 64: 32.9},
             "all_gather": {1: 249.8, 2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0, 64: 11.0}}

# Micro-batch, dp, pp, tp, ZeRO; tokens/s of a GPU, and GiB. Of more than 4,000 runs: on a node, all
# of the 1B and the 8B with this batch; the seven fastest of the 3B on 8 nodes, and the 20 fastest
# of the 8B on 16; and those of the 80B on 4, each layout once. The fastest comes first.
RUNS = {
    ("1B", 1): """
        2 8 1 1 0 40150 50.2
        1 8 1 1 0 39273 36.7
        1 8 1 1 1 39006 24.2
        4 4 2 1 1 38895 41.8
        2 4 2 1 1 38299 26.4
        1 4 2 1 0 37995 26.8
        1 4 2 1 1 37802 20.6
        8 4 1 2 0 37628 68.3
        1 2 4 1 1 37097 18.1
        2 2 4 1 1 37078 26.2
        1 2 4 1 0 36910 20.8
        4 2 4 1 1 36566 42.6
        8 2 2 2 1 35325 47.8
        4 2 2 2 1 35063 27.7
        8 1 4 2 0 34469 49.8
        16 2 1 4 0 33597 66.7
        16 1 2 4 0 32814 56.1
        8 1 2 4 0 32640 30.4
        1 4 1 2 0 29274 19.5
        16 1 1 8 0 28101 38.3
        1 4 1 2 1 27877 12.5
        1 1 8 1 0 27437 18.4
        2 2 2 2 1 23765 14.4
        1 1 4 2 0 23540 11.1
        1 2 2 2 0 23340 14.7
        1 2 2 2 1 20952 11.3
        1 2 1 4 0 14368 10.4
        1 2 1 4 1 14047 8.2
        1 1 2 4 0 12013 7.6
        1 1 1 8 0 6907 5.4""",
    ("3B", 8): """
        1 64 1 1 1 13312 47.7
        2 64 1 1 1 13310 64.3
        1 32 2 1 1 12501 36.7
        2 32 1 2 1 12356 36.4
        1 16 4 1 1 12228 28.7
        2 32 2 1 1 12147 49.9
        1 32 1 2 1 12101 25.0""",
    ("8B", 1): """
        1 2 4 1 1 7503 63.1
        1 4 1 2 1 7141 65.2
        2 2 2 2 1 7016 62.6
        1 1 8 1 0 6807 62.5
        1 2 2 2 0 6766 63.6
        1 2 2 2 1 6753 53.7
        1 1 4 2 0 6689 40.9
        1 2 1 4 0 6268 51.4
        1 2 1 4 1 6238 36.1
        8 1 1 8 0 5909 60.1
        1 1 2 4 0 5883 30.8
        1 1 1 8 0 3616 24.4
        1 4 2 1 1 2752 71.5""",
    ("8B", 16): """
        8 16 1 8 0 6028 66.9
        2 32 1 4 0 5698 61.2
        4 32 1 4 1 5509 52.9
        2 64 1 2 1 5440 67.7
        1 32 4 1 1 5397 49.7
        1 64 2 1 1 5376 58.3
        1 64 1 2 1 5372 54.2
        4 16 1 8 0 5341 44.3
        2 32 1 4 1 5268 35.9
        1 16 4 2 1 5255 31.4
        2 32 2 2 1 5199 51.0
        2 16 4 2 1 5142 43.5
        8 16 1 8 1 5067 51.9
        1 16 8 1 1 5031 45.7
        1 32 1 4 0 5021 51.4
        1 32 2 2 1 5005 42.1
        1 32 1 4 1 5003 27.6
        1 8 8 2 1 4851 27.1
        4 16 1 8 1 4849 30.9
        2 16 1 8 0 4777 32.0""",
    ("80B", 4): """
        1 1 4 8 0 285 66.0
        1 1 1 32 0 105 51.7
        4 1 1 32 0 72 58.5
        1 1 2 16 0 66 55.3"""}


def model_of(ten, name):
    layers, dim, heads, ffn, tie = SHAPES[name]
    return ten.llama(layers, dim, heads, heads, ffn, vocab=131072, seq=4096, tie=tie)


def nanotron(ten):
    """The software, as far as it is known: flash attention, sums of gradients in fp32, added up by
    a kernel of their own; what tp sends does not hide."""
    return ten.Software(fused_gradients=False)


def cluster_of(ten, nodes, measured=False):
    """H100s; measured: with rings between nodes as fast as its all_reduce of 256 MB, latency
    included, of which each of a node's 8 network cards has its share."""
    cluster = ten.CLUSTERS["h100"]
    if not measured or nodes == 1:
        return cluster
    rate = BANDWIDTH["all_reduce"][nodes] * 1e9 / cluster.per_node / ten.NIC
    return replace(cluster, nic=rate, nic_alpha=0.0)


def speed(ten, name, layout, batch=BATCH, measured=False):
    """Predicted tokens/s of a GPU."""
    model, gpus = model_of(ten, name), layout.stage * layout.pp
    cluster = cluster_of(ten, max(1, gpus // 8), measured)
    seconds = sum(ten.step_seconds(model, layout, cluster, nanotron(ten), batch).values())
    return batch * model.seq / seconds / gpus


def gib_of_gpu(ten, name, layout, batch=BATCH):
    """Predicted GiB of the fullest GPU."""
    m = batch // (layout.dp * layout.micro_batch)
    return sum(ten.memory(model_of(ten, name), layout, nanotron(ten), m).values()) / GIB


def runs(ten):
    """Yield (model, nodes, layout, tokens/s of a GPU, GiB) of each run, as published."""
    for (name, nodes), lines in RUNS.items():
        for line in lines.split("\n")[1:]:
            *numbers, told, gib = line.split()
            micro_batch, dp, pp, tp, zero = map(int, numbers)
            layout = ten.Layout(dp, tp, pp=pp, zero=zero, sp=tp > 1, micro_batch=micro_batch)
            yield name, nodes, layout, float(told), float(gib)


# --------------------------------------------------------------------- one degree after the other

def layout_over(ten, axis, degree, micro_batch=None):
    """Its layout in the plot of an axis. micro_batch: over tp the largest that it found to fit.
    (The text does not say which it ran.) Over dp one sequence, with which GPUs were as full."""
    if axis == "dp":
        return ten.Layout(degree, sp=False, micro_batch=micro_batch or 1)
    return ten.Layout(tp=degree, sp=axis == "tp + sp",
                      micro_batch=micro_batch or LARGEST[axis][degree])


def speed_over(ten, axis, degree, measured=False):
    """Predicted tokens/s of a GPU, in whole micro-batches of about 1 M tokens."""
    layout = layout_over(ten, axis, degree)
    share = layout.dp * layout.micro_batch
    batch = share * max(1, BATCH // share)
    return speed(ten, "1B" if axis == "dp" else "3B", layout, batch, measured)


def drop(of_degree, low, high):
    """The share of the speed that is lost from one degree to another: of measured speeds, {degree:
    tokens/s}, or of a function."""
    get = of_degree.get if isinstance(of_degree, dict) else of_degree
    return 1 - get(high) / get(low)


def largest_that_fits(ten, axis, degree):
    """The largest micro-batch of the 3B that the planner believes to fit on tp GPUs."""
    model, room = model_of(ten, "3B"), ten.ROOM * ten.CLUSTERS["h100"].memory
    layout = layout_over(ten, axis, degree)
    size = 1
    while sum(ten.memory(model, replace(layout, micro_batch=size + 1), nanotron(ten),
                         1).values()) <= room:
        size += 1
    return size


def speed_over_stages(ten, p, m, name="8B"):
    """Predicted tokens/s of a GPU in a pipeline of p stages with m micro-batches of a sequence.
    (The text does not say of which model its plot is.)"""
    return speed(ten, name, ten.Layout(pp=p, sp=False), m)


# ------------------------------------------------------------------------ the best configuration

@functools.cache
def best(ten, name, nodes):
    """The fastest plan that fits on so many nodes, of the layouts that it has tried: dp, tp, pp,
    ZeRO-0 or -1, nothing recomputed. None, if none fits."""
    found = []
    for zero in (0, 1):
        fixed = {"zero": zero, "cp": 1, "v": 1, "ep": 1, "recompute": "none"}
        fit, _ = ten.search(model_of(ten, name), ten.CLUSTERS["h100"], nanotron(ten), 8 * nodes,
                            BATCH, fixed)
        found += [plan for plan in fit if not plan.why]
    return min(found, key=lambda plan: plan.total, default=None)


def best_speed(ten, name, nodes):
    """Predicted tokens/s of a GPU in that plan."""
    return BATCH * 4096 / best(ten, name, nodes).total / (8 * nodes)


def ring_bandwidth(ten, nodes):
    """B/s of an all_gather of 256 MB on so many nodes, as nccl-tests counts them."""
    n = 8 * nodes
    machine = ten.Machine(ten.CLUSTERS["h100"], ten.Software())
    return (n - 1) / n * 256e6 / machine.ring(256e6, n, 1)


def mfu(ten, name, tokens_per_second):
    """Of a GPU that trains so many tokens/s; all scores of attention count, as in its MFU."""
    flops = ten.step_flops(model_of(ten, name), 1) / 4096
    return flops * tokens_per_second / ten.CLUSTERS["h100"].peak
