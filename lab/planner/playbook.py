"""The playbook's plots: what it has measured on its H100s, or computed, and what chapter 10 says.

    python -m lab.texts --draw figures              figures/playbook.png

Its measurements are in playbook.toml. Of a run it gives MFU and tokens/s of a GPU: so it gives the
FLOPs of a token, and by them the parameters, 1.34, 3.57, 8.86 and 80.0 G, which are those of the
shapes there. (Where embedding and head are two matrices, its MFU counts both, and ours the head
alone: of the 8B it says 45% where we say 43%.)

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

ten: chapter 10's module. Source: Tazi et al., The Ultra-Scale Playbook (2025).
"""

import functools
import itertools
from dataclasses import replace

from lab.planner import tables

GIB = 2**30             # its plots are in GiB, and say GB
BATCH = 256             # sequences of a step, of 4,096 tokens
BANDWIDTH = {name: dict(rates) for name, rates in tables.load("playbook")["bandwidth"].items()}
AXES = "dp", "tp", "tp + sp"
RUNS = {                # {(model, nodes): the table of its runs}
    ("1B", 1): "the 1B on 8 GPUs", ("3B", 8): "the 3B on 64 GPUs", ("8B", 1): "the 8B on 8 GPUs",
    ("8B", 16): "the 8B on 128 GPUs", ("80B", 4): "the 80B on 32 GPUs"}


def runs(ten, name, nodes):
    """Its Runs of a model on so many nodes, the fastest first."""
    return tables.runs(ten, RUNS[name, nodes])


def all_runs(ten):
    """Those of all models."""
    every = [tables.runs(ten, table) for table in RUNS.values()]
    return list(itertools.chain.from_iterable(every))


def nanotron(ten):
    """The software of its runs, as far as it is known."""
    return ten.Software(fused_gradients=False)


def mfu(run, tokens_per_second):
    """Of a GPU that trains so many tokens/s; all scores of attention count, as in its MFU."""
    flops = run.ten.step_flops(run.model, 1) / run.model.seq
    return flops * tokens_per_second / run.cluster.peak


# --------------------------------------------------------------------- one degree after the other

def runs_over(ten, axis):
    """{degree: its Run} in the plot of an axis."""
    name = axis.split()[0]
    return {getattr(run.layout, name): run for run in tables.runs(ten, f"over {axis}")}


def with_its_network(run):
    """A Run with rings between nodes as fast as its all_reduce of 256 MB, latency included, of
    which each of a node's 8 network cards has its share."""
    nodes = run.gpus // run.cluster.per_node
    if nodes <= 1:
        return run
    rate = BANDWIDTH["all_reduce"][nodes] * 1e9 / run.cluster.per_node / run.ten.NIC
    return replace(run, cluster=replace(run.cluster, nic=rate, nic_alpha=0.0))


def share_lost(before, after):
    """The share of a speed that is lost from one to the other."""
    return 1 - after / before


def largest_that_fits(run):
    """The largest micro-batch that the planner believes to fit in the layout of a Run."""
    def fits(size):
        return replace(run, layout=replace(run.layout, micro_batch=size), batch=size).fits

    size = 1
    while fits(size + 1):
        size += 1
    return size


def speed_over_stages(ten, stages, micro_batches, name="8B"):
    """Predicted tokens/s of a GPU in a pipeline with micro-batches of a sequence. (The text does
    not say of which model its plot is.)"""
    model, layout = tables.models(ten)[name], ten.Layout(pp=stages, sp=False)
    plan = ten.Plan(model, layout, ten.CLUSTERS["h100"], nanotron(ten), stages, micro_batches)
    return micro_batches * model.seq / plan.total / stages


# ------------------------------------------------------------------------ the best configuration

@functools.cache
def best(ten, name, nodes):
    """The fastest plan that fits on so many nodes, of the layouts that it has tried: dp, tp, pp,
    ZeRO-0 or -1, nothing recomputed. None, if none fits."""
    plans = []
    for zero in (0, 1):
        fixed = {"zero": zero, "cp": 1, "v": 1, "ep": 1, "recompute": "none"}
        fit, _ = ten.search(tables.models(ten)[name], ten.CLUSTERS["h100"], nanotron(ten),
                            8 * nodes, BATCH, fixed)
        plans += [plan for plan in fit if not plan.why]
    return min(plans, key=lambda plan: plan.total, default=None)


def best_speed(ten, name, nodes):
    """Predicted tokens/s of a GPU in that plan."""
    return BATCH * 4096 / best(ten, name, nodes).total / (8 * nodes)


def ring_bandwidth(ten, nodes):
    """B/s of an all_gather of 256 MB on so many nodes, as nccl-tests counts them."""
    n = 8 * nodes
    machine = ten.Machine(ten.CLUSTERS["h100"], ten.Software())
    return (n - 1) / n * 256e6 / machine.ring(256e6, n, 1)
