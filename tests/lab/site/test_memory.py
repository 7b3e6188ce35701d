"""What a rank keeps under ZeRO: the bytes are chapter 03's."""

from lab.site import memory
from tests.conftest import chapter


def test_bytes_are_the_chapters():
    held, stages = chapter("03_zero").held, chapter("03_zero").STAGES
    for precision in memory.VALUES["precision"]:
        answer = memory.memory(0.5, 6, precision)
        assert answer["whole"] == held(5e8, 1, 1, precision)
        for one in answer["stages"]:
            is_split = one["name"] in stages
            expected = held(5e8, stages[one["name"]], 6, precision) if is_split else answer["whole"]
            assert one["kept"] == expected


def test_the_fewest_ranks_that_fit():
    for billions in (7, 1000):
        answer = memory.memory(billions, 1, "fp32")
        for stage in answer["stages"]:
            for cluster, room in answer["rooms"].items():
                n = stage["least"][cluster]
                last = n or memory.RANKS
                of = [sum(memory.kept(billions * 1e9, stage["name"], ranks, "fp32"))
                      for ranks in (last, last - 1) if ranks]
                assert (of[0] <= room) == (n is not None)
                assert last == 1 or of[1] > room
