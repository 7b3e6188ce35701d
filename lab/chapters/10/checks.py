"""Checks of chapter 10: seconds of a matmul and a message, memory, bubbles, search."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock


def machine_of(chapter, cluster, **software):
    return chapter.Machine(chapter.CLUSTERS[cluster], chapter.Software(**software))


def seconds_of_matmuls(chapter):
    machine = machine_of(chapter, "h100")
    return {f"({m}, {k}) @ ({k}, {n})": machine.matmul(m, k, n, 3)
            for m, k, n in ((8, 16, 32), (4096, 8192, 1024))}


def links(chapter):
    machines = {"all cards": machine_of(chapter, "a100"),
                "one card": machine_of(chapter, "a100", one_card=True)}
    groups = (8, 1), (2, 4), (4, 8), (8, 2), (12, 1), (16, 1), (64, 16)
    return {f"{n} ranks, stride {stride}, {name}": machines[name].links(n, stride)
            for name, (n, stride) in itertools.product(machines, groups)}


def seconds_in_a_ring(chapter):
    machine = machine_of(chapter, "a100")
    return {f"{n} ranks": machine.ring(1e9, n, 2) for n in (1, 2, 4, 32)}


def seconds_with_latency(chapter):
    cluster = replace(chapter.CLUSTERS["a100"], alpha=1.0, nic_alpha=9.0)
    machine = chapter.Machine(cluster, chapter.Software())
    return [machine.ring(1e9, n, stride, 3) for n, stride in ((4, 1), (12, 1), (16, 1), (4, 8))]


def numbers_kept(chapter):
    models = {name: chapter.MODELS[name] for name in ("mixtral", "deepseek-v3")}
    models["gpt"] = chapter.gpt(4, 64, 4, seq=32)
    every = chapter.Software(), chapter.Software(flash=False), chapter.Software(False, True)
    return {f"{name} {software}": chapter.numbers_kept(models[name], 96, software)
            for name, software in itertools.product(models, every)}


def shares(chapter):
    Layout = chapter.Layout
    layouts = Layout(), Layout(tp=2, sp=False), Layout(tp=2, cp=4), Layout(tp=16)
    model, software = chapter.MODELS["8b"], chapter.SOFTWARE
    return {f"{layout} {name}": layout.shares(model, software[name])
            for name, layout in itertools.product(("megatron-2024", "ours"), layouts)}


def bubbles(chapter):
    return {f"{schedule}, pp {p}, v {v}":
            chapter.bubble(chapter.Layout(pp=p, v=v, schedule=schedule), 3, 5, 2)
            for schedule, p, v in itertools.product(chapter.CHOICES["schedule"], (1, 4), (1, 2))}


def best_of_8b(chapter):
    plans, *_ = chapter.search(chapter.MODELS["8b"], chapter.CLUSTERS["h100"],
                               chapter.SOFTWARE["megatron-2024"], 16, 64,
                               {"v": 1, "micro_batch": 1})
    return [(plan.layout, plan.total) for plan in plans[:5]]


def all_with_tp_2(chapter):
    plans, *_ = chapter.search(chapter.gpt(8, 1024, 16), chapter.CLUSTERS["a100"],
                               chapter.SOFTWARE["megatron-2021"], 4, 12, {"tp": 2}, 4)
    return [(plan.layout, plan.total) for plan in plans]


def found_by_search(chapter, memory, fixed, kind="a100", most=2):
    """All plans, the best first, and how many others there are. In place of a Plan: bytes and
    seconds are numbers that no two layouts have alike."""
    cluster = replace(chapter.CLUSTERS[kind], memory=memory)

    def plan(model, layout, cluster, software, gpus, batch):
        degrees = [layout.tp, layout.cp, layout.pp, layout.dp, layout.v, layout.zero,
                   layout.micro_batch, layout.sp + len(layout.recompute)]
        code = sum(degree * 16**i for i, degree in enumerate(degrees))
        divides = layout.dp * layout.tp * layout.cp * layout.pp == gpus
        memory = {"all": code % 1009} if divides else None
        fits = divides and code % 1009 < cluster.memory - 100
        return SimpleNamespace(layout=layout, why="" if fits else "it does not fit", memory=memory,
                               bytes=code % 1009, total=code % 101)

    model = replace(chapter.gpt(4, 1024, 16), seq=8192)
    with mock.patch.object(chapter, "Plan", plan):
        plans, others = chapter.search(model, cluster, chapter.SOFTWARE["megatron-2021"], 8, 16,
                                       fixed, most)
    return {"plans": [(f"{plan.layout}", plan.total) for plan in plans], "others": len(others)}


def degrees(chapter):
    model = replace(chapter.MODELS["mixtral"], layers=12, seq=16384)
    return {f"{name}, {gpus} GPUs": {degree: [*values] for degree, values in chapter.degrees(
                model, chapter.CLUSTERS["h100"], chapter.SOFTWARE[name], gpus, {"v": 1}, 4).items()}
            for name, gpus in itertools.product(("megatron-2021", "megatron-2024"), (4, 48))}


def machines_of_a_token(chapter):
    models = {"8 experts": chapter.MODELS["mixtral"], "256": chapter.MODELS["deepseek-v3"]}
    return {f"{name}, limit {limit}, {machines} machines":
            chapter.machines_of_token(replace(models[name], node_limit=limit), machines)
            for name, limit, machines in itertools.product(models, (0, 1, 4), (1, 4, 8))}


def rows_that_travel(chapter):
    """There and back; with links of which one takes no time, and all the time of a call."""
    model, layouts = chapter.MODELS["deepseek-v3"], {}
    for (tp, ep), two_hops in itertools.product(((1, 8), (1, 64), (4, 64)), (False, True)):
        for name, rates in (("network", {"nvlink": 1e30}), ("NVLink", {"nic": 1e30}),
                            ("both", {"alpha": 1.0, "nic_alpha": 9.0})):
            cluster = replace(chapter.CLUSTERS["h100"], **rates)
            machine = chapter.Machine(cluster, chapter.Software(two_hops=two_hops))
            layouts[f"tp {tp}, ep {ep}, {1 + two_hops} hops, {name}"] = chapter.seconds_of_rows(
                model, chapter.Layout(64, tp, ep=ep), machine)
    return layouts


def parts_of_mixtures(chapter):
    software, model = chapter.SOFTWARE["megatron-moe"], chapter.MODELS["deepseek-v3"]
    return {f"{layout}": chapter.parameters_of_gpu(model, layout, software)
            for layout in (chapter.Layout(64, pp=2, ep=64), chapter.Layout(4, 4, 2, ep=8),
                           chapter.Layout(64, 2, pp=4, ep=128))}
