"""lab/pictures.py: each figure from the JSON of runs, with what was measured in its place."""

import json
import math

import pytest
from conftest import TEXT, chapter, run_main

from lab import pictures

SMALL = ("--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--batch=4")
RUNS = {  # of each figure: chapter, ranks, and the variants that it compares
    "01_single_gpu": [("01_single_gpu", 1, "hand")],
    "02_data_parallel": [("02_data_parallel", 2, v) for v in ("naive", "overlap", "bucket")],
    "03_zero": [("03_zero", 2, v) for v in ("zero1", "zero2", "zero3")],
    "04_tensor_parallel": [("04_tensor_parallel", 4, "megatron")],
    "05_sequence_parallel": [("04_tensor_parallel", 4, "megatron"),
                             ("05_sequence_parallel", 4, "kept"),
                             ("05_sequence_parallel", 4, "megatron")],
    "06_context_parallel": [("06_context_parallel", 4, v) for v in ("ring", "zigzag")],
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(pool, tmp_path_factory):
    """recorded(figure): the JSON of its runs; each is run once."""
    known = {}

    def runs(figure):
        for name, world, variant in RUNS[figure]:
            chapter(name)  # or skip
            if (name, variant) not in known:
                flags = (*SMALL, "--steps=3", f"--data={TEXT}", f"--variant={variant}")
                folder = tmp_path_factory.mktemp("run")
                (_, run, output), *_ = pool.call(world, 60, run_main, name, flags, folder)
                assert run, output
                known[name, variant] = run
        return [known[name, variant] for name, _, variant in RUNS[figure]]

    return runs


@pytest.mark.parametrize("figure", RUNS)
def test_each_figure_is_drawn_from_json(recorded, tmp_path, capsys, figure):
    for i, run in enumerate(recorded(figure)):
        (tmp_path / f"{i}.json").write_text(json.dumps(run))
    pictures.main([*map(str, tmp_path.glob("*.json")), f"--out={tmp_path}/new"])
    png = tmp_path / "new" / f"{figure}.png"
    assert png.read_bytes().startswith(b"\x89PNG") and str(png) in capsys.readouterr().out


def texts(figure):
    """All that is written in a figure."""
    import matplotlib.text

    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_memory_stacks_what_was_recorded():
    columns = [[0, 1], [1e6, 1e6], [2e6, 2e6], [3e6, 3e6], [4e6, 4e6]]
    config = {"precision": "fp32", "dtype": "float64", "attention": "plain", "recompute": "none"}
    run = {"chapter": "01_single_gpu", "variant": "hand", "config": config, "device": "cpu",
           "recorded": {"memory": columns}}  # fmt: skip
    [axes] = pictures.memory([run]).axes
    tops = {c.get_label().split(",")[0]: c.get_paths()[0].vertices[:, 1].max()
            for c in axes.collections}  # fmt: skip
    assert "(float64, attention plain" in axes.get_title()  # fp32 is 01's word for --dtype
    assert tops == {"parameters": 1, "optimizer states": 4, "gradients": 6, "activations": 10}
    assert axes.get_xlabel() == "time in operators (ms)"
    [axes] = pictures.memory([run | {"device": "cuda:0"}]).axes  # where nobody waits for their end
    assert axes.get_xlabel() == "time to launch operators (ms)"


def test_overlap_has_a_row_for_each_variant_in_order(recorded):
    runs = recorded("02_data_parallel")
    figure = pictures.overlap(runs[::-1])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.split(":")[0] for title in titles] == ["naive", "overlap", "bucket"]
    assert titles[0].split(": ")[1].startswith("24 all_reduces, 0% of their time hidden")
    single = pictures.overlap(runs[:1])
    assert len(single.axes) == 1 and "Rank 0 of 2, cpu" in texts(single)


def test_lanes_do_not_overlap():
    assert pictures.lanes([(0, 2), (1, 3), (2, 4), (2.5, 5), (3, 4)]) == [0, 1, 0, 2, 1]


def test_measured_bytes_stand_at_their_number_of_ranks(recorded):
    runs = recorded("03_zero")
    seven_b, _ = pictures.bytes_per_rank(runs).axes
    crosses = [line for line in seven_b.lines if line.get_marker() == "x"]
    parameters = pictures.config_of(runs[0]).parameters()
    for stage, (line, run) in enumerate(zip(crosses, runs), start=1):
        held = sum(pictures.held_bytes(run).values()) / parameters
        x, y = line.get_xydata()[0]
        assert x == pytest.approx(math.log2(2) + 0.2 * (stage - 1.5))
        assert y == pytest.approx(held * pictures.LARGE["7B"].parameters() / 1e9)
    assert len(crosses) == 3 and held < 9  # zero3 on two ranks: about half of 16 bytes


def test_each_part_of_a_matrix_bears_the_ranks_that_hold_it(recorded):
    """Four ranks, two kv heads: neighbours share k and v."""
    written = texts(pictures.parts_of_matrices(recorded("04_tensor_parallel")))
    assert written.count("0,1") == written.count("2,3") == 2
    assert all(written.count(str(rank)) >= 6 for rank in range(4)) and "mlp.down" in written


def test_what_is_cut_along_the_sequence_is_drawn_so(recorded):
    left, right = pictures.along_the_sequence(recorded("05_sequence_parallel")).axes
    drawn = [(p.get_width(), p.get_height()) for p in left.patches[1::2]]  # after each full one
    rows = [drawn[i : i + 6] for i in range(0, len(drawn), 6)]
    assert len(rows) == 3
    for row, outside in zip(rows, (1, 1 / 4, 1 / 4)):
        assert [height for _, height in row] == [outside, 1, outside, outside, 1, outside]
        assert [width for width, _ in row] == [0.5, 0.5 / 4, 0.5, 0.5, 2 / 4, 0.5]
    labels = [line.get_label() for line in right.lines]
    assert labels[-3:] == [f"measured: {x}" for x in ("04 megatron", "05 kept", "05 megatron")]
    kept = [line.get_ydata()[0] for line in right.lines[-3:]]
    assert kept[0] > kept[1] > kept[2]


def test_who_computes_which_block_is_drawn_as_the_lesson_has_it(recorded):
    """The rows of the docstring's two triangles, hop by hop; and what each rank has computed."""
    figure = pictures.who_computes(recorded("06_context_parallel"))
    for axes, rows in ((figure.axes[0], ["0", "00", "110", "1100", "22110", "221100"]),
                       (figure.axes[1], ["0", "10", "210", "3210", "32100", "210330"])):
        hops = {text.get_position(): text.get_text() for text in axes.texts}
        for row, expected in enumerate(rows):
            written = [hops.get((column + 0.5, row + 0.5)) for column in range(8)]
            assert "".join(filter(None, written)) == expected
    heights = [bar.get_height() for bar in figure.axes[2].patches]
    ring, zigzag = heights[:4], heights[4:]
    assert ring == pytest.approx([ring[0] * (rank + 1) for rank in range(4)])
    assert len(set(zigzag)) == 1 and sum(zigzag) == pytest.approx(sum(ring))


def test_a_run_draws_its_own_figure(run_chapter, tmp_path):
    chapter("01_single_gpu")
    flags = (*SMALL, "--steps=3", f"--data={TEXT}", "--plot=a/memory.png")
    assert run_chapter("01_single_gpu", *flags)[0] == 0
    assert (tmp_path / "a/memory.png").read_bytes().startswith(b"\x89PNG")
