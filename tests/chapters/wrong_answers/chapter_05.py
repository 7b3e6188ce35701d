"""Wrong answers to the exercises of chapter 05."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "05.1": [
        Wrong("reduce_scatter(gradient, ctx.group)",
              "gradient.chunk(ctx.group.size(), dim=1)[ctx.group.rank()]", "of block2.norm2, are"),
        Wrong("all_gather(gradient, ctx.group)",
              "all_gather(gradient, ctx.group) / ctx.group.size()",
              "of block2.mlp.down, are 1/4 of those of one GPU: 4 is the number of ranks"),
    ],
    "05.2": [
        Wrong("return scattering.wait()",
              "return dx.chunk(ctx.group.size(), dim=1)[ctx.group.rank()]",
              "of block2.norm2, are"),
        Wrong("dx += gradient @ weight", "dx = gradient @ weight", "of block2.norm1, are"),
    ],
    "05.3": [
        Wrong("""(rank - hop) % t, chunk
        chunk = arriving.wait()
    yield (rank + 1) % t""", """(rank + hop) % t, chunk
        chunk = arriving.wait()
    yield (rank - 1) % t""", "look at forward first"),
        Wrong("yield (rank + 1) % t", "yield (rank - 1) % t", "RingColumns.forward"),
        Wrong("chunk = arriving.wait()", "arriving.wait()", "look at forward first"),
    ],
    "05.4": [
        Wrong("part_of((rank - 1) % t)", "part_of(rank)",
              "of sums over the ranks in which the next rank's part is of its own chunk"),
        Wrong("total += arriving.wait()", "arriving.wait()",
              "of sums over the ranks of which each rank has its own part alone"),
    ],
    "05.5": [
        Wrong("total.addmm_(", "total = torch.addmm(total,",
              "gradients of q, k, v and up are zero, all others equal"),
        Wrong("in ring_gather(x, ctx.group):", "in [(ctx.group.rank(), x)]:",
              "gradients of q, k, v and up are off"),
    ],
    "05.6": [
        Wrong("        in_full += block.norm1, block.norm2\n", "",
              "gradients of the LayerNorms of block1 and block2 differ between ranks"),
        Wrong("for p in module.parameters():", "for p in [module.weight]:",
              "gradients of the LayerNorms' biases differ between ranks"),
    ],
    "05.7": [Wrong('1 if variant == "kept" else 1 / t', "1", "inputs is 1, and should be 0.25")],
    "05.8": [
        Wrong('2 * blocks if variant == "ring" else blocks', "2 * blocks", "reduce_scatter"),
        Wrong("payload += of_kv * (sums or e)", "payload += of_kv * e", "all_reduce"),
    ],
}
