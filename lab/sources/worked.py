"""What rows of the lecture and of the tutorial, and answers to questions, need more than once: each
puts the functions of chapters together, and none has a formula of its own."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import common
from lab import schedules
from lab.bench import meters
from lab.bench.machines import LATENCY, MACHINES
from lab.chapters import chapter
from lab.planner import published

LLAMA_7B = common.Config(32, 4096, 32, 32, 4096, 32000, gated=True, ffn=11008)


def ten():
    return chapter("10")


def states(stage: int, n: int) -> float:
    """Bytes of a parameter on each of n ranks: weights, gradients and optimizer, as chapter 03 cuts
    them in a stage of ZeRO, or in stage 0 does not. Its gradients have 4 bytes; here they have the
    2 bytes of weights, as the texts count them."""
    weights, gradients, optimizer = chapter("03").held(1, stage or 1, n if stage else 1, "bf16")
    return weights + gradients / 2 + optimizer


def sent_in_zero(stage: int, n: int, micro_batches: int = 1) -> float:
    """Bytes that each of n ranks sends in a step of ZeRO for each byte of a model's weights in 16
    bits: of Llama's 7 billion."""
    sent = chapter("03").traffic(LLAMA_7B, stage, n, micro_batches, (2, 2))
    return sum(wire for *_, wire in sent.values()) / (2 * LLAMA_7B.parameters())


def sent_in_layer(number: str, of_op: int, cfg: common.Config = common.PRESETS["7b"],
                  **more) -> float:
    """What a layer adds to a step of chapter 04 or 05 on 8 ranks, of one sequence in 16 bits: of
    each collective its calls (of_op 0), payload (1) or bytes on the wire (2), added up. Gradients
    that are summed once a step are left out."""
    def total(layers):
        sent = chapter(number).traffic(replace(cfg, layers=layers), 1, 1, 8, 2, **more)
        return sum(told[of_op] for op, told in sent.items() if number == "04" or op != "all_reduce")

    return total(2) - total(1)


def idle(name: str, p: int, m: int, v: int = 1) -> float:
    """The share of a step in which a rank waits, where chapter 07 counts it over the work."""
    wait = chapter("07").bubble(name, p, m, v)
    return wait / (1 + wait)


def bubble_in_time(name: str, p: int, m: int, v: int = 1) -> float:
    """The bubble over the work, counted: a schedule's actions start as soon as they can."""
    return schedules.simulated_bubble(chapter("07").make_schedule(name, p, m, v), name)


def idle_in_time(name: str, p: int, m: int, v: int = 1) -> float:
    """The share of a step in which a rank waits, counted so."""
    wait = bubble_in_time(name, p, m, v)
    return wait / (1 + wait)


def alive(name: str, p: int, m: int, v: int = 1) -> int:
    """The most micro-batches that any rank keeps of its v slices."""
    return max(chapter("07").most_alive(name, rank, p, m, v) for rank in range(p))


def kept(model: str, software: str, **layout) -> float:
    """Bytes of a layer's activations on a GPU, of a micro-batch of one sequence."""
    plan = ten()
    return plan.kept_by_layer(plan.MODELS[model], plan.Layout(**layout), plan.SOFTWARE[software])


def saved_by_sequence(model: str, software: str, t: int = 8, recompute: str = "none") -> float:
    """What sequence parallelism takes off a GPU's activations, as a share of those of one GPU that
    has a whole layer."""
    whole = kept(model, software, recompute=recompute)
    return (kept(model, software, tp=t, sp=False, recompute=recompute)
            - kept(model, software, tp=t, recompute=recompute)) / whole


def outside(model: str, software: str, recompute: str = "none") -> float:
    """The share of a layer's activations that lie outside of what tensor parallelism cuts. Sequence
    parallelism takes off all but 1/t of them."""
    return saved_by_sequence(model, software, 8, recompute) / (1 - 1 / 8)


