"""Checks of the exercises of kernels/fp8.py."""

from unittest import mock

import torch

from lab.chapters.checking import random


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

    def scales_of(amax, powers):
        return amax / (3 if powers else 7)

    def amax_of(x, tile):
        return chapter.tiled(x.float().square() + 1, tile).sum((1, 3))

    with mock.patch.multiple(chapter, scales_of=scales_of, amax_of=amax_of):
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
