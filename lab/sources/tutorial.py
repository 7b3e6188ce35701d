"""The tutorial: its cheat sheet, its derivations and tables, and its 25 questions."""

from dataclasses import replace
from functools import partial

from lab.bench.machines import MACHINES
from lab.chapters import chapter
from lab.planner import published
from lab.sources import worked
from lab.sources.asked import QUESTIONS
from lab.sources.row import Row
from lab.sources.worked import LLAMA_7B, ten

_, NVLINK = MACHINES["H100, NVLink 4"]
_, CARD = MACHINES["H100, InfiniBand NDR"]


def sent_by_busiest(name):
    """Of a collective on 8 ranks, over the bytes of the tensor: the largest messages of all rounds.
    """
    return sum(chapter("00").round_bytes(name, 8, 1))


def seconds_of_layers(bandwidth):
    """In which the all_reduces of the tutorial's 7B model on 8 ranks are sent."""
    return 32 * worked.sent_in_layer("04", 2) / bandwidth


def steps_of(name, m, p=8):
    """Time slots of a schedule in which F takes one, and B and W together another."""
    schedule = chapter("07").make_schedule(name, p, m)
    return max(end for _, end in worked.schedules.simulate(schedule, 1, 0.5, 0.5).values())


def warm_up(p, m):
    """Forwards of the first rank in 1F1B, before those that a backward follows."""
    kinds = [action.kind for action in chapter("07").make_schedule("1f1b", p, m).actions[0]]
    return kinds.index("BW") - 1


def messages(schedule, v=1):
    """That a rank in the middle of 8 sends in a step, one byte each."""
    _, _, wire = chapter("07").traffic(schedule, 4, 8, 32, v, 1, 0, 2)["send"]
    return wire


def keys_of_ring(seq, ranks=16):
    """Bytes of keys and values that a rank sends forward in a layer of the 7B model."""
    plan = ten()
    model = replace(plan.MODELS["7b"], seq=seq)
    numbers, n, *_ = plan.messages(model, plan.Layout(cp=ranks))["cp"]
    return 2 * numbers * (n - 1) / n


def active(experts):
    """Parameters of a token, of a mixture of so many experts, two for each token."""
    return chapter("08").Mixture(32, 4096, 32, 32, 4096, 32000, experts=experts, top_k=2).active()


def seconds_with(fp8):
    """Of a step of Llama 3 8B on 8 H100s by torchtitan, in the fastest layout."""
    plan = ten()
    software = replace(plan.SOFTWARE["torchtitan"], fp8=fp8)
    layout = plan.Layout(dp=8, zero=3, sp=False)
    return plan.Plan(plan.MODELS["8b"], layout, plan.CLUSTERS["h100"], software, 8, 64).total


def secondary(ranks, node):
    """Bytes of weights of a parameter on a rank of ZeRO++, with those that its node keeps."""
    three = chapter("03")
    weights = [three.held(1, 3, n, "bf16")[0] for n in (ranks, node)]
    return sum(weights)


def textbook(seq, part="all"):
    """Bytes of a block of GPT-3 with sequences of this length; or of its scores alone."""
    plan = ten()
    model, software = replace(plan.MODELS["gpt3"], seq=seq), plan.SOFTWARE["megatron-2021"]
    whole = plan.kept_by_layer(model, plan.Layout(), software)
    rest = plan.kept_by_layer(model, plan.Layout(recompute="selective"), software)
    return {"all": whole, "scores": whole - rest}[part]


def llama_3(at):
    """What chapter 10 says of Llama 3's run with 8K (0: 8,192 GPUs; 1: 16,384) or 128K (2)."""
    return list(published.llama_3(ten()))[at]


def gpus(**degrees):
    """Of a layout, as chapter 10 multiplies them."""
    layout = ten().Layout(**degrees)
    return layout.stage * layout.pp


