"""The figure of chapter 04: who holds which part."""

from lab.drawing import new_figure, runs_of

OF = "04_tensor_parallel"


def draw(runs):
    """Which rank holds which part of each matrix."""
    *_, run = runs_of(runs, OF).values()
    figure, axes = new_figure(9, 3.6)
    draw_parts(axes, run["recorded"]["shards"])
    return figure


def draw_parts(axes, shards):
    """shards: for each rank {name: [full shape, [[dim, index, parts], ...]]}; equal parts of
    several ranks bear all their numbers."""
    from matplotlib.patches import Rectangle

    scale, x, tallest = 1 / max(max(shape) for shape, _ in shards[0].values()), 0.0, 0.0
    for name, (shape, _) in shards[0].items():
        height, width = (scale * size for size in shape)
        for rank, held in enumerate(shards):
            cuts = held[name][1]
            low, size = [0.0, 0.0], [height, width]
            for dim, index, count in cuts:
                size[dim] /= count
                low[dim] = index * size[dim]
            axes.add_patch(Rectangle((x + low[1], low[0]), size[1], size[0], edgecolor="white",
                                     facecolor=f"C{rank % 10}", linewidth=0.5))
            holders = [r for r, other in enumerate(shards) if other[name][1] == cuts]
            if rank == holders[0]:
                axes.text(x + low[1] + size[1] / 2, low[0] + size[0] / 2,
                          ",".join(map(str, holders)), ha="center", va="center", fontsize=5,
                          color="white", rotation=90 if size[1] < 0.06 else 0)
        axes.text(x + width / 2, -0.02, name, ha="center", va="bottom", fontsize=8)
        x, tallest = x + width + 0.08, max(tallest, height)
    axes.set_xlim(-0.02, x)
    axes.set_ylim(tallest + 0.02, -0.08)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title("weights (out, in) and the ranks that hold each part")
