"""The tutorial's 25 questions, in our words: of each the numbers that answer it, computed when they
are asked for, and why they are what they are."""

from functools import partial
from typing import NamedTuple

from lab.bench.machines import MACHINES
from lab.chapters import chapter
from lab.sources import worked
from lab.sources.row import Row
from lab.sources.worked import ten


class Asked(NamedTuple):
    """A question."""

    number: int
    level: str              # L1 to L3, the tutorial's; none of the lecture's claims
    question: str
    rows: tuple[Row, ...]
    why: str
    command: str            # that shows it, with a run or a plan

    @property
    def first(self):
        """The number that a reader may say before the answer is shown: its first row, without what
        the text says of it."""
        what, unit = self.rows[0].what.partition(":")[0], self.rows[0].unit
        return f"{what}?" if unit in what.split() else f"{what}? (in {unit})"


def waits(where, what, told, name, m, v=1, error=1e-9, **more):
    """A row: the share of a step in which a rank of 8 waits."""
    return Row(where, what, told, partial(worked.idle, name, 8, m, v), "%", error,
               by="07_pipeline_parallel.bubble", **more)


def states(where, what, told, stage, n, **more):
    """A row: bytes of model states of a parameter."""
    return Row(where, what, told, partial(worked.states, stage, n), "B", by="03_zero.held", **more)


