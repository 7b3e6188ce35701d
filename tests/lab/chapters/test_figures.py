"""lab/chapters/*/figure.py: what was measured is in its place."""

import math

import pytest

from lab import drawing, schedules
from lab.chapters import rooms_with
from lab.run.words import quantity
from tests.conftest import chapter, sample

FIGURE = rooms_with("figure")


def above(figure):
    """The axes above those that show what hides behind what, which test_drawing.py is about."""
    return figure.subfigs[0].axes


def messages_of(n):
    """What chapter 00's run records: a broadcast and a ring all_reduce on n ranks."""
    tree = [[[0, 1, 8]], [[0, 2, 8], [1, 3, 8]]] if n == 4 else [[[0, 1, 8]], [[0, 2, 8]]]
    ring = [[[rank, (rank + 1) % n, 8] for rank in range(n)] for _ in range(2 * (n - 1))]
    return {"broadcast": tree, "all_reduce_ring": ring}


def run_of_collectives(n, messages=None):
    chapter("00_collectives")
    return {"chapter": "00_collectives", "variant": "collectives", "world_size": n,
            "recorded": {"messages": messages or messages_of(n)}}  # fmt: skip


@pytest.mark.parametrize("n", sample([4, 3]))
def test_collectives_are_drawn_round_by_round(n):
    figure = FIGURE["00"].draw([run_of_collectives(n)])
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert len(images) == 2 * (n - 1) + 1
    assert (images[0] == 1).all() and (images[-1] == n).all()
    assert [images[n - 1][rank, rank] for rank in range(n)] == [n] * n  # each has its part's sum
    for i, axes in enumerate([axes for axes in figure.axes if axes.images][1:], start=1):
        corners = [box.get_xy() for box in axes.patches]  # around what has just come
        assert sorted((y + 0.5, x + 0.5) for x, y in corners) == [
            (rank, (rank - 1 - i) % n) for rank in range(n)]
        arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None)]
        assert len(arrows) == n and all(text.xyann[0] == text.xy[0] for text in arrows)
        numbers = [int(text.get_text()) for text in axes.texts if text.get_text()]
        assert numbers == images[i].astype(int).flatten().tolist()
    with pytest.raises(ValueError, match="broadcast"):
        FIGURE["00"].draw([run_of_collectives(n, messages_of(n) | {"broadcast": []})])


def test_memory_stacks_what_was_recorded():
    columns = [[0, 1], [1e6, 1e6], [2e6, 2e6], [3e6, 3e6], [4e6, 4e6]]
    config = {"precision": "fp32", "dtype": "float64", "attention": "plain", "recompute": "none"}
    run = {"chapter": "01_single_gpu", "variant": "hand", "config": config, "device": "cpu",
           "recorded": {"memory": columns}}  # fmt: skip
    [axes] = FIGURE["01"].draw([run]).axes
    tops = {c.get_label().split(",")[0]: c.get_paths()[0].vertices[:, 1].max()
            for c in axes.collections}  # fmt: skip
    assert tops == {"parameters": 1, "optimizer states": 4, "gradients": 6, "activations": 10}


@pytest.mark.full
def test_overlap_has_a_row_for_each_variant_in_order(recorded):
    runs = recorded("02_data_parallel")
    figure = FIGURE["02"].draw(runs[::-1])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.split(":")[0] for title in titles] == ["naive", "overlap", "bucket"]
    shares = [float(title.split("all_reduces, ")[1].split("%")[0]) for title in titles]
    assert 0 == shares[0] < shares[1] and titles[0].startswith("naive: 24 all_reduces, ")
    single = FIGURE["02"].draw(runs[:1])
    [ticks] = [lines for lines in single.axes[0].collections if hasattr(lines, "get_segments")]
    ready = [1e3 * t for t in runs[0]["recorded"]["timeline"]["gradients"]]
    assert [start[0] for start, _ in ticks.get_segments()] == pytest.approx(ready)


@pytest.mark.full
def test_measured_bytes_stand_at_their_number_of_ranks(recorded):
    runs = recorded("03_zero")
    seven_b, _ = above(FIGURE["03"].draw(runs))
    crosses = [line for line in seven_b.lines if line.get_marker() == "x"]
    parameters = drawing.config_of(runs[0]).parameters()
    for stage, (line, run) in enumerate(zip(crosses, runs), start=1):
        held = sum(FIGURE["03"].held_bytes(run).values()) / parameters
        x, y = line.get_xydata()[0]
        assert x == pytest.approx(math.log2(2) + 0.2 * (stage - 1.5))
        assert y == pytest.approx(held * FIGURE["03"].LARGE["7B"].parameters() / 1e9)
    assert len(crosses) == 3 and held < 9  # zero3 on two ranks: about half of 16 bytes


