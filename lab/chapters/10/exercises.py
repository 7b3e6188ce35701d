"""The exercises of chapter 10: seconds of a matmul and a message, memory, bubbles, search."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

from lab.classroom.exercise import Exercise, Same


def machine_of(chapter, cluster, **software):
    return chapter.Machine(chapter.CLUSTERS[cluster], chapter.Software(**software))


def seconds_of_matmuls(chapter):
    machine = machine_of(chapter, "h100")
    return {f"({m}, {k}) @ ({k}, {n})": machine.matmul(m, k, n, 3)
            for m, k, n in ((8, 16, 32), (4096, 8192, 1024))}


def seconds_in_fp8(chapter):
    return machine_of(chapter, "h100").matmul(4096, 8192, 1024, fp8=True)


def links(chapter):
    machines = {"all cards": machine_of(chapter, "a100"),
                "one card": machine_of(chapter, "a100", one_card=True)}
    return {f"{n} ranks, stride {stride}, {name}": machine.links(n, stride)
            for name, machine in machines.items()
            for n, stride in ((8, 1), (2, 4), (4, 8), (8, 2), (12, 1), (16, 1), (64, 16))}


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
    return {f"{name} {software}": chapter.numbers_kept(model, 96, software)
            for name, model in models.items() for software in every}


def shares(chapter):
    Layout = chapter.Layout
    layouts = Layout(), Layout(tp=2, sp=False), Layout(tp=2, cp=4), Layout(tp=16)
    model, software = chapter.MODELS["8b"], chapter.SOFTWARE
    return {f"{layout} {name}": layout.shares(model, software[name])
            for name in ("megatron-2024", "ours") for layout in layouts}


def micro_batches_alive(chapter):
    return {f"{schedule}, pp {p}, v {v}, m {m}":
            chapter.micro_batches_alive(chapter.Layout(pp=p, v=v, schedule=schedule), m)
            for schedule in chapter.CHOICES["schedule"]
            for p in (1, 4) for v in (1, 2) for m in (2, 64)}


def alive_on_the_last_stage(chapter):
    return [chapter.micro_batches_alive(chapter.Layout(pp=4, v=v), 64, 3) for v in (1, 2)]


def bubbles(chapter):
    return {f"{schedule}, pp {p}, v {v}":
            chapter.bubble(chapter.Layout(pp=p, v=v, schedule=schedule), 3, 5, 2)
            for schedule in chapter.CHOICES["schedule"] for p in (1, 4) for v in (1, 2)}


def flops(chapter):
    return {f"{name} {scores} {recompute}":
            chapter.step_flops(chapter.MODELS[name], 3, scores, recompute)
            for name in ("gpt3", "70b", "mixtral", "deepseek-v3") for scores in ("all", "causal")
            for recompute in ("none", "full")}


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
        fits = divides and code % 1009 < cluster.memory - 100
        return SimpleNamespace(layout=layout, why="" if fits else "it does not fit",
                               memory={"all": code % 1009} if divides else None,
                               bytes=code % 1009, total=code % 101)

    model = replace(chapter.gpt(4, 1024, 16), seq=8192)
    with mock.patch.object(chapter, "Plan", plan):
        plans, others = chapter.search(model, cluster, chapter.SOFTWARE["megatron-2021"], 8, 16,
                                       fixed, most)
    return {"plans": [(f"{found.layout}", found.total) for found in plans], "others": len(others)}


def degrees(chapter):
    model = replace(chapter.MODELS["mixtral"], layers=12, seq=16384)
    return {f"{name}, {gpus} GPUs": {degree: [*values] for degree, values in chapter.degrees(
                model, chapter.CLUSTERS["h100"], chapter.SOFTWARE[name], gpus, {"v": 1}, 4).items()}
            for name in ("megatron-2021", "megatron-2024") for gpus in (4, 48)}


def machines_of_a_token(chapter):
    models = {"8 experts": chapter.MODELS["mixtral"], "256": chapter.MODELS["deepseek-v3"]}
    return {f"{name}, limit {limit}, {machines} machines":
            chapter.machines_of_token(replace(model, node_limit=limit), machines)
            for name, model in models.items() for limit in (0, 1, 4) for machines in (1, 4, 8)}


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


EXERCISES = [
    Exercise(
        "10.1", "Machine.matmul", 1,
        "How many seconds a matmul of (m, k) by (k, n) takes, `times` in a row: its arithmetic "
        "at self.flops, and then all that it reads and writes, two bytes a number, at "
        "self.bandwidth. In FP8 arithmetic is FP8 times as fast, and what is read has one byte "
        "a number.",
        ("How many multiplications and additions is each of the m·n outputs?",
         "2·m·k·n FLOPs; and m·k, k·n and m·n numbers go through HBM, each once. The two times "
         "are added."),
        (Same(seconds_of_matmuls, "seconds of a matmul"),
         Same(seconds_in_fp8, "in FP8")),
    ),
    Exercise(
        "10.2", "Machine.links Machine.ring", 2,
        "`links`: bytes/s of a ring of n ranks, `stride` apart. Inside a node that is NVLink; "
        "it leaves one through its members' network cards there (in a last node perhaps "
        "fewer), but no faster than NVLink. `ring`: seconds of an all_gather or a "
        "reduce_scatter of so many bytes, in so many calls, each of n-1 hops, which cost alpha "
        "or between nodes (as many as there are nodes, or all) nic_alpha.",
        ("Of 16 ranks with stride 2, on nodes of 8 GPUs, how many share a node? And of 16 with "
         "stride 8?",
         "cluster.per_node // stride of them, at least one; in a last node that is not full "
         "what n leaves over; software.one_card: one. NVLINK and NIC say which share of their "
         "rates they reach. A ring sends (n-1)/n of the bytes, and one rank alone sends "
         "nothing."),
        (Same(links, "bytes/s"),
         Same(seconds_in_a_ring, "seconds of a gigabyte"),
         Same(seconds_with_latency, "in 3 calls, alpha 1, nic_alpha 9")),
        "Machine: links and rings",
    ),
    Exercise(
        "10.3", "numbers_kept Layout.shares", 3,
        "`numbers_kept`: how many numbers of 16 bits a layer keeps of so many tokens, in each "
        "class of chapter 01. `shares`: which share of each class a GPU keeps. Sequence "
        "parallelism divides what lies outside of the sub-layers; a kv head is never cut; and "
        "keys are gathered over cp, unless they go round in a ring.",
        ("For a GPT with dropout and without flash, all classes together come to "
         "s·b·h·(34 + 5·a·s/h) bytes. Which tensors are the 34, and in which class is each?",
         "Outside: the inputs of two norms, and two masks of a byte. Inputs: the outputs of "
         "the norms, and latents before and behind theirs. Inside: q, the input of o, of the MLP "
         "two (with SwiGLU swiglu_kept) tensors of ffn columns for each expert of a token, and "
         "the rows that its top_k read. Of the core 5 bytes a score with dropout, 2 without, and "
         "with flash 4 bytes a row. Shares: 1/(tp·cp), but 1/cp where sp or keeps_gathered say "
         "so, and of the keys at least 1/kv_heads."),
        (Same(numbers_kept, "numbers of a layer"),
         Same(shares, "shares")),
        "what a layer keeps, and who keeps it",
    ),
    Exercise(
        "10.4", "micro_batches_alive bubble", 2,
        "`micro_batches_alive`: how many whole micro-batches a stage keeps at once, of "
        "m. `bubble`: how long a stage waits in a step, if a micro-batch takes it F forward, "
        "and B and W backward. For each of the three schedules.",
        ("Chapter 07 has both as a table. What does a rank with v slices keep of a micro-batch "
         "that has gone through one of them?",
         "Alive on stage i: p - i for 1f1b, (2(p-1-i) + (v-1)p + 1)/v interleaved, p for "
         "zero-bubble, (2p+1)/2 for dualpipe-v, and never more than m. The bubble: "
         "(p-1)(F+B+W)/v; (p-1)(F+B-W); and (p-1)/2 (F&B + B - 2W), where F&B takes F + B + "
         "W."),
        (Same(micro_batches_alive, "micro-batches alive"),
         Same(alive_on_the_last_stage, "on the last stage"),
         Same(bubbles, "the bubble, F 3, B 5, W 2")),
        "what is alive, and the bubble",
    ),
    Exercise(
        "10.5", "step_flops", 2,
        "FLOPs of a step over `batch` sequences: forward and twice that backward, and with "
        "full recomputation forward once more, but for the head. Of attention's scores, all "
        "are counted or the causal half. The embedding multiplies nothing.",
        ("How many FLOPs does a weight cost for a token, and how many the scores of a token "
         "with s others, of h columns in all heads?",
         "2 for each weight that a token meets (weights_of_layers(top_k), and the head's); "
         "2·s·(queries + values) a layer for the scores, 4·s·h in most models. The head, "
         "2·vocab·h, is never recomputed: 3 passes, where all else has 4."),
        (Same(flops, "FLOPs"),),
    ),
    Exercise(
        "10.6", "degrees search", 3,
        "`degrees`: which values of each are tried; of `fixed`, its own. `search`: plans for "
        "all layouts that divide, but for ZeRO on one rank alone: those that fit, the fastest "
        "first, or if none does, those that may, within the factor ERROR; and as a second value, "
        "all others.",
        ("Which degrees are left to choose, once the number of GPUs and three of tp, cp, pp "
         "and dp are known? A Plan says itself why it does not divide or fit.",
         "itertools.product over lists: tp up to a node's GPUs, cp where sequences are long, "
         "pp a divisor of the GPUs and no more than the layers, v, ep, zero 0 to 3, "
         "micro-batches up to `most`, recomputation. dp is what is left; sp goes with tp. Sort "
         "by (total, bytes)."),
        (Same(degrees, "the values of each degree"),
         Same(found_by_search, "with plans of the check's own, of which some fit", (300, {})),
         Same(found_by_search, "the same, where none fits, but some may", (100, {})),
         Same(found_by_search, "the same, with cp 2 and zero 3 fixed", (300, {"cp": 2, "zero": 3})),
         Same(best_of_8b, "the five best of the 8b on 16 GPUs"),
         Same(all_with_tp_2, "all with tp 2 on 4 GPUs")),
    ),
    Exercise(
        "10.7", "machines_of_token seconds_of_rows parameters_of_gpu", 3,
        "`machines_of_token`: on how many of so many machines a token's top_k experts lie, if all "
        "that node_limit allows are chosen alike. `seconds_of_rows`: how long it takes forward "
        "until rows have gone to their experts and come back, by one hop or two. "
        "`parameters_of_gpu`: what the fullest GPU has of each kind, and how many GPUs have the "
        "same.",
        ("Of 8 experts on 4 machines, 2 are chosen. How likely is it that neither lies on the "
         "first machine, and what has that to do with how many machines there are on average?",
         "Each machine is missed with C(n - m, k) / C(n, k). Of the machines of ep ranks one is a "
         "token's own: 1 - 1/machines of its rows leave it, or of the machines by two hops, which "
         "copy each row over NVLink, too. Both links are busy at once. Experts are held by "
         "stage/ep GPUs, all else as layout.cuts says; dense layers lie on the first stage."),
        (Same(machines_of_a_token, "machines of a token"),
         Same(rows_that_travel, "seconds of rows"),
         Same(parts_of_mixtures, "what a GPU has")),
        "the way to experts, and who holds them",
    ),
]
