"""What a rank keeps under ZeRO: the bytes are chapter 03's."""

from lab.site import memory
from tests.conftest import chapter


def test_bytes_are_the_chapters():
    held, stages = chapter("03_zero").held, chapter("03_zero").STAGES
    for precision in memory.PRECISIONS:
        told = memory.memory({"billions": "0.5", "ranks": "6", "precision": precision})
        assert told["whole"] == held(5e8, 1, 1, precision)
        for one in told["stages"]:
            assert one["kept"] == (held(5e8, stages[one["name"]], 6, precision)
                                   if one["name"] in stages else told["whole"])


def test_the_fewest_ranks_that_fit():
    for billions in (7, 1000):
        told = memory.memory({"billions": str(billions), "ranks": "1"})
        for stage, (cluster, room) in ((stage, one) for stage in memory.STAGES
                                       for one in told["rooms"].items()):
            n = next(one for one in told["stages"] if one["name"] == stage)["least"][cluster]
            last = n or memory.RANKS
            bytes_on = {ranks: sum(memory.kept(billions * 1e9, stage, ranks, "fp32"))
                        for ranks in (last - 1, last) if ranks}
            assert (bytes_on[last] <= room) == (n is not None)
            assert last == 1 or bytes_on[last - 1] > room