@pytest.mark.full
def test_each_part_of_a_matrix_bears_the_ranks_that_hold_it(recorded):
    """Four ranks, two kv heads: neighbours share k and v."""
    import matplotlib.text

    figure = FIGURE["04"].draw(recorded("04_tensor_parallel"))
    written = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
    assert written.count("0,1") == written.count("2,3") == 2
    assert all(written.count(str(rank)) >= 6 for rank in range(4)) and "mlp.down" in written


@pytest.mark.full
def test_what_is_cut_along_the_sequence_is_drawn_so(recorded):
    [axes] = above(FIGURE["05"].draw(recorded("05_sequence_parallel")))
    drawn = [(p.get_width(), p.get_height()) for p in axes.patches[1::2]]  # after each full one
    rows = [drawn[i : i + 6] for i in range(0, len(drawn), 6)]
    assert len(rows) == 3
    for row, outside in zip(rows, (1, 1 / 4, 1 / 4)):
        assert [height for _, height in row] == [outside, 1, outside, outside, 1, outside]
        assert [width for width, _ in row] == [0.5, 0.5 / 4, 0.5, 0.5, 2 / 4, 0.5]


@pytest.mark.full
def test_who_computes_which_block_is_drawn_as_the_lesson_has_it(recorded):
    """The rows of the docstring's two triangles, hop by hop; and what each rank has computed."""
    figure = FIGURE["06"].draw(recorded("06_context_parallel"))
    ring, zigzag, flops = above(figure)
    for axes, rows in ((ring, ["0", "00", "110", "1100", "22110", "221100"]),
                       (zigzag, ["0", "10", "210", "3210", "32100", "210330"])):
        hops = {text.get_position(): text.get_text() for text in axes.texts}
        for row, expected in enumerate(rows):
            written = [hops.get((column, row)) for column in range(8)]
            assert "".join(filter(None, written)) == expected
    heights = [bar.get_height() for bar in flops.patches]
    ring, zigzag = heights[:4], heights[4:]
    assert ring == pytest.approx([ring[0] * (rank + 1) for rank in range(4)])
    assert zigzag == pytest.approx([ring[0] * 9 / 4] * 4)  # 7 chunks by a chunk, and 2 diagonals


def test_the_pairs_of_documents_have_the_color_of_their_rank():
    """Two documents, of three tokens and of one; rank 1 has the middle of the sequence."""
    import matplotlib

    _, axes = drawing.new_figure(2, 2)
    FIGURE["06"].draw_matrix(axes, [[0, 3], [1, 2]], [0, 0, 0, 3])
    zero, one = matplotlib.colormaps["tab10"].colors[:2]
    none = (1, 1, 1)
    expected = [[zero, none, none, none], [one, one, none, none], [one, one, one, none],
                [none, none, none, zero]]
    [image] = axes.images
    assert image.get_array().tolist() == [[pytest.approx(list(color)) for color in row]
                                          for row in expected]


def boxes_of(axes):
    """{rank: [(start, end, color)]}, without the grey one of a rank that has nothing to do."""
    from matplotlib.colors import to_hex

    ticks = [int(tick.get_text().split()[-1]) for tick in axes.get_yticklabels()]
    found = {rank: [] for rank in ticks}
    for box in axes.patches:
        [rank] = [rank for y, rank in enumerate(ticks)
                  if box.get_y() < y < box.get_y() + box.get_height()]
        if to_hex(box.get_facecolor()) != FIGURE["07"].IDLE:
            start = box.get_x()
            found[rank].append((start, start + box.get_width(), to_hex(box.get_facecolor())))
    return found