def off_by(cut: str) -> float:
    """The largest difference between a product that chapter 04 cuts in 4 and the whole one."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(shape, generator=generator, dtype=torch.float64)
            for shape in ((8, 16), (16, 12)))
    return (getattr(chapter("04"), cut)(a, b, 4) - a @ b).abs().max().item()


def off_by_mlp() -> float:
    """The same of an MLP: its first matrix by columns, and after GELU the second by rows."""
    generator = torch.Generator().manual_seed(0)
    x, first, second = (torch.randn(shape, generator=generator, dtype=torch.float64)
                        for shape in ((8, 16), (16, 64), (64, 16)))
    four = chapter("04")
    hidden = common.activate(four.matmul_by_columns(x, first, 4))
    whole = common.activate(x @ first) @ second
    return (four.matmul_by_rows(hidden, second, 4) - whole).abs().max().item()


def recomputed(how: str, cfg: common.Config = LLAMA_7B) -> float:
    """FLOPs that recomputation adds, over those of a step without it."""
    flops = functools.partial(chapter("01").step_flops, cfg, 1, "plain")
    return flops(how) / flops("none") - 1


def all_reduce_seconds(name: str, n: int, size: float, machine: str = "H100, NVLink 4") -> float:
    """Of an all_reduce of so many bytes on n ranks, by chapter 00's model."""
    _, bandwidth = MACHINES[machine]
    return chapter("00").seconds(name, n, size, LATENCY[machine], bandwidth)


def share_of_bytes(n: int, size: float, machine: str) -> float:
    """Of the time of a ring all_reduce: what its bytes take, without latencies."""
    _, bandwidth = MACHINES[machine]
    sent = sum(chapter("00").round_bytes("all_reduce_ring", n, size))
    return sent / bandwidth / all_reduce_seconds("all_reduce_ring", n, size, machine)


