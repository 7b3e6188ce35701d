"""The exercises of kernels/fp8.py."""

from unittest import mock

import torch

from lab.classroom.exercise import Exercise, Same, random


def amax_of_rows(chapter):
    return chapter.amax_of(random(5, 300) - 2, (1, 128))


def amax_of_squares(chapter):
    return chapter.amax_of(random(130, 300), (128, 128))


def amax_with_inf_and_nan(chapter):
    inf, nan = torch.inf, torch.nan
    return chapter.amax_of(torch.tensor([[1, -inf, -3], [nan, inf, 0]]), (1, 128))


def scales(chapter, amax, powers_of_two):
    return chapter.scales_of(torch.tensor(amax), powers_of_two)


def scales_at_the_edges(chapter):
    """Of each amax by its name: just below, at and just above powers of two times 448, and from
    zero to the largest that there is."""
    powers = 448 * 2.0 ** torch.tensor([-126, -3, 0, 1, 10, 100])
    largest, zero = torch.finfo().max, torch.zeros(())
    amax = torch.cat([powers.nextafter(zero), powers, powers.nextafter(powers * 2),
                      torch.tensor([0, 1e-40, largest])])
    return {f"amax {each:.9g}": scale
            for each, scale in zip(amax.tolist(), chapter.scales_of(amax, True))}


def values_and_scales(quantized):
    return {"values": quantized.values.float(), "scales": quantized.scales}


def rounded_by_scales(chapter, tile, *shape):
    """With scales of the check's own, since those are other exercises."""
    scales = lambda amax, powers: amax / (3 if powers else 7)
    sums = lambda x, tile: chapter.tiled(x.float().square() + 1, tile).sum((1, 3))
    with mock.patch.multiple(chapter, scales_of=scales, amax_of=sums):
        return [values_and_scales(chapter.quantize(random(*shape), tile)),
                values_and_scales(chapter.quantize(random(*shape), tile, False))]


def gradients_of_float32(chapter):
    """By tiles, where the kernels do all the rounding."""
    x, w, v = (random(*shape).float().requires_grad_()
               for shape in ((2, 8, 140), (20, 140), (30, 140)))
    dy, dv = random(2, 8, 20).float(), random(2, 8, 30).float()
    return torch.autograd.grad(chapter.linear8(x, "tile", w, v), [x, w, v], [dy, dv])


