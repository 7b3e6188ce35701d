"""Worked problems of the scaling book, the playbook and Megatron's paper.

    python 10_planner.py --problems

ten: chapter 10's module, whichever is held to them.
"""

import math

from lab.planner import rooflines, tables


def best_checkpoints(layers, kept_by_input, kept_by_layer):
    """Megatron's trade: with c checkpoints, a stage keeps c inputs, and the layers of one part
    while they are computed again. This c keeps least; if it is above layers, each is its own."""
    return math.sqrt(layers * kept_by_layer / kept_by_input)


# ------------------------------------------------------------------------------------- the problems

def llama_2(ten):
    """{what: number} of the scaling book's three questions: LLaMA-2 13B with 3 M tokens a step, on
    4,096 chips of TPU v5p with 96 GB. axes, both: tokens of a chip below which ZeRO-3 waits, over
    three axes, and together with tp; kept: bytes of a token's activations."""
    model = ten.Model(40, 5120, 40, 40, 13824, True, 32000, 32768, False)
    chips, tokens, peak, link, hbm = 4096, 3e6, 4.59e14, 1.8e11, 96e9
    numbers, layer = model.parameters(), rooflines.mlp(model.dim, model.ffn)
    kept = 2 * model.layers * (model.dim + 2 * model.ffn)       # of a token, after three matrices
    split = rooflines.fastest_split(lambda dp, tp: rooflines.seconds(
        layer, tokens, dp, tp, peak, (2 * link, link)), chips)
    return {
        "model": model, "parameters": numbers, "chips": chips, "tokens": tokens, "hbm": hbm,
        "states": rooflines.STATES * numbers, "kept": kept, "all hbm": chips * hbm,
        "axes": rooflines.tokens_of_data_parallel(peak, 3 * link),
        "both": rooflines.tokens_of_both(model.ffn, peak, link),
        "shards": rooflines.best_data_parallel(tokens, chips, model.ffn), "split": split,
        "tp": rooflines.largest_tensor_parallel(model.ffn, peak, link),
        "seconds": rooflines.training_seconds(tokens, numbers, chips, peak, 0.4)}


def problems(ten):
    """Yield the worked problems of the scaling book's part 5, of the playbook and of Megatron's
    paper. Their answers stand in brackets."""
    of = llama_2(ten)
    states, kept, tokens = of["states"], of["kept"], of["tokens"]
    yield f"1. It has {of['parameters'] / 1e9:.1f} G parameters (13.0)."
    yield (f"2. With 16 M tokens, states take {states / 1e9:.0f} GB (130) and three activations "
           f"of a layer {16e6 * kept / 1e12:.0f} TB (42).")
    yield (f"3. With 3 M tokens: dp alone does not fit, {states / 1e9:.0f} GB on a chip of "
           f"{of['hbm'] / 1e9:.0f} GB. ZeRO-3 fits, {(states + tokens * kept) / 1e12:.0f} TB (8) "
           f"of {of['all hbm'] / 1e12:.0f} TB (393), but over three axes it waits below "
           f"{of['axes']:.0f} tokens of a chip (850), and there are {tokens / of['chips']:.0f}. "
           f"With tp, it waits below {of['both']:.0f} (235): so ZeRO-3 over {of['shards']:.0f} "
           f"chips (1333), say {of['split'][0]:,}, and tp over {of['split'][1]}. A step takes "
           f"{of['seconds']:.2f} s at 40% (0.3).")
    yield f"   tp alone waits beyond {of['tp']:.1f} chips for each axis of the torus."
    yield from overlap(ten)
    yield from micro_batches(ten)
    yield from recomputation(ten)


def overlap(ten):
    """The playbook's A3 for the 70b on H100s, and from which degree on messages cannot hide."""
    model, h100 = ten.MODELS["70b"], ten.CLUSTERS["h100"]
    yield ("4. The playbook's A3, for the 70b on H100s: seconds of messages over seconds of the "
           "compute that could hide them, 8,192 tokens on a rank, 8 ranks, 10 layers in a stage, 2 "
           "bytes a number.")
    for name, bandwidth in (("NVLink", h100.nvlink), ("a network card", h100.nic)):
        ratios = rooflines.sending_over_computing(8192, 8, model.dim, 10, h100.peak, bandwidth)
        yield f"   over {name}: " + ", ".join(f"{axis} {x:.3f}" for axis, x in ratios.items())


def micro_batches(ten):
    """Megatron's figure 16: which micro-batch is fastest."""
    seconds = {run.layout.micro_batch: run.seconds
               for run in tables.runs(ten, "figure 16", batch=128)}
    best = min(seconds, key=seconds.get)
    yield ("5. Megatron's micro-batch, 91 G parameters, tp 8, pp 8, a batch of 128: "
           + ", ".join(f"{b}: {s:.1f} s" for b, s in seconds.items())
           + f". {best} is best (2): smaller ones have thin matmuls, larger ones a long bubble.")


def recomputation(ten):
    """Megatron's trade: 145 G parameters, tp 8, pp 16: time, memory, and how many checkpoints."""
    none, full = (tables.runs(ten, "figure 17", batch=64, recompute=recompute)[0]
                  for recompute in ("none", "full"))
    gb = [ten.memory(run.model, run.layout, run.software, 64)["activations"] / 1e9
          for run in (none, full)]
    kept = [ten.kept_by_layer(run.model, run.layout, run.software) for run in (none, full)]
    layers = none.model.layers // none.layout.pp
    best = best_checkpoints(layers, kept[1], kept[0])
    yield (f"6. Recomputation, 145 G parameters on 128 A100s: it costs "
           f"{1 - none.seconds / full.seconds:.0%} of the speed (up to 33%), and leaves "
           f"{gb[1]:.0f} of {gb[0]:.0f} GB of activations. {best:.0f} checkpoints would keep "
           f"least, in a stage of {layers} layers: so each layer is one (every 1 or 2).")