@functools.cache
def sent_by_fsdp(cfg: common.Config, ranks: int) -> dict:
    """{op: (calls, payload, bytes on the wire)} of PyTorch's fully_shard for one micro-batch, of
    which each module of the model's list is a unit: what a CommMeter counts on rank 0. The other
    ranks are not there: no number arrives, and each tensor has its size. Raises RuntimeError inside
    of a process that has ranks already."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if dist.is_initialized():
        raise RuntimeError("this process is a rank of others")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        model, mesh = common.gpt(cfg), init_device_mesh("cpu", (ranks,))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        tokens = torch.zeros(1, cfg.seq, dtype=torch.int64)
        with meters.CommMeter() as meter:
            common.loss_sum(model(tokens), tokens).backward()
        return {op: (told["calls"], told["bytes"], told["wire_bytes"])
                for op, told in meter.total.items()}
    finally:
        dist.destroy_process_group()


def sent_across_nodes(ranks: int, gradient_bytes: float) -> float:
    """Bytes of a parameter that each of many ranks sends to other nodes in a step of ZeRO++ with
    one micro-batch: forward gathers weights in 8 bits, backward gathers them inside of a node, and
    gradients have so many bytes. (Of 384 ranks, few are in a rank's own node.)"""
    gathered = chapter("03").zeropp_traffic(LLAMA_7B, ranks, 1, (2, 2), 1, True)["all_gather"]
    return gathered[2] / LLAMA_7B.parameters() + gradient_bytes * (ranks - 1) / ranks


def fsdp_over_zero(op: str) -> float:
    """Bytes that PyTorch's fully_shard sends by a collective over those of chapter 03's formula, on
    8 ranks, of a model of 4 layers."""
    cfg = common.Config(4, 64, 4, 4, 16, 256)
    _, _, ours = chapter("03").traffic(cfg, 3, 8, 1)[op]
    return sent_by_fsdp(cfg, 8)[op][2] / ours


def between_groups(n: int, groups: int) -> float:
    """What a rank sends to other groups of n ranks in a step of HSDP, in weights of 16 bits."""
    both, alone = (chapter("03").traffic(LLAMA_7B, 3, n, 1, (2, 2), replicas=replicas)
                   for replicas in (groups, 1))
    wire = both["all_reduce"][2] - alone["all_reduce"][2]
    return wire / (2 * LLAMA_7B.parameters())


def in_int8() -> float:
    """Bytes of a gather in 8 bits, with its scales, over those of one in 16 bits."""
    def gathered(is_quantized):         # by forward alone: backward's stay in a node, of one rank
        sent = chapter("03").zeropp_traffic(LLAMA_7B, 384, 1, (2, 2), 1, is_quantized)
        return sent["all_gather"][2]

    return gathered(True) / gathered(False)


def message(tokens: int, dim: int, tp: int = 1) -> int:
    """Bytes that a rank of one of two stages sends for a micro-batch, in 16 bits: of sequence
    parallelism its part."""
    cfg = SimpleNamespace(experts=0, seq=tokens, dim=dim, heads=tp, kv_heads=tp)
    args = SimpleNamespace(model=cfg, micro_batch=1, cp=1, tp=tp, pp=2, ep=1, recompute="none")
    [(_, size)] = chapter("09").traffic(args, 2, 1, 0, 1, 2)["pp"].values()
    return size


def crossings(limit: int) -> tuple[float, float]:
    """Journeys of a token of DeepSeek-V3 to other machines, by one hop and by two: 8 of 256 experts
    on 8 machines, of which its experts may lie on so many."""
    eight = chapter("08")
    return eight.crossings(eight.Mixture(1, 7168, 128, 128, 4096, 256, experts=256, top_k=8,
                                         nodes=8, node_limit=limit))


def flops_of_token() -> float:
    """Of Llama 3 405B, with the causal half of the scores."""
    model = ten().MODELS["405b"]
    return ten().step_flops(model, 1, "causal") / model.seq


def days_of_llama(tokens: float = 15.6e12) -> float:
    """That 16,384 GPUs take for so many tokens, as fast as chapter 10 plans them with 8K."""
    _, _, tflops, _ = list(published.llama_3(ten()))[1]
    return tokens * flops_of_token() / (16384 * tflops * 1e12) / 86400


def seven_billion(**layout) -> object:
    """Chapter 10's plan of a 7B model on 8 A100s with 40 GB, with full recomputation, and gradients
    in 2 bytes."""
    plan = ten()
    a100 = replace(plan.CLUSTERS["a100"], memory=40e9)
    software = replace(plan.SOFTWARE["megatron-2024"], gradient_bytes=2)
    return plan.Plan(plan.MODELS["7b"], plan.Layout(dp=8, recompute="full", **layout), a100,
                     software, 8, 64)


def seconds_of_micro_batch(size: int) -> float:
    """Of a step of 64 sequences of Llama 3 8B on 8 H100s with ZeRO-1, full recomputation."""
    plan = ten()
    layout = plan.Layout(dp=8, zero=1, recompute="full", micro_batch=size)
    return sum(plan.step_seconds(plan.MODELS["8b"], layout, plan.CLUSTERS["h100"],
                                 plan.SOFTWARE["megatron-2024"], 64).values())


def travel(machine: str) -> float:
    """The time of Mixtral's rows over that of a layer's computing, forward, on 8 GPUs."""
    eight = chapter("08")
    mixtral = eight.Mixture(32, 4096, 32, 8, 4096, 32000, gated=True, ffn=14336)
    return eight.travel_over_compute(mixtral, 8, 2, *MACHINES[machine])


def seconds_of_llama(at: int) -> float:
    """Of a step of that run, as fast as chapter 10 plans it."""
    gpus, batch, seq, _ = llama_run(at)
    _, _, tflops, _ = list(published.llama_3(ten()))[at]
    model = replace(ten().MODELS["405b"], seq=seq)
    return ten().step_flops(model, batch, "causal") / (gpus * tflops * 1e12)


def llama_run(at: int) -> tuple[int, ...]:
    """GPUs, sequences of a step, tokens of a sequence and cp of a published run."""
    return tuple(map(int, published.LLAMA_3.strip().splitlines()[at].split()[:4]))


def micro_batches_of_llama(at: int) -> int:
    """Of a step of that run, on each of its replicas, with tp 8 and pp 16."""
    gpus, batch, _, cp = llama_run(at)
    return batch // (gpus // (8 * 16 * cp))


def tokens_of_llama(at: int) -> int:
    """Of a step of that run."""
    _, batch, seq, _ = llama_run(at)
    return batch * seq