sent = partial(worked.sent_in_layer, "04")
ROWS = (
    # 0 to 2.2
    Row("0", "all_reduces of a layer's forward, with tp", 2, lambda: sent(0) / 2, "calls",
        by="04_tensor_parallel.traffic"),
    Row("1", "weights of a parameter", 2, lambda: chapter("01").WIDTHS["fp16"][0], "B",
        by="01_single_gpu.WIDTHS"),
    Row("1", "gradients of a parameter", 2, lambda: chapter("01").WIDTHS["fp16"][1], "B",
        by="01_single_gpu.WIDTHS"),
    Row("1", "optimizer states of a parameter", 12,
        lambda: chapter("03").held(1, 1, 1, "bf16")[2], "B", by="03_zero.held"),
    Row("1", "model states of a parameter", 16, lambda: worked.states(0, 1), "B",
        by="03_zero.held"),
    Row("1", "model states of 7 billion parameters", 112e9, lambda: 7e9 * worked.states(0, 1), "B",
        0.5e9, by="03_zero.held"),
    Row("1", "activations of a layer, linear in the batch: those of 2 sequences over one's", 2,
        lambda: chapter("01").textbook_activation_bytes(LLAMA_7B, 2)
        / chapter("01").textbook_activation_bytes(LLAMA_7B, 1), "times",
        by="01_single_gpu.textbook_activation_bytes"),
    Row("2.1", "a ring all_reduce on 8 ranks sends", 1.75,
        lambda: sent_by_busiest("all_reduce_ring"), "S", by="00_collectives.round_bytes"),
    Row("2.1", "a reduce_scatter", 0.875, lambda: sent_by_busiest("reduce_scatter"), "S",
        by="00_collectives.round_bytes"),
    Row("2.1", "an all_gather", 0.875, lambda: sent_by_busiest("all_gather"), "S",
        by="00_collectives.round_bytes"),
    Row("2.1", "a broadcast, as a tree", 1, lambda: sent_by_busiest("broadcast"), "S",
        by="00_collectives.round_bytes", why="S is what a rank receives. The root of a tree sends "
        "it once in each of log2(8) = 3 rounds."),
    Row("2.1", "an all_to_all", 0.875, lambda: sent_by_busiest("all_to_all"), "S",
        by="00_collectives.round_bytes"),
    Row("2.1", "an all_reduce, over a reduce_scatter and an all_gather", 1,
        lambda: chapter("00").sent("all_reduce_ring", 8, 800) / sum(
            chapter("00").sent(name, 8, 800) for name in ("reduce_scatter", "all_gather")),
        "times", by="00_collectives.sent"),
    Row("2.1", "steps of a ring all_reduce on 8 ranks", 14,
        lambda: len(chapter("00").round_bytes("all_reduce_ring", 8, 1)), "steps",
        by="00_collectives.round_bytes"),
    Row("2.1", "what a rank sends in each of them", 1 / 8,
        lambda: max(chapter("00").round_bytes("all_reduce_ring", 8, 1)), "S",
        by="00_collectives.round_bytes"),
    Row("2.1", "on 1,024 ranks it sends about 2 S", 2,
        lambda: chapter("02").wire_bytes(1, 1024), "S", 0.005, by="02_data_parallel.wire_bytes"),
    Row("2.1", "rounds of a tree all_reduce on 1,024 ranks, O(log N)", None,
        lambda: len(chapter("00").round_bytes("all_reduce_tree", 1024, 1)), "rounds",
        by="00_collectives.round_bytes"),
    Row("2.2", "NVLink 4 of an H100, in one direction", 900e9, lambda: NVLINK, "B/s",
        by="lab.bench.machines.MACHINES", why="900 GB/s are both directions of 18 links together. "
        "A ring sends in one of them, 450 GB/s."),
    Row("2.2", "InfiniBand NDR, of a port", 50e9, lambda: CARD, "B/s",
        by="lab.bench.machines.MACHINES"),
    Row("2.2", "NVLink over InfiniBand", 10, lambda: NVLINK / CARD, "times",
        by="lab.bench.machines.MACHINES", to=20, why="With one direction of NVLink it is 9."),
    Row("2.2", "GPUs of tp 8, pp 16, dp 128", 16384, lambda: gpus(tp=8, pp=16, dp=128), "GPUs",
        by="10_planner.Layout"),
    # 3: data parallelism
    Row("3.2", "share of an all_reduce that its bytes take, in buckets of 25 MB on 8 H100s", None,
        lambda: worked.share_of_bytes(8, 25e6, "H100, NVLink 4"), "%", by="00_collectives.seconds"),
    Row("3.2", "the same, in buckets of 1 MB: latencies dominate", None,
        lambda: worked.share_of_bytes(8, 1e6, "H100, NVLink 4"), "%", by="00_collectives.seconds"),
    Row("3.4", "DDP sends for a parameter, in a step", 4,
        lambda: chapter("02").wire_bytes(2, 1024), "B", 0.01, by="02_data_parallel.wire_bytes"),
    Row("3.4", "model states of 70 billion parameters", 1.12e12,
        lambda: 70e9 * worked.states(0, 1), "B", 0.005e12, by="03_zero.held"),
    # 4: ZeRO
    *(Row("4.1", f"model states of a parameter, ZeRO-{stage} on 64 ranks", told,
          partial(worked.states, stage, 64), "B", by="03_zero.held")
      for stage, told in ((1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64))),
    Row("4.1", "model states of a parameter, ZeRO-3 on 1,024 ranks", 0.0156,
        lambda: worked.states(3, 1024), "B", 0.0001, by="03_zero.held"),
    Row("4.1", "model states of 65 billion parameters on them", 1e9,
        lambda: 65e9 * worked.states(3, 1024), "B", 0.05e9, by="03_zero.held"),
    *(Row("4.3", f"ZeRO-{stage} sends, in weights of 16 bits", told,
          partial(worked.sent_in_zero, stage, 1024), "Ψ", 0.05, by="03_zero.traffic")
      for stage, told in ((1, 2), (2, 2), (3, 3))),
    Row("4.3", "ZeRO-3 over DDP", 1.5, lambda: worked.sent_in_zero(3, 1024)
        / chapter("02").wire_bytes(1, 1024), "times", 0.05, by="03_zero.traffic"),
    Row("4.3", "ZeRO-3 sends for a parameter", 6, lambda: 2 * worked.sent_in_zero(3, 1024), "B",
        0.1, by="03_zero.traffic"),
    Row("4.3", "ZeRO-2 with 4 micro-batches sends (its table has one)", None,
        lambda: worked.sent_in_zero(2, 1024, 4), "Ψ", by="03_zero.traffic"),
    Row("4.4", "states of 13 billion parameters on each of 8 GPUs, the update on the CPU", None,
        lambda: sum(chapter("03").held(13e9, 3, 8, "bf16")[:2]), "B", by="03_zero.held"),
    Row("4.4", "states of a trillion, for a machine's disks", None,
        lambda: 1e12 * worked.states(0, 1), "B", by="03_zero.held"),
    # 5: FSDP
    Row("5.2", "weights that are gathered for a block of dim 4,096", None,
        lambda: 2 * chapter("03").padded_sizes(LLAMA_7B, 8)[1], "B", by="03_zero.padded_sizes"),
    Row("5.4", "FSDP2's reduce_scatters over those of ZeRO-3", 1,
        lambda: worked.fsdp_over_zero("reduce_scatter"), "times", by="lab.sources.worked."
        "sent_by_fsdp"),
    Row("5.4", "FSDP2's all_gathers over those of ZeRO-3", 1,
        lambda: worked.fsdp_over_zero("all_gather"), "times", by="lab.sources.worked.sent_by_fsdp",
        why="PyTorch gathers the head again in backward, which begins with it: ours keeps it."),
    Row("5.5", "model states of a parameter, ZeRO-3 on 1,024 GPUs", 16 / 1024,
        lambda: worked.states(3, 1024), "B", by="03_zero.held"),
    Row("5.5", "the same, HSDP in groups of 8", 2, lambda: worked.states(3, 8), "B",
        by="03_zero.held"),
    Row("5.5", "HSDP's gradients between groups, over ZeRO-3's messages: few", None,
        lambda: worked.between_groups(8, 128) / worked.sent_in_zero(3, 1024), "%",
        by="03_zero.traffic"),
    # 6: ZeRO++
    Row("6.1", "int8 weights send, of what 16 bits send", 0.5, worked.in_int8, "times", 0.01,
        by="03_zero.zeropp_traffic"),
    Row("6.2", "weights of a parameter on a GPU, hpZ on 1,024 GPUs in nodes of 8", 2,
        lambda: secondary(1024, 8), "B", by="03_zero.held", why="The GPUs of a node hold the "
        "weights together, an eighth each, and gather them over NVLink. No GPU has all."),
    Row("6.2", "states and weights of a node with hpZ, over those without: 8 times", 8,
        lambda: 1 + chapter("03").held(1, 3, 8, "bf16")[0] / worked.states(3, 1024), "times",
        by="03_zero.held", why="Of 1,024 GPUs each has 0.0156 bytes of states, and now 0.25 of "
        "weights besides: a node has a whole copy more."),
    Row("6.4", "less traffic between nodes, with gradients in int8", 4,
        lambda: 2 * worked.sent_in_zero(3, 384) / worked.sent_across_nodes(384, 1), "times", 0.1,
        by="03_zero.zeropp_traffic", why="Three collectives of 2 bytes become 1, 0 and 1 byte. "
        "The paper's gradients have 4 bits."),
    Row("6.4", "less traffic between nodes, with gradients in 4 bits", 4,
        lambda: 2 * worked.sent_in_zero(3, 384) / worked.sent_across_nodes(384, 0.5), "times", 0.1,
        by="03_zero.zeropp_traffic"),
    # 7: tensor parallelism
    Row("7.1", "GELU(X W₁) W₂ by columns and rows, summed, less the whole: the difference", 0,
        worked.off_by_mlp, "", 1e-12, "04_tensor_parallel.matmul_by_rows"),
    Row("7.2", "all_reduces of a block, forward and backward", 4, lambda: sent(0), "calls",
        by="04_tensor_parallel.traffic"),
    Row("7.2", "of these, forward of an MLP", 1, lambda: sent(0) / 4, "calls",
        by="04_tensor_parallel.traffic"),
    Row("7.5", "an all_reduce of 2,048 tokens of dim 4,096", 32e6, lambda: sent(1) / 4, "B", 0.5e6,
        by="04_tensor_parallel.traffic", why="2,048 · 4,096 numbers of 2 bytes are 16.8 MB, as "
        "section 8.1 of the tutorial has it."),
    Row("7.5", "all_reduces of 32 layers", 128, lambda: 32 * sent(0), "calls",
        by="04_tensor_parallel.traffic"),
    Row("7.5", "what they carry in a step", 4e9, lambda: 32 * sent(1), "B", 0.5e9,
        by="04_tensor_parallel.traffic", why="128 times 16.8 MB. But a ring of 8 sends 1.75 times "
        "that, 3.8 GB."),
    Row("7.5", "they take, over NVLink", 4.4e-3, lambda: seconds_of_layers(NVLINK), "s", 0.1e-3,
        by="04_tensor_parallel.traffic", why="NVLink sends 450 GB/s in one direction, not 900."),
    Row("7.5", "they take, over InfiniBand", 80e-3, lambda: seconds_of_layers(CARD), "s", 5e-3,
        by="04_tensor_parallel.traffic"),
    # 8: sequence parallelism
    Row("8.1", "an activation of 2,048 tokens of dim 4,096", 16e6, lambda: sent(1) / 4, "B", 1e6,
        by="04_tensor_parallel.traffic"),
    Row("8.1", "what lies outside of tp in 32 layers", 2.5e9, lambda: 32 * 2048 / 4096
        * worked.outside("7b", "megatron-2024") * worked.kept("7b", "megatron-2024"), "B", 0.5e9,
        by="10_planner.kept_by_layer"),
    Row("8.2", "TP with SP sends, over TP alone", 1,
        lambda: worked.sent_in_layer("05", 2, variant="kept") / sent(2), "times",
        by="05_sequence_parallel.traffic"),
    Row("8.2", "the same, if the shards alone are kept for backward", 1,
        lambda: worked.sent_in_layer("05", 2) / sent(2), "times",
        by="05_sequence_parallel.traffic", why="Weight gradients need the inputs whole. What is "
        "kept as a shard is gathered once more in backward: 5 halves of an all_reduce for 4."),
    Row("8.3", "share of activations outside of tp, GPT-3, scores recomputed", 0.3,
        lambda: worked.outside("gpt3", "megatron-2021", "selective"), "%",
        by="10_planner.kept_by_layer", to=0.5, why="10 of its 34 bytes are a little less."),
    Row("8.3", "the same, Llama 7B with flash attention", 0.3,
        lambda: worked.outside("7b", "megatron-2024"), "%", by="10_planner.kept_by_layer", to=0.5,
        why="Without dropout there are no masks outside, and SwiGLU keeps more inside."),
    Row("8.3", "SP saves with tp 8, of a layer's activations, GPT-3, scores recomputed",
        0.25, lambda: worked.saved_by_sequence("gpt3", "megatron-2021", 8, "selective"), "%",
        by="10_planner.kept_by_layer", to=0.4),
    Row("8.3", "the same, Llama 7B with flash attention", 0.25,
        lambda: worked.saved_by_sequence("7b", "megatron-2024"), "%",
        by="10_planner.kept_by_layer", to=0.4, why="Less of it lies outside: 7/8 of a quarter."),
    Row("8.4", "FLOPs that selective recomputation saves, of those that full recomputation adds",
        0.3, lambda: 1 - worked.recomputed("selective") / worked.recomputed("full"), "%",
        by="01_single_gpu.step_flops", to=0.4, why="30 to 40% is what full recomputation costs. "
        "Selective recomputation repeats two small products instead of a forward."),
    Row("8.4", "bytes that selective recomputation leaves of a GPT-3 layer, over full's", 1,
        lambda: worked.kept("gpt3", "megatron-2021", recompute="selective")
        / worked.kept("gpt3", "megatron-2021", recompute="full"), "times",
        by="10_planner.kept_by_layer", why="Full keeps the input alone, 2 of 34 bytes."),
    # 9: pipelines
    Row("9.1", "a rank of 8 works, without micro-batches", 1 / 8,
        lambda: 1 - worked.idle("naive", 8, 1), "%", 1e-9, by="07_pipeline_parallel.bubble"),
    Row("9.2", "GPipe waits, 8 stages, 32 micro-batches: (P-1)/(M+P-1)", 7 / 39,
        lambda: worked.idle_in_time("afab", 8, 32), "%", 1e-9, by="lab.schedules.simulated_bubble"),
    Row("9.2", "its time slots: 2(M+P-1)", 78, lambda: steps_of("afab", 32), "slots", 1e-9,
        by="lab.schedules.simulate"),
    Row("9.2", "micro-batches that it keeps: M", 32, lambda: worked.alive("afab", 8, 32),
        "micro-batches", by="07_pipeline_parallel.most_alive"),
    Row("9.3", "1F1B waits as long", 7 / 39, lambda: worked.idle_in_time("1f1b", 8, 32), "%", 1e-9,
        by="lab.schedules.simulated_bubble"),
    *(Row("9.3", f"micro-batches that stage {stage} of 8 keeps: P - i", told,
          lambda stage=stage: chapter("07").most_alive("1f1b", stage, 8, 32, 1), "micro-batches",
          by="07_pipeline_parallel.most_alive") for stage, told in ((0, 8), (7, 1))),
    Row("9.4", "interleaved waits, 4 slices: (P-1)/(VM+P-1)", 7 / 135,
        lambda: worked.idle_in_time("interleaved", 8, 32, 4), "%", 1e-9,
        by="lab.schedules.simulated_bubble"),
    Row("9.4", "the GPU of 4 that has layer 4, with 2 slices of 8 layers", 0,
        lambda: chapter("07").make_schedule("interleaved", 4, 4, 2).ranks[4], "",
        by="07_pipeline_parallel.make_schedule"),
    Row("9.4", "messages with 2 slices, over those with one", 2,
        lambda: messages("interleaved", 2) / messages("1f1b"), "times",
        by="07_pipeline_parallel.traffic"),
    Row("9.5", "forwards of the first of 4 stages before the steady state", 3,
        lambda: warm_up(4, 8), "forwards", by="07_pipeline_parallel.make_schedule"),
    Row("9.6", "a message of 2,048 tokens of dim 4,096 to the next stage: B/M · L · D bytes",
        2048 * 4096, lambda: worked.message(2048, 4096), "B", by="09_5d.traffic",
        why="That is how many numbers; each has 2 bytes."),
    # 10: context parallelism
    Row("10.1", "hops of a ring of 16", 15, lambda: chapter("06").hops_needed("ring", 16, 131072),
        "hops", by="06_context_parallel.hops_needed"),
    Row("10.1", "keys and values that a rank of 16 sends in a layer, 128K tokens of dim 4,096",
        2 * 2 * 131072 * 4096 * 15 / 16, lambda: keys_of_ring(131072), "B", 1,
        by="10_planner.messages"),
    Row("10.2", "cp of Llama 3 with 128K: its TFLOP/s of a GPU (published: 380)", None,
        lambda: llama_3(2)[2], "TFLOP/s", by="lab.planner.published.llama_3"),
    Row("10.2", "seconds of its step with 128K: \"seconds\"", None,
        lambda: worked.seconds_of_llama(2), "s", by="lab.planner.published.llama_3"),
    Row("10.3", "twice the sequence sends", 2, lambda: keys_of_ring(262144) / keys_of_ring(131072),
        "times", by="10_planner.messages"),
    # 11: experts
    Row("11.1", "parameters of a token with 64 experts, over those with 8", 1,
        lambda: active(64) / active(8), "times", 0.005, by="08_expert_parallel.Mixture"),
    Row("11.2", "experts of a GPU, 256 over 64", 4, lambda: 256 / ten().Layout(ep=64).cuts(
        ten().MODELS["deepseek-v3"], ten().SOFTWARE["deepseek-v3"])["experts"], "experts",
        by="10_planner.Layout"),
    Row("11.2", "exchanges of a layer's forward: dispatch and combine", 2,
        lambda: ten().messages(ten().MODELS["deepseek-v3"], ten().Layout(ep=64))["ep"][3], "calls",
        by="10_planner.messages"),
    Row("11.2", "journeys of a token to other machines, DeepSeek-V3 in two hops, 4 of 8 machines",
        None, lambda: worked.crossings(4)[1], "journeys", by="08_expert_parallel.crossings"),
    Row("11.2", "the same, if each of its experts is sent its row", None,
        lambda: worked.crossings(4)[0], "journeys", by="08_expert_parallel.crossings"),
    # 12: activations
    Row("12.1", "layers of a group, of 64 layers that keep as much as their inputs: √L", 8,
        lambda: chapter("01").best_k(64, 1, 1), "layers", by="01_single_gpu.best_k"),
    Row("12.1", "inputs that are kept then, 2√L", 16,
        lambda: chapter("01").most_again(64, 8, 1, 1), "inputs", 1, by="01_single_gpu.most_again"),
    Row("12.1", "FLOPs of full recomputation", 0.33, lambda: worked.recomputed("full"), "%", 0.005,
        by="01_single_gpu.step_flops"),
    Row("12.2", "FLOPs of selective recomputation", None, lambda: worked.recomputed("selective"),
        "%", by="01_single_gpu.step_flops"),
    Row("12.4", "34 BLD + 5 BL²H of GPT-3, 2,048 tokens", 34 * 2048 * 12288 + 5 * 2048**2 * 96,
        lambda: textbook(2048), "B", by="10_planner.kept_by_layer"),
    Row("12.4", "the second term over the first, if L = D: less than 1", 1,
        lambda: textbook(12288, "scores") / (textbook(12288) - textbook(12288, "scores")), "times",
        by="10_planner.kept_by_layer", why="Its factor is 5 H L / 34 D, and GPT-3 has 96 heads: "
        "the first one dominates below L = 34 D / 5 H, 870 tokens."),
    # 13 to 15
    Row("13", "GPUs of dp 4, tp 2, pp 2, cp 2, ep 2: W = D · T · P · C · E", 64,
        lambda: gpus(dp=4, tp=2, pp=2, cp=2, ep=2), "GPUs", by="10_planner.Layout",
        why="The ranks that share experts are those of dp, cp and tp: ep multiplies nothing."),
    Row("13.1", "GPUs of the short phase", 16384, lambda: gpus(tp=8, cp=1, pp=16, dp=128), "GPUs",
        by="10_planner.Layout"),
    Row("13.1", "GPUs of the long phase", 16384, lambda: gpus(tp=8, cp=16, pp=16, dp=8), "GPUs",
        by="10_planner.Layout"),
    Row("0", "FLOPs of Llama 3's run, 15.6 T tokens", 3.8e25,
        lambda: 15.6e12 * worked.flops_of_token(), "FLOP", within=0.05, by="10_planner.step_flops"),
    Row("13.1", "days of that run on 16,384 GPUs, as fast as chapter 10 plans it", 54,
        lambda: worked.days_of_llama(), "days", 5, by="lab.planner.published.llama_3",
        why="The 54 days are a part of the run, in which interruptions were counted."),
    Row("13.2", "GPUs of DeepSeek-V3: pp 16, and dp 128 of which 64 share experts", 2048,
        lambda: gpus(pp=16, dp=128, ep=64), "GPUs", by="10_planner.Layout"),
    Row("13.2", "nodes that share experts", 8, lambda: 64 / ten().CLUSTERS["h800"].per_node,
        "nodes", by="10_planner.CLUSTERS"),
    Row("13.2", "parameters of DeepSeek-V3", 671e9,
        lambda: ten().MODELS["deepseek-v3"].parameters(), "", 0.5e9, by="10_planner.Model"),
    Row("14.2", "DualPipe waits, 8 ranks, 20 micro-batches: ideally 0", 0,
        lambda: worked.idle_in_time("dualpipe", 8, 20), "%", by="lab.schedules.simulated_bubble",
        why="Two directions still fill and drain: (p/2 - 1) waits are left."),
    Row("14.2", "1F1B waits, of 8 ranks and 20 micro-batches", 7 / 27,
        lambda: worked.idle_in_time("1f1b", 8, 20), "%", 1e-9, by="lab.schedules."
        "simulated_bubble"),
    Row("14.2", "micro-batches that interleaved keeps, of its 2 slices, 8 ranks: V · P", 16,
        lambda: worked.alive("interleaved", 8, 32, 2), "of slices",
        by="07_pipeline_parallel.most_alive", why="2(P-1) + (V-1)P + 1 of them warm up the first "
        "rank. Each is half as large."),
    Row("14.2", "micro-batches that DualPipe keeps, 8 ranks: 2 P", 16,
        lambda: worked.alive("dualpipe", 8, 20), "of slices", by="07_pipeline_parallel.most_alive",
        why="P + 1 activations in all. Doubled are the parameters: a rank has two stages."),
    Row("15.2", "GPUs of pp 2, dp 8, cp 4, tp 8", None, lambda: gpus(pp=2, dp=8, cp=4, tp=8),
        "GPUs", by="10_planner.Layout"),
    Row("15.3", "FP8 speeds a step up, Llama 3 8B on 8 H100s", 0.2,
        lambda: seconds_with(False) / seconds_with(True) - 1, "%", by="10_planner.Plan", to=0.4),
    # 16 and the appendix
    Row("16", "a broadcast on a ring of 8, in the mean of its ranks", 7 / 8,
        lambda: chapter("00").sent("broadcast", 8, 8) / 8 / 8, "S", by="00_collectives.sent"),
    Row("16", "a message between stages", 1,
        lambda: chapter("07").traffic("1f1b", 0, 2, 1, 1, 1, 0, 2)["send"][2], "S",
        by="07_pipeline_parallel.traffic"),
    Row("A", "GPUs of pp 2, dp 4, cp 1, tp 8", 64, lambda: gpus(pp=2, dp=4, cp=1, tp=8), "GPUs",
        by="10_planner.Layout"),
    # 17: the questions
    *(row for question in QUESTIONS if question.level for row in question.rows),
)
LEFT_OUT = (
    "2.2, 4.4, 6.1, 6.4, Q19: PCIe, over which nothing is sent here; how many times slower or "
    "faster other software was (offload 1.5 to 3 and 5 to 10 times, ZeRO++ 2.16), and its loss: "
    "neither machine nor model is told, so nothing can be planned (03_zero.py --variant zeropp "
    "--steps 50 has the loss of ours)",
    "13.1, Q18: 466 interruptions, their causes, and 90% of effective time: what a run recorded "
    "(python -m lab.faults interrupts runs, and says what the best interval of saves leaves)",
)
