"""The exhibits of chapter 10: FLOPs and seconds that are counted by two conventions at once."""

from lab.museum.exhibit import Exhibit

PUBLISHED = 0, "--published"    # no ranks: the planner runs nothing

EXHIBITS = [
    Exhibit(
        "AI-Hypercomputer/maxtext#1972", "one model counts all scores, another one half of them",
        "A framework counted all scores of causal attention in its TFLOP/s, while for attention in "
        "a window it counted only those that are computed. So the same hardware looked better or "
        "worse by the kind of attention alone, and the better number was the less honest one. At "
        "first the factor had been chosen to match Megatron, which counts half by now. With the "
        "fix the FLOPs of a 7B model with 129,024 tokens are 42 percent fewer, though nothing runs "
        "any slower. A mean over both conventions means nothing.",
        "10_planner.py",
        '(0.5 if scores == "causal" else 1)\n', '0.5\n',
        *PUBLISHED, ("table 1",), ("table 2, PTD", "table 5, full"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#3362", "what is computed twice is counted once",
        "A profiler took backward to be twice forward. With activation checkpointing it is three "
        "times that, so the FLOP/s which it printed were a quarter too low beside those of papers "
        "that count what the hardware does. Both numbers are in use: one is of the model, the "
        "other one of the hardware. Only their mixture is wrong.",
        "10_planner.py",
        ', 4 if recompute == "full" else 3\n', ', 3\n',
        *PUBLISHED, ("table 1", "table 2, PTD"), ("table 5, full",),
    ),
    Exhibit(
        "ai-dynamo/aiconfigurator#1459", "a pipeline as fast as the mean of its stages",
        "A tool that plans deployments divided the time of the whole model by the stages. But a "
        "pipeline is as fast as its slowest stage, and the head lies on the last one alone. Where "
        "layers do not divide by the stages, one stage has a layer more than the mean, too. For a "
        "32B model that decodes in eight stages, that made it a speedup of 8, which is 6.65.",
        "10_planner.py",
        "    last = add((usual, model.layers // p / layers), (head, 1))\n",
        "    last = usual = add((usual, model.layers / p / layers), (head, 1 / p))\n",
        *PUBLISHED, ("table 1", "table 5, selective"), ("table 2, PTD",),
    ),
    Exhibit(
        "pytorch/torchtitan#280", "an embedding that multiplies",
        "MFU took 6 FLOPs a token for each parameter, and the embedding's were among them. But an "
        "embedding looks up rows, and multiplies nothing. The fix takes it out, and goes on to "
        "count all scores of attention, as papers do, though half of them are masked. With that "
        "convention somebody in the thread knows of an MFU above 100 percent. The smaller a model "
        "is beside its vocabulary, the more the embedding flatters it.",
        "10_planner.py",
        "    head = 2 * model.vocab * model.dim ", "    head = 2 * 2 * model.vocab * model.dim ",
        *PUBLISHED, ("table 1",), ("table 2, PTD", "table 5, full"),
    ),
    Exhibit(
        "deepspeedai/DeepSpeed#171", "samples of all ranks, of which some have the same",
        "A timer of throughput multiplied a rank's batch by the number of all ranks. But ranks "
        "that share a model work on the same samples, so that these were counted several times. "
        "The fix multiplies by the ranks of data parallelism alone. With a tp of 8, nothing gets "
        "eight times as fast.",
        "10_planner.py",
        "    m, layers = batch // (layout.dp * layout.micro_batch), math",
        "    m, layers = batch // (layout.dp * t * layout.micro_batch), math",
        *PUBLISHED, ("table 1", "table 2, PTD", "table 5, selective"), ("table 2, ZeRO-3",),
    ),
]