QUESTIONS = (
    Asked(1, "L1", "What is wrong with DataParallel, that DistributedDataParallel mends?", (
        Row("Q1", "an all_reduce by one main rank over one by a ring, 8 ranks, 14 GB of gradients",
            1.5, lambda: worked.all_reduce_seconds("all_reduce_naive", 8, 14e9)
            / worked.all_reduce_seconds("all_reduce_ring", 8, 14e9), "times",
            by="00_collectives.seconds", to=3, why="1.5 to 3 are of a whole step, and computing "
            "takes as long either way. Messages alone take so many times as long."),
        Row("Q1", "the same, on 64 ranks", None,
            lambda: worked.all_reduce_seconds("all_reduce_naive", 64, 14e9)
            / worked.all_reduce_seconds("all_reduce_ring", 64, 14e9), "times",
            by="00_collectives.seconds")),
        "DataParallel is one process: its main GPU sends the weights out in each step, and takes "
        "in all gradients. So N-1 gradients pass one link, while the others wait. With a process "
        "for each GPU, all links of a ring carry 1/N of the gradient at the same time, and "
        "Python's lock is no matter.",
        "torchrun --nproc_per_node=8 00_collectives.py"),
    Asked(2, "L1", "How many bytes does each of N GPUs send in an all_reduce of S bytes?", (
        Row("Q2", "on 8 GPUs: 2(N-1)/N · S", 1.75, lambda: chapter("02").wire_bytes(1, 8), "S",
            by="02_data_parallel.wire_bytes"),
        Row("Q2", "on 1,024 GPUs, about 2 S", 2, lambda: chapter("02").wire_bytes(1, 1024), "S",
            0.005, by="02_data_parallel.wire_bytes")),
        "A ring all_reduce is a reduce_scatter and an all_gather. In each, a rank sends one chunk "
        "of S/N in each of N-1 hops. So the number of ranks hardly matters: what grows with it is "
        "the number of hops, and their latency.",
        "torchrun --nproc_per_node=8 00_collectives.py"),
    Asked(3, "L1", "How many bytes of model states has a parameter, in mixed precision with Adam?",
          (states("Q3", "weights, gradients and optimizer, in 16 bits with fp32 masters", 16, 0, 1),
           Row("Q3", "optimizer: master, and both moments", 12,
               lambda: chapter("03").held(1, 1, 1, "bf16")[2], "B", by="03_zero.held"),
           Row("Q3", "all of it, if gradients are summed in fp32", None,
               lambda: sum(chapter("03").held(1, 1, 1, "bf16")), "B", by="03_zero.held")),
          "2 of weights and 2 of gradients, which matmuls read and write, and 12 of the update: "
          "4 each for the master weight and Adam's two moments. The course sums gradients in fp32, "
          "as today's software does, and has 18.",
          "python 01_single_gpu.py --precision fp16"),
    Asked(4, "L1", "What do the stages of ZeRO share out, and what is left on each of N GPUs?",
          (states("Q4", "ZeRO-1 on 64 GPUs, of a parameter: optimizer states", 4.1875, 1, 64),
           states("Q4", "ZeRO-2: gradients, too", 2.21875, 2, 64),
           states("Q4", "ZeRO-3: and weights, 16/N", 0.25, 3, 64)),
          "A rank that updates 1/N of the parameters needs only the states of these, and only "
          "their summed gradients. Weights it needs whole, but only those of the module that "
          "computes.",
          "torchrun --nproc_per_node=4 03_zero.py --variant zero1"),
    Asked(5, "L1", "What distinguishes FSDP from ZeRO-3?", (
        Row("Q5", "bytes of FSDP2's reduce_scatters over ZeRO-3's", 1,
            lambda: worked.fsdp_over_zero("reduce_scatter"), "times",
            by="lab.sources.worked.sent_by_fsdp"),
        Row("Q5", "of its all_gathers", 1, lambda: worked.fsdp_over_zero("all_gather"), "times",
            by="lab.sources.worked.sent_by_fsdp", why="PyTorch gathers the head once more, for the "
            "backward that begins with it. Ours keeps it.")),
        "Nothing in the algorithm: both gather a unit before it computes, free it, and scatter its "
        "gradients. Here PyTorch's fully_shard was run as one rank of 8, and what it sends was "
        "counted. FSDP2 cuts each parameter by its rows, and ours a flat tensor of a unit: the "
        "bytes are the same where no padding is needed.",
        "torchrun --nproc_per_node=4 03_zero.py --variant torch"),
    Asked(6, "L1", "Along which dimension does tensor parallelism cut attention?", (
        Row("Q6", "all_reduces of an attention block, forward", 1,
            lambda: worked.sent_in_layer("04", 0) / 4, "calls", by="04_tensor_parallel.traffic"),
        Row("Q6", "heads of a rank, Llama 3 70B with tp 8: H/T", 8,
            lambda: ten().MODELS["70b"].heads / ten().Layout(tp=8).cuts(
                ten().MODELS["70b"], ten().SOFTWARE["llama3"])["queries"], "heads",
            by="10_planner.Layout")),
        "Along the heads, which do not need each other: q, k and v are cut by columns, and o by "
        "rows. So nothing is sent in between: there is one sum in forward, behind o, and one in "
        "backward, before q, k and v.",
        "torchrun --nproc_per_node=4 04_tensor_parallel.py"),
    Asked(7, "L1", "Where must the ranks of tensor parallelism be?", (
        Row("Q7", "NVLink of an H100 over its network card: 900 to 50", 18,
            lambda: MACHINES["H100, NVLink 4"][1] / MACHINES["H100, InfiniBand NDR"][1], "times",
            by="lab.bench.machines.MACHINES", why="900 GB/s are both directions. A ring uses one."),
        Row("Q7", "ranks up to which an MLP's sum hides behind it over NVLink, dim 8,192", None,
            lambda: chapter("04").ranks_that_pay(8192, 2, *MACHINES["H100, NVLink 4"]), "ranks",
            by="04_tensor_parallel.ranks_that_pay"),
        Row("Q7", "over InfiniBand", None,
            lambda: chapter("04").ranks_that_pay(8192, 2, *MACHINES["H100, InfiniBand NDR"]),
            "ranks", by="04_tensor_parallel.ranks_that_pay")),
        "In one NVLink domain. Each layer waits for four sums of all its activations, and nothing "
        "can be computed meanwhile. Of this width 16 ranks pay over NVLink, and over a network "
        "card of their own not even three. A machine has 8 GPUs. A ring over two machines leaves "
        "each through all of its cards, and so loses less; but the planner finds 8 ranks faster "
        "than 16, and 16 faster than 32.",
        "python 10_planner.py --model 70b --gpus 64 --batch 64 --tp 16 --explain"),
    Asked(8, "L1", "How large is the bubble of a pipeline of P stages and M micro-batches?", (
        waits("Q8", "without micro-batches, 8 stages: (P-1)/P", 7 / 8, "naive", 1),
        waits("Q8", "1F1B, 32 micro-batches: (P-1)/(M+P-1)", 7 / 39, "1f1b", 32),
        waits("Q8", "with M = 4 P: below 20%", 0, "1f1b", 32, to=0.2)),
        "While the pipeline fills and drains, a stage waits as long as P-1 micro-batches take; it "
        "works on M. The course counts the wait over the work, (P-1)/M; over all of the step it is "
        "(P-1)/(M+P-1).",
        "python -m lab.schedules 1f1b --ranks 8 --micro-batches 32"),
    Asked(9, "L1", "What does 1F1B gain over GPipe?", (
        Row("Q9", "micro-batches that 1F1B keeps, 8 stages, 32 micro-batches: P", 8,
            lambda: worked.alive("1f1b", 8, 32), "micro-batches",
            by="07_pipeline_parallel.most_alive"),
        Row("Q9", "those that GPipe keeps: M", 32, lambda: worked.alive("afab", 8, 32),
            "micro-batches", by="07_pipeline_parallel.most_alive"),
        Row("Q9", "its bubble over GPipe's", 1, lambda: worked.idle("1f1b", 8, 32)
            / worked.idle("afab", 8, 32), "times", by="07_pipeline_parallel.bubble")),
        "Memory, and no time. A backward begins as soon as it can, and frees what its forward has "
        "kept. So the first stage keeps P micro-batches, however many there are.",
        "python -m lab.schedules 1f1b --ranks 8 --micro-batches 32"),
    Asked(10, "L1", "What does activation checkpointing cost?", (
        Row("Q10", "FLOPs of full recomputation, of a 7B model", 0.33,
            lambda: worked.recomputed("full"), "%", 0.005, by="01_single_gpu.step_flops"),
        Row("Q10", "inputs that are kept of 64 equal layers, in groups of √L: about 2√L", 16,
            lambda: chapter("01").most_again(64, 8, 1, 1), "inputs", 1,
            by="01_single_gpu.most_again"),
        Row("Q10", "a group of a 7B model that keeps least, in layers", None,
            lambda: chapter("01").best_k(32, worked.kept("7b", "megatron-2024", recompute="full"),
                                         worked.kept("7b", "megatron-2024")), "layers",
            by="01_single_gpu.best_k")),
        "A third of the FLOPs: backward takes as many as two forwards, and now it begins with a "
        "forward of its own (without the head's). Groups of √L layers keep least if a layer keeps "
        "no more than its input. Since it keeps much more, groups of one or two layers are better.",
        "python 01_single_gpu.py --recompute full"),
    Asked(11, "L2", "Why does ZeRO-3 gather in forward, and again in backward?", (
        Row("Q11", "all_gathers of a block in a step", 2,
            lambda: (chapter("03").traffic(worked.LLAMA_7B, 3, 8, 1)["all_gather"][0] - 3) / 32,
            "calls", by="03_zero.traffic"),
        Row("Q11", "weights of a parameter that stay on 8 GPUs: 1/N of 2 bytes", 0.25,
            lambda: chapter("03").held(1, 3, 8, "bf16")[0], "B", by="03_zero.held"),
        Row("Q11", "what forward and backward send, if the gathered weights are kept", None,
            lambda: sum(wire for *_, wire in chapter("03").traffic(
                worked.LLAMA_7B, 3, 1024, 1, (2, 2), keep_gathered=True).values())
            / (2 * worked.LLAMA_7B.parameters()), "Ψ", by="03_zero.traffic")),
        "A matmul needs its whole weight, and a rank has 1/N of it. After forward the rest is "
        "freed, or all would be there at once; so backward gathers it again. With memory "
        "enough a rank keeps it, and sends a third less.",
        "torchrun --nproc_per_node=4 03_zero.py --keep-gathered"),
    Asked(12, "L2", "How much more does ZeRO-3 send than data parallelism?", (
        Row("Q12", "ZeRO-3 over DDP, of a 7B model", 1.5, lambda: worked.sent_in_zero(3, 1024)
            / chapter("02").wire_bytes(1, 1024), "times", 0.05, by="03_zero.traffic"),
        Row("Q12", "with 4 micro-batches in a step", None,
            lambda: worked.sent_in_zero(3, 1024, 4) / chapter("02").wire_bytes(1, 1024), "times",
            by="03_zero.traffic")),
        "An all_reduce is a reduce_scatter and an all_gather, 2Ψ. ZeRO-3 gathers twice and "
        "scatters once, 3Ψ (less one head, which stays). But it does so for each micro-batch, and "
        "DDP sends once a step.",
        "torchrun --nproc_per_node=4 03_zero.py --variant zero3 --micro-batch 1"),
    Asked(13, "L2", "How much does a GPU send in one step of a ring all_reduce?", (
        Row("Q13", "steps on 8 GPUs: 2(N-1)", 14,
            lambda: len(chapter("00").round_bytes("all_reduce_ring", 8, 1)), "steps",
            by="00_collectives.round_bytes"),
        Row("Q13", "in each step, S/N", 1 / 8,
            lambda: max(chapter("00").round_bytes("all_reduce_ring", 8, 1)), "S",
            by="00_collectives.round_bytes"),
        Row("Q13", "in all of them", 1.75,
            lambda: sum(chapter("00").round_bytes("all_reduce_ring", 8, 1)), "S",
            by="00_collectives.round_bytes"),
        Row("Q13", "bandwidth that is used, as N grows: 1 GB on 1,024 GPUs over InfiniBand", 1,
            lambda: worked.share_of_bytes(1024, 1e9, "H100, InfiniBand NDR"), "%",
            by="00_collectives.seconds", why="It falls: 2S bytes do not grow with N, and the "
            "latencies of 2(N-1) steps do. On 8 GPUs it is 99%.")),
        "A chunk of S/N: in N-1 steps sums go round and grow, and in N-1 more the finished sums go "
        "round.",
        "torchrun --nproc_per_node=8 00_collectives.py"),
    Asked(14, "L2", "What does sequence parallelism save?", (
        Row("Q14", "of a layer's activations, GPT-3 with tp 8, scores recomputed", 0.25,
            lambda: worked.saved_by_sequence("gpt3", "megatron-2021", 8, "selective"), "%",
            by="10_planner.kept_by_layer", to=0.4),
        Row("Q14", "its messages over those of TP alone", 1,
            lambda: worked.sent_in_layer("05", 2, variant="kept")
            / worked.sent_in_layer("04", 2), "times", by="05_sequence_parallel.traffic"),
        Row("Q14", "the same, if no gathered input is kept", None,
            lambda: worked.sent_in_layer("05", 2) / worked.sent_in_layer("04", 2), "times",
            by="05_sequence_parallel.traffic")),
        "Activations outside of the sub-layers, of which each rank had all. An all_reduce becomes "
        "a reduce_scatter and an all_gather, which send as much. To keep no gathered input either, "
        "backward gathers it again: that is a quarter more.",
        "torchrun --nproc_per_node=4 05_sequence_parallel.py"),
    Asked(15, "L2", "How do slices make the bubble of 1F1B smaller, and at what cost?", (
        waits("Q15", "4 slices, 8 stages, 32 micro-batches: (P-1)/(VM+P-1)", 7 / 135,
              "interleaved", 32, 4),
        Row("Q15", "1F1B's bubble over that, in time: V", 4, lambda: chapter("07").bubble(
            "1f1b", 8, 32, 1) / chapter("07").bubble("interleaved", 8, 32, 4), "times",
            by="07_pipeline_parallel.bubble"),
        Row("Q15", "messages, over one slice's: V", 4,
            lambda: chapter("07").traffic("interleaved", 4, 8, 32, 4, 1, 0, 2)["send"][2]
            / chapter("07").traffic("1f1b", 4, 8, 32, 1, 1, 0, 2)["send"][2], "times",
            by="07_pipeline_parallel.traffic")),
        "A rank has V slices of L/(PV) layers, so each of the P-1 waits is V times shorter. Each "
        "micro-batch passes each rank V times, and is sent as often.",
        "python -m lab.schedules interleaved --ranks 8 --micro-batches 32 --chunks 4"),
    Asked(16, "L2", "How much does a rank send for a layer of experts?", (
        Row("Q16", "forward, K = 8, in numbers of a token's width: 2 K", 16,
            lambda: ten().messages(ten().MODELS["deepseek-v3"], ten().Layout(ep=64))["ep"][0]
            / (4096 * 7168), "h", by="10_planner.messages"),
        Row("Q16", "forward and backward, in bytes of a token of width 7,168", None,
            lambda: chapter("08").row_bytes(chapter("08").Mixture(
                1, 7168, 128, 128, 4096, 256, experts=256, top_k=8), 1, 2), "B",
            by="08_expert_parallel.row_bytes")),
        "Each token is sent to its K experts, and K results come back: 2·K rows of its width, of "
        "which the 1/N for a rank's own experts stays. Backward sends their gradients in the same "
        "way. How many experts there are is no matter.",
        "torchrun --nproc_per_node=4 08_expert_parallel.py"),
    Asked(17, "L2", "When is HSDP better than FSDP?", (
        states("Q17", "HSDP in groups of 8, of a parameter: 16/8", 2, 3, 8),
        Row("Q17", "what leaves a group, over what FSDP sends on 1,024 GPUs", None,
            lambda: worked.between_groups(8, 128) / worked.sent_in_zero(3, 1024), "%",
            by="03_zero.traffic")),
        "If weights fit on a machine's GPUs together. Then gathers stay on NVLink, and only "
        "gradients cross, each rank's shard of 1/8: 2 (G-1)/G · Ψ/8 for G groups, in place of 3Ψ.",
        "torchrun --nproc_per_node=8 03_zero.py --variant hsdp --shard-size 4"),
    Asked(18, "L2", "Which layout had Llama 3 405B, and does it hold what was published?", (
        Row("Q18", "GPUs with 8K: tp 8, cp 1, pp 16, dp 128", 16384,
            lambda: 16 * ten().Layout(tp=8, dp=128).stage, "GPUs", by="10_planner.Layout"),
        Row("Q18", "GPUs with 128K: tp 8, cp 16, pp 16, dp 8", 16384,
            lambda: 16 * ten().Layout(tp=8, cp=16, dp=8).stage, "GPUs", by="10_planner.Layout"),
        *(Row("Q18", f"TFLOP/s of a GPU with {what}, as published", told,
              lambda at=at: list(worked.published.llama_3(ten()))[at][2], "TFLOP/s", within=0.04,
              by="lab.planner.published.llama_3")
          for at, what, told in ((1, "8K", 400), (2, "128K", 380))),
        Row("Q18", "memory of a GPU with 128K, of 80 GB", None,
            lambda: 1e9 * list(worked.published.llama_3(ten()))[2][3], "B",
            by="lab.planner.published.llama_3")),
        "tp fills a machine, pp spans machines, and dp takes the rest. With 128K, a batch of 16 "
        "million tokens has only 128 sequences: dp 128 would leave a pipeline of 16 stages one "
        "micro-batch. So cp takes 16 from dp. It is dense, so there is no ep.",
        "python 10_planner.py --published"),
    Asked(19, "L2", "By which three ideas does ZeRO++ send less?", (
        Row("Q19", "between nodes, ZeRO-3 over ZeRO++, gradients in 4 bits", 4,
            lambda: 2 * worked.sent_in_zero(3, 384) / worked.sent_across_nodes(384, 0.5), "times",
            0.1, by="03_zero.zeropp_traffic"),
        Row("Q19", "the same, gradients in int8, as the tutorial has them", 4,
            lambda: 2 * worked.sent_in_zero(3, 384) / worked.sent_across_nodes(384, 1), "times",
            0.1, by="03_zero.zeropp_traffic", why="1, 0 and 1 byte in place of 2, 2 and 2 are a "
            "third. A quarter needs the paper's 4 bits."),
        Row("Q19", "a gather in int8, with a scale for 256 numbers, over one in 16 bits", 0.5,
            worked.in_int8, "times", 0.01, by="03_zero.zeropp_traffic")),
        "Forward gathers weights in int8; backward gathers them inside of a machine, which keeps "
        "them spread over its GPUs; and gradients are sent in 4 bits by all_to_all, so that a rank "
        "sums what it has unpacked (chapter 03 leaves this out). Weights that compute stay in 16 "
        "bits.",
        "torchrun --nproc_per_node=8 03_zero.py --variant zeropp --shard-size 4"),
    Asked(20, "L2", "Can 8 A100s with 40 GB train a model of 7 billion parameters?", (
        Row("Q20", "model states: 16 bytes of a parameter", 112e9,
            lambda: 7e9 * worked.states(0, 1), "B", 0.5e9, by="03_zero.held"),
        Row("Q20", "of these on each GPU with ZeRO-3", 14e9, lambda: 7e9 * worked.states(3, 8), "B",
            0.5e9, by="03_zero.held"),
        Row("Q20", "a GPU needs with DDP, activations included", None,
            lambda: worked.seven_billion().bytes, "B", by="10_planner.Plan"),
        Row("Q20", "it needs with ZeRO-3, what is gathered included", None,
            lambda: worked.seven_billion(zero=3).bytes, "B", by="10_planner.Plan"),
        Row("Q20", "of these, activations: several GB", None,
            lambda: worked.seven_billion(zero=3).memory["activations"], "B",
            by="10_planner.memory"),
        Row("Q20", "left for CUDA, NCCL and fragments: several GB", None,
            lambda: 40e9 * (1 - ten().ROOM), "B", by="10_planner.ROOM")),
        "With ZeRO-3, yes: with full recomputation in half of the memory, and with flash attention "
        "even without it. With data parallelism alone the states do not fit on any GPU. Besides "
        "an eighth of the states, a GPU needs two gathered layers, activations, and logits.",
        "python 10_planner.py --model 7b --cluster a100 --memory 40e9 --gradient-bytes 2 --dp 8"),
    Asked(21, "L3", "Derive the bubble of 1F1B, and what slices make of it.", (
        Row("Q21", "1F1B waits, 8 stages, 32 micro-batches, counted from its lists", 7 / 39,
            lambda: worked.idle_in_time("1f1b", 8, 32), "%", 1e-9,
            by="lab.schedules.simulated_bubble"),
        Row("Q21", "the same with 4 slices", 7 / 135,
            lambda: worked.idle_in_time("interleaved", 8, 32, 4), "%", 1e-9,
            by="lab.schedules.simulated_bubble"),
        Row("Q21", "the one over the other: V", 4, lambda: worked.idle_in_time("1f1b", 8, 32)
            / worked.idle_in_time("interleaved", 8, 32, 4), "times",
            by="lab.schedules.simulated_bubble", why="The time that is lost is V times less. As a "
            "share of a step, which becomes shorter, it is not.")),
        "2(M+P-1) slots, of which a rank works in 2M: so (P-1)/(M+P-1) is lost. A slice's slots "
        "are V times shorter, and there are V times as many: (P-1)/(VM+P-1).",
        "python -m lab.schedules interleaved --ranks 8 --micro-batches 32 --chunks 4"),
    Asked(22, "L3", "What do FSDP and ZeRO-3 send, and which of them should be used?", (
        Row("Q22", "forward and backward, in weights of 16 bits: 3Ψ", 3,
            lambda: worked.sent_in_zero(3, 1024), "Ψ", 0.05, by="03_zero.traffic"),
        Row("Q22", "FSDP2's reduce_scatters over these", 1,
            lambda: worked.fsdp_over_zero("reduce_scatter"), "times",
            by="lab.sources.worked.sent_by_fsdp"),
        Row("Q22", "bytes of states on the GPU with offload, of a parameter on 64 ranks", None,
            lambda: sum(chapter("03").held(1, 3, 64, "bf16")[:2]), "B", by="03_zero.held")),
        "The same: two gathers and a reduce_scatter. So other things decide. FSDP2's DTensors "
        "compose with tensor and pipeline parallelism. DeepSpeed has ZeRO++ and offload to disks. "
        "Both can keep the update on the CPU.",
        "torchrun --nproc_per_node=4 03_zero.py --offload"),
    Asked(23, "L3", "How much of the activations does sequence parallelism save beside tp?", (
        Row("Q23", "A_out (1 - 1/T) of GPT-3 with tp 8, scores recomputed", 0.25,
            lambda: worked.saved_by_sequence("gpt3", "megatron-2021", 8, "selective"), "%",
            by="10_planner.kept_by_layer", to=0.4),
        Row("Q23", "if its scores are kept", 0.25,
            lambda: worked.saved_by_sequence("gpt3", "megatron-2021"), "%",
            by="10_planner.kept_by_layer", to=0.4, why="Scores are 70% of what a layer of GPT-3 "
            "keeps, and tp has cut them already."),
        Row("Q23", "of what tp 8 alone leaves on a GPU", None,
            lambda: worked.saved_by_sequence("gpt3", "megatron-2021", 8, "selective")
            * worked.kept("gpt3", "megatron-2021", recompute="selective") / worked.kept(
                "gpt3", "megatron-2021", tp=8, sp=False, recompute="selective"), "%",
            by="10_planner.kept_by_layer")),
        "tp cuts A_in and leaves A_out whole; sequence parallelism cuts that as well, so A/T is "
        "left. A_out are norms' inputs and outputs and dropout's masks, 10 of a layer's 34 bytes.",
        "torchrun --nproc_per_node=4 05_sequence_parallel.py"),
    Asked(24, "L3", "What does DualPipe change, and what does it cost?", (
        waits("Q24", "DualPipe waits, 8 ranks, 20 micro-batches: ideally 0", 0, "dualpipe", 20,
              why="The two directions meet, but at both ends (P/2 - 1) waits are left."),
        waits("Q24", "1F1B waits", 7 / 27, "1f1b", 20),
        Row("Q24", "activations that it keeps, over 1F1B's: 2", 2,
            lambda: worked.alive("dualpipe", 8, 20) / worked.alive("1f1b", 8, 20), "times",
            by="07_pipeline_parallel.most_alive", why="P + 1 for P. It is the parameters that "
            "double: each rank has a stage of both directions.")),
        "Micro-batches enter at both ends. So in the steady state a rank has a forward of one "
        "direction and a backward of the other, and the messages of one, experts' rows above all, "
        "travel while the other computes.",
        "python -m lab.schedules dualpipe --ranks 8 --micro-batches 20"),
    Asked(25, "L3", "How are five axes put together, in Llama 3 and in DeepSeek-V3?", (
        Row("Q25", "GPUs of Llama 3, tp 8, cp 16, pp 16, dp 8", 16384,
            lambda: 16 * ten().Layout(tp=8, cp=16, dp=8).stage, "GPUs", by="10_planner.Layout"),
        Row("Q25", "dp of DeepSeek-V3 for attention, pp 16 and ep 64 on 2,048 GPUs: 2", 2,
            lambda: 2048 / 16, "", by="10_planner.Layout", why="ep is no axis of its own: those "
            "who share experts have other tokens, and are 64 of 128 ranks of dp. An expert has 2 "
            "copies."),
        Row("Q25", "copies of an expert there", 2,
            lambda: ten().parameters_of_gpu(ten().MODELS["deepseek-v3"], ten().Layout(
                dp=128, pp=16, ep=64), ten().SOFTWARE["deepseek-v3"])["experts"][1], "copies",
            by="10_planner.parameters_of_gpu"),
        waits("Q25", "a bubble with M = 4 P: below 20%", 0, "1f1b", 32, to=0.2)),
        "tp inside of a machine, pp between machines, cp for long sequences, ep among the ranks of "
        "dp, and dp takes what is left. So the number of GPUs is dp · tp · pp · cp, and ep divides "
        "dp · cp · tp.",
        "torchrun --nproc_per_node=8 09_5d.py --like deepseek-v3"),
)