def product_of_given(chapter, k, promote, bits):
    """Of values and scales that are there."""
    a, b = (chapter.Quantized(random(3, k).to(chapter.E4M3), random(3, -(-k // 128)).float().exp(),
                              (1, 128)) for _ in "ab")
    return chapter.hopper_product(a, b, promote, bits)


def quantized_rows(chapter):
    return values_and_scales(chapter.quantize(random(5, 300), (1, 128)))


def quantized_by_given_amax(chapter):
    amax = torch.full((2, 2), 8.0)
    return values_and_scales(chapter.quantize(random(130, 200), (128, 128), False, amax))


def quantized_inf_and_nan(chapter):
    x = torch.tensor([[1, torch.inf, -3, torch.nan]])
    return chapter.quantize(x, (1, 128)).values.float().nan_to_num(1000)


def gradients_of_linears(chapter, scaling):
    """Of x and of two weights that share it."""
    x, w, v = (random(*shape).requires_grad_() for shape in ((3, 50, 140), (150, 140), (130, 140)))
    dy, dv = random(3, 50, 150), random(3, 50, 130)
    return torch.autograd.grad(chapter.linear8(x, scaling, w, v), [x, w, v], [dy, dv])


def product_promoted_in_the_end(chapter):
    a, b = (chapter.quantize(random(4, 512).abs(), (1, chapter.ALL)) for _ in "ab")
    return chapter.hopper_product(a, b, None)


def product_promoted_every_128(chapter):
    a, b = (chapter.quantize(random(4, 512).abs(), (1, 128)) for _ in "ab")
    return chapter.hopper_product(a, b)


def product_with_6_bits(chapter):
    a, b = (chapter.quantize(random(3, 100), (1, 128)) for _ in "ab")
    return chapter.hopper_product(a, b, 128, 6)


EXERCISES = [
    Exercise(
        "fp8.1", "amax_of", 1,
        "How large is the largest number of each tile, whatever its sign? `tiled` puts zeros "
        "behind x and shows it by tiles. What is inf or NaN does not count, or it would make "
        "all others zero.",
        ("In which two of its four dimensions does `tiled` have the numbers of one tile?",
         "Take magnitudes, put zero for what is not finite, and then the maximum over "
         "dimensions 1 and 3, in float32."),
        (Same(amax_of_rows, "5 rows of 300 in tiles of 1 x 128"),
         Same(amax_of_squares, "(130, 300) in tiles of 128 x 128"),
         Same(amax_with_inf_and_nan, "with inf and NaN")),
    ),
    Exercise(
        "fp8.2", "scales_of", 2,
        "Each amax over its scale is to be 448, the largest number of E4M3. With `powers`, the "
        "scale is the smallest power of two with which it is no more than that. No scale is "
        "smaller than SMALLEST.",
        ("A power of two is 1 · 2^e. What does frexp give of a number that is one already?",
         "frexp splits a number into a mantissa from 0.5 up to 1 and a power of two, which is "
         "the next one above it. Of a power of two itself, with the mantissa 0.5, it is one "
         "too many."),
        (Same(scales, "scales_of(torch.tensor([448.0, 1, 1e-3, 0, 3e38]), False)",
              ([448.0, 1, 1e-3, 0, 3e38], False)),
         Same(scales, "of 448, 449, 447, 224, 225, 0.001 and 0, as powers of two",
              ([448.0, 449, 447, 224, 225, 1e-3, 0], True)),
         Same(scales_at_the_edges, "powers of two, around 448 times a power of two")),
    ),
    Exercise(
        "fp8.3", "quantize", 2,
        "Round x to E4M3 by tiles. A cast would make inf 448, and nobody would see the "
        "overflow: what is not finite becomes NaN, alone. Other ranks may hold a part of the "
        "tiles, and then amax is given.",
        ("Each scale belongs to all numbers of its tile. In which dimensions of what `tiled` "
         "gives does it have to be spread?",
         "Divide what `tiled` gives by scales[:, None, :, None], and lay it out as x with "
         "`untiled`. Cast float32 to E4M3, not another dtype."),
        (Same(rounded_by_scales, "with scales of its own, 5 rows of 300 in tiles of 1 x 128",
              ((1, 128), 5, 300)),
         Same(rounded_by_scales, "the same, (130, 200) in tiles of 128 x 128",
              ((128, 128), 130, 200)),
         Same(quantized_rows, "5 rows of 300 in tiles of 1 x 128"),
         Same(quantized_by_given_amax, "with an amax that is given, and no powers of two"),
         Same(quantized_inf_and_nan, "1, inf, -3 and NaN, which is shown as 1000")),
    ),
    Exercise(
        "fp8.4", "Linear8.backward", 3,
        "Two more products, in FP8: dx sums over the outputs, and dw over the tokens. Each "
        "factor has its scales along what is summed over. x is there in FP8, as it was kept, "
        "and serves all weights.",
        ("Which factor of which product has to be turned around? The rows of a Quantized are "
         "what stays, and its columns what is summed over.",
         "dx = product(dy8, weight_turned(w)) and dw = product(dy8 turned, x8 turned). "
         "both_ways gives dy as it is and turned, turned_around turns x. dx adds up over the "
         "weights, and has the shape of x."),
        (Same(gradients_of_float32, "dx, dw and dv in float32, by tile"),
         *(Same(gradients_of_linears, f"dx, dw and dv, by {scaling}", (scaling,))
           for scaling in ("tile", "row", "tensor"))),
    ),
    Exercise(
        "fp8.5", "hopper_product", 3,
        "Add as Hopper does. Of the sum so far and 32 products, what is below `bits` bits of "
        "the largest is cut off, and then they are added. Every `promote` of k the sum is "
        "multiplied with its scales, goes to fp32 and starts again; None: only in the end.",
        ("What is the value of the last bit that stays, if the largest number is m · 2^e with "
         "m from 0.5 up to 1?",
         "It is 2^(e - bits): divide by it, trunc, multiply by it, and sum. Scales are those "
         "of any of the 128, such as the first of these 32."),
        (Same(product_of_given, "400 products of values that are given, every 128 promoted",
              (400, 128, 14)),
         Same(product_of_given, "256 products with 6 bits, every 64 promoted", (256, 64, 6)),
         Same(product_promoted_in_the_end, "512 products, promoted in the end"),
         Same(product_promoted_every_128, "512 products, every 128 promoted"),
         Same(product_with_6_bits, "100 products with 6 bits")),
    ),
]
