"""Wrong answers to the exercises of chapter 01."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "01.1": [
        Wrong("recomputed(group, x) if again else group(x)", "group(x)",
              "kept per micro-batch: plain, full: measured 153608, formula 78344"),
        Wrong("functools.partial(recomputed, core) if selective else core", "core",
              "kept per micro-batch: plain, selective"),
        Wrong("recomputed(group, x)", "recomputed(group, x.detach())",
              "gradients of the embedding are missing"),
    ],
    "01.2": [
        Wrong("/ valid ", "/ (targets != -100).sum() / len(micro_batches) ",
              "those of the mean of the micro-batches' own means"),
        Wrong("/ valid ", "/ valid / len(micro_batches) ",
              "all gradients and the loss are 1/3 of those of one GPU"),
        Wrong("/ valid ", "/ targets.numel() / len(micro_batches) ",
              "all gradients and the loss are 0.56 times those of one GPU"),
        Wrong("total += loss.detach()", "total = loss.detach()",
              "the loss is that of the last micro-batch alone"),
        Wrong("        backward(loss)\n        total", "        loss.backward()\n        total",
              "4,096 is the loss scale"),
        Wrong("loss.detach()", "loss", "requires_grad is True, and should be False"),
    ],
    "01.3": [
        Wrong("p.grad.float() if first else master.grad.add_(p.grad)", "p.grad.float()",
              "all gradients are those of the last micro-batch alone"),
        Wrong("torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])",
              "pass", "look at backward, and at what follows it"),
        Wrong("        torch._foreach_copy_([p.data for p in self.parameters], "
              "[m.data for m in self.masters])\n", "",
              "100% of the weights that forward uses are still those that the run began with"),
        Wrong("        torch._foreach_mul_([m.grad for m in self.masters if m.grad is not None], "
              "factor)\n", "", "times as far as on one GPU"),
        Wrong("                master.grad = None", "                pass",
              "gradients: the formula is 1/3 of what was measured"),
    ],
    "01.4": [
        Wrong("self.good = 0 if overflow else self.good + 1", "self.good += not overflow",
              "step 4 and step 5 are 64, and should be 32: 2 times"),
        Wrong("elif self.good", "if self.good", "step 3, step 4 and step 5 are 64"),
        Wrong("self.good % self.patience == 0", "self.good == self.patience",
              "step 9 is 64, and should be 128"),
    ],
    "01.5": [
        Wrong("masters.norm() / loss_scale", "masters.norm()",
              "the gradient norm is 4,096 times that of one GPU: 4,096 is the loss scale"),
        Wrong("masters.step(limit / loss_scale)", "masters.step(limit)", "4,096 is the loss scale"),
        Wrong("(norm + 1e-6)", "(norm * loss_scale + 1e-6)", "4,096 is the loss scale"),
        Wrong("clamp(max=1) if clip else 1", "clamp(max=1) if not clip else 1",
              "which is the norm over --clip"),
        Wrong("    if not overflow:\n", "    if True:\n", "loss nan"),
        Wrong("        scale.update(overflow)", "        pass", "all were skipped"),
        Wrong("masters.step(limit / loss_scale)",
              "scale and scale.update(False)\n        "
              "masters.step(limit / (scale.value if scale else 1))",
              "what is called has 6 items, and should have 5"),
    ],
    "01.6": [
        Wrong("kv, hidden = x * cfg.kv_heads // cfg.heads", "kv, hidden = x",
              "keys and values is 98,304, and should be 49,152: 2 times"),
        Wrong("tokens * cfg.heads * cfg.seq, ", "tokens * cfg.seq, ", "core is 49,152"),
        Wrong("cfg.seq * cfg.dim // cfg.heads, ", "tokens * cfg.dim // cfg.heads, ",
              "positions is 6,144, and should be 2,048: 3 times"),
    ],
    "01.7": [
        Wrong("backward = 2 * linears", "backward = linears",
              "what all linears take is 5,767,168, and should be 8,650,752: 2/3"),
        Wrong("core = 2 * (2 * tokens * s * h)", "core = 2 * tokens * s * h", "the core is"),
        Wrong("+ 3 * head", "+ head", "the head is 405,504, and should be 1,216,512: 1/3"),
        Wrong(".get(recompute, linears + core)", ".get(recompute, linears)",
              "full is 2,592,079,872"),
    ],
    "01.8": [
        Wrong("(math.ceil(layers / k) - 1) * of_input", "math.ceil(layers / k) * of_input",
              "7 layers, k = 1 is 21,500, and should be 20,500"),
        Wrong("math.ceil(layers / k) - 1", "layers // k - 1", "7 layers, k = 2 is 31,000"),
        Wrong("k * of_layer", "layers / k * of_layer", "7 layers, k = 1 is 107,500"),
        Wrong("min(range", "max(range", "should be 1"),
    ],
    "01.9": [
        Wrong("2 * h * kv", "2 * h * h", "tiny: GQA"),
        Wrong("0 if cfg.tie else h * cfg.vocab", "h * cfg.vocab", "gpt2: tied"),
        Wrong("(1 if cfg.gated else 2) * h", "2 * h", "llama-8b"),
        Wrong("(2 * cfg.layers + 1)", "2 * cfg.layers", "tiny: GQA"),
    ],
}
