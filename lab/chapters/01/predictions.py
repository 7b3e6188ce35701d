"""Predictions about chapter 01: what one GPU keeps and computes."""

from lab.chapters.question import Case, Question, shape
from lab.run import anatomy


def predictions(pick):
    b = pick(1, 2, 4)
    case = Case("01_single_gpu", 1, **shape(pick), batch=b * pick(1, 2), micro_batch=b,
                precision=pick("fp32", "bf16", "bf16-fp32grad", "fp16"))
    chapter, args, cfg = case.chapter, case.args, case.cfg
    widths = chapter.WIDTHS.get(args.precision, (4, 4, 0))
    activation = case.sizes["e"] = 2 if chapter.HALF[args.precision] else 4
    of_blocks = anatomy.kept_by_modules(cfg, b, activation, chapter.KEPT["full"])[1:-1]
    flops = {name: chapter.step_flops(cfg, b, "plain", name) for name in ("none", "full")}
    forward = flops["full"] - flops["none"]                 # of the blocks: full runs it again
    case.sizes["F_blocks"] = forward // (b * cfg.seq)
    case.sizes["F_head"] = (flops["none"] // 3 - forward) // (b * cfg.seq)
    masters = ", its master weight in fp32" if chapter.HALF[args.precision] else ""
    of_parameter = " + ".join(str(width) for width in (*widths, 8) if width)
    return case, [
        Question(
            f"How many bytes do parameters, gradients and AdamW's states take after a step with "
            f"--precision {args.precision}?", f"({of_parameter}) * Ψ + 4 * T",
            case.states({"parameters": cfg.parameters(), "widths": widths}), "B",
            f"per parameter: itself, its gradients{masters}, and two moments; and 4 bytes a tensor "
            "for AdamW's step count",
            "parameters + gradients + optimizer states"),
        Question(
            "How many numbers does one block keep for backward, of one micro-batch, with plain "
            "attention and without recomputation?",
            "14 * b*s*h + 2 * b*s*k + b*H * s*s + 4 * b*s",
            sum(numbers for _, numbers, _ in chapter.kept_for_backward(cfg, b)[0]), "numbers",
            "14 tensors of (b, s, h), keys and values, the weights of attention, and two "
            "statistics of each token for two LayerNorms"),
        Question(
            "How many bytes do all blocks together keep, of one micro-batch, with --recompute "
            "full?", "L * b*s*h * e", sum(of_blocks), "B", "only each block's input", also="H"),
        Question(
            "How many FLOPs does a step over the whole batch take, with plain attention and "
            "without recomputation?",
            "6 * B*s * (L * (10*h*h + 2*h*k) + V*h) + 12 * L * s*h * B*s",
            chapter.step_flops(cfg, args.batch, "plain", "none"), "FLOP",
            "6 for each token and number of a matrix (the embedding multiplies nothing), and two "
            "matmuls of attention, three times each", "computed: plain, none"),
        Question(
            "By what factor do the FLOPs of a step grow with --recompute full?",
            "(4*F_blocks + 3*F_head) / (3*F_blocks + 3*F_head)", flops["full"] / flops["none"],
            "times", "backward is two forwards, and recomputing the blocks is one more"),
    ]  # fmt: skip