@pytest.mark.full
@pytest.mark.parametrize("variant", ["1f1b", "interleaved", "zb-h1"])
def test_each_action_of_a_schedule_is_a_box_from_its_start_to_its_end(variant):
    """Simulated, and executed, whose times are in seconds."""
    schedule = chapter("07_pipeline_parallel").make_schedule(variant, 4, 8, v=2)
    span = schedules.simulate(schedule)
    simulated = [[[*a, *span[a]] for a in actions] for actions in schedule.actions]
    times = [[[*a, 1e-3 * start, 1e-3 * end, 1e6 * i] for i, (*a, start, end) in enumerate(of_rank)]
             for of_rank in simulated]
    run = {"chapter": "07_pipeline_parallel", "variant": variant, "device": "cpu",
           "config": {"chunks": 2, "breadth_first": False},
           "recorded": {"simulated": simulated, "executed": times}}
    *drawn, kept = FIGURE["07"].draw([run]).axes
    assert len(drawn) == 2
    for axes in drawn:
        for rank, boxes in boxes_of(axes).items():
            actions = [(action[-2:], FIGURE["07"].ACTIONS[action[0]][0])
                       for action in simulated[rank]]
            assert len(boxes) == len(actions)
            for (start, end, color), (times, expected) in zip(boxes, actions):
                assert [start, end] == pytest.approx(times)
                assert color == expected or variant != "1f1b"  # lighter ones of a second chunk
    for line, of_rank in zip(kept.lines, simulated, strict=True):
        assert list(line.get_xdata()) == pytest.approx([end for *_, end in of_rank])
        assert list(line.get_ydata()) == [*range(len(of_rank))]


def written(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.full
def test_the_mesh_is_drawn_as_recorded(recorded):
    """Ranks and places in cells, a link for each pair, and what is sent along them."""
    from matplotlib.colors import to_hex
    from matplotlib.patches import FancyArrowPatch

    dense, mixture = recorded("09_5d")
    panels = above(FIGURE["09"].draw([mixture, dense]))  # row by row; the dense one is on the left
    places = [["pp 0", "tp 0"], ["pp 0", "tp 1"], ["pp 1", "tp 0"], ["pp 1", "tp 1"]]
    cells = [[str(rank), *place, f"machine {rank // 2}"] for rank, place in enumerate(places)]
    assert written(panels[0]) == [word for cell in cells for word in cell]
    assert written(panels[1])[-5:] == ["3", "dp 1", "tp 1", "ep 1", "machine 0"]

    colors = {color.lower(): axis for axis, color in FIGURE["09"].AXES.items()}
    of_mixture = [f"{axis} solid" for axis in ("dp", "ep", "tp") for _ in (0, 1)]
    for axes, expected in ((panels[0], ["pp dashed"] * 2 + ["tp solid"] * 2),
                           (panels[1], of_mixture)):
        links = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
        drawn = [f"{colors[to_hex(link.get_edgecolor())]} "
                 f"{'solid' if link.get_linestyle() == '-' else 'dashed'}" for link in links]
        assert sorted(drawn) == expected

    for axes, run in zip(panels[2:], (dense, mixture)):
        sent = {name: on for name, on in run["recorded"]["axes"].items() if on["total"]}
        assert written(axes)[::3] == list(sent)
        assert written(axes)[1::3] == [quantity(round(on["total"] / 4)) for on in sent.values()]
        for text, on in zip(written(axes)[2::3], sent.values()):
            assert ("between machines" if on["leaves"] else "inside a machine") in text


@pytest.mark.full
def test_faults_are_drawn_where_they_fell():
    """Killed after step 3, of which step 2 was saved, and after step 4, which was saved: step 3 is
    lost once."""
    start = lambda seconds, steps: {"seconds": seconds, "steps": steps,
                                    "losses": [9 - step for step in steps]}
    quiet = {"every": 2, "kills": [], "starts": [start([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])]}
    faulty = {"every": 2, "kills": [4.5, 13], "starts": [
        start([2, 3, 4], [1, 2, 3]), start([11, 12], [3, 4]), start([20, 21], [5, 6])]}
    run = {"chapter": "faults", "variant": "", "recorded": {"quiet": quiet, "faulty": faulty}}
    over_time, over_steps = FIGURE["checkpoints"].draw([run]).axes
    lines = {}
    for line in over_time.lines:
        name = line.get_label() if line.get_label()[0] != "_" else line.get_color()
        lines.setdefault(name, []).append(line.get_xydata().tolist())
    assert lines["the quiet run"] == [[[t, 9 - t] for t in range(1, 7)]]
    assert lines["the run with faults"] == [[[2, 8], [3, 7]]]
    assert [[[11, 6], [12, 5]], [[20, 4], [21, 3]]] == lines[drawing.BLUE]
    assert lines["steps that were lost, and computed again"] == [[[3, 7], [4, 6]]]
    assert lines["a rank is killed"] == [[[4.5, 6]]]
    assert [[13, 5]] in lines[drawing.RED]
    assert [line.get_xydata().tolist() for line in over_steps.lines[1:]] == [
        [[1, 8], [2, 7]], [[3, 6], [4, 5]], [[5, 4], [6, 3]]]
