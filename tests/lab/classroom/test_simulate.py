"""Chapter 00's collectives in one process: what is said of them, and that it is what a run does."""

import pytest
import torch

from lab.bench import collectives
from lab.classroom import simulate
from tests.conftest import broken, chapter


@pytest.fixture
def chapter_00():
    return chapter("00_collectives")


def test_the_lessons_table_is_what_is_said(chapter_00):
    """Of three ranks with a, b and c."""
    table = chapter_00.__doc__.split("broadcast  ")[1].split("barrier")[0].splitlines()
    rows = {line.split()[0]: line.split("  ") for line in ["broadcast  " + table[0], *table[1:]]
            if line.strip()}
    assert len(rows) == 8
    for name, cells in rows.items():
        by_hand = getattr(chapter_00, "all_reduce_ring" if name == "all_reduce" else name)
        given = chapter_00.given if name in ("reduce", "reduce_scatter", "scatter") else None
        found = simulate.has(by_hand, (3, 6), given=given)
        has = [found[f"what rank {rank} of 3 returns"] for rank in range(3)]
        has = [x if x != "nothing" else found[f"x of rank {rank} of 3"]
               for rank, x in enumerate(has)]
        cells = [cell.strip() for cell in cells if cell.strip()][1:4]
        whole = {"a": "a0 a1 a2", "a+b+c": "a0+b0+c0 a1+b1+c1 a2+b2+c2", ".": ". . ."}
        expected = [whole.get(cell, cell) for cell in cells]
        if name in ("scatter", "reduce_scatter"):       # the table leaves out what is not given
            has = [" ".join(part for part in row.split() if part != ".") for row in has]
        if name == "gather":
            has, expected = has[:1], expected[:1]
        assert has == expected, name


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_rounds_and_bytes_are_those_of_the_chapters_formulas(n, chapter_00):
    """And the rounds of the ranks, in the order in which a run would have them."""
    for name, by_hand in chapter_00.BY_HAND.items():
        tensors = [torch.zeros(2 * n)] * n
        *_, nets, passed = simulate.play(by_hand, tensors)
        costs = simulate.costs("", nets, passed).values()
        assert tuple(costs) == (len(chapter_00.round_bytes(name, n, 8 * n)),
                                chapter_00.sent(name, n, 8 * n)), name
        assert passed == len(collectives.in_rounds([net.rounds for net in nets]))


def test_a_deadlock_is_named_with_who_waits_for_whom(chapter_00):
    with pytest.raises(simulate.Deadlock, match="rank 0 waits for rank 1 to receive, rank 1 waits "
                                                "for rank 0 to receive$"):
        simulate.has(chapter_00.deadlock, (2, 2))

    def skip(net, x):
        if net.rank < 2:
            chapter_00.all_gather(net, x)

    with pytest.raises(simulate.Deadlock, match="rank 0 waits for rank 2 to send, rank 1 waits for "
                                                "rank 2 to receive$"):
        simulate.has(skip, (3, 3))


@pytest.mark.parametrize(("wrong", "words"), [
    ({"send": torch.ones(2), "to": 0}, "rank 0 of 2 sends to rank 0"),
    ({"send": torch.ones(2), "to": 2}, "rank 0 of 2 sends to rank 2"),
    ({"receive": torch.ones(2), "source": -1}, "rank 0 of 2 receives from rank -1"),
])
def test_a_rank_that_is_not_there_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        simulate.has(lambda net, x: net.exchange(**wrong), (2, 2))


def test_sizes_that_differ_are_refused_and_no_rank_sees_what_is_not_sent_to_it():
    def half(net, x):
        if net.rank == 0:
            net.exchange(send=x, to=1)
        else:
            net.exchange(receive=x[:1], source=0)

    with pytest.raises(ValueError, match="rank 0 sends 16 bytes, and rank 1 receives 8"):
        simulate.has(half, (2, 2))


def test_what_is_sent_is_what_it_was_when_it_was_sent(chapter_00):
    """And a student who catches every exception does not see how a rank is left."""
    def changes(net, x):
        try:
            chapter_00.broadcast(net, x)
        except Exception:
            return
        if net.rank == 0:
            x.zero_()

    found = simulate.has(changes, (2, 2))
    assert found["x of rank 0 of 2"] == "0 0" and found["x of rank 1 of 2"] == "a0 a1"


def test_sums_parts_that_differ_and_what_nobody_wrote_are_said():
    letters = simulate.Letters(3)
    a, b = letters.tensor(0, 7), letters.tensor(1, 7)
    assert letters.row(a, a) == "a0 a1 a2" and letters.row(a, a[3:5]) == ". a1 ."
    a += 2 * b
    assert letters.row(a, a) == "a0+2·b0 a1+2·b1 a2+2·b2"
    a[1:3] = letters.tensor(2, 7)[1:3]
    assert letters.row(a, a) == "a0+2·b0 | c0 a1+2·b1 a2+2·b2"
    with simulate.unwritten_is_seen():
        assert letters.row(b + torch.empty_like(a), b[:0]) == ". . ."
        x = torch.empty_like(a)
        assert letters.row(x, x) == " ".join(3 * ["unwritten"])
    assert not torch.are_deterministic_algorithms_enabled()
    assert letters.of_number(0) == "0" and letters.of_number(-1) == "unwritten"
    x = letters.tensor(0, 0)
    assert letters.row(x, x) == ""


def test_of_whom_a_rank_has_heard_is_what_reached_it(chapter_00):
    found = simulate.hears(lambda net, x: chapter_00.reduce(net, x), 3)
    heard = [found[f"what rank {rank} of 3 has heard of"] for rank in range(3)]
    assert heard == ["0 1 2", "1", "2"]


def test_the_first_rank_that_has_something_else_is_named(chapter_00):
    for name, by_hand in chapter_00.BY_HAND.items():
        if name != "barrier":
            assert simulate.what_is_wrong(by_hand, collectives.as_one) == "", name

    def wrong(name, line, other):
        module = broken("00_collectives", line, other)
        return simulate.what_is_wrong(getattr(module, name), collectives.as_one)

    hop = "send=parts[(net.rank - hop) % net.ranks], to=net.right,\n"
    hop += "                     receive=parts[(net.left"
    assert wrong("all_gather", hop, hop.replace(" - hop", "")) == (
        "on 3 ranks, rank 0 has 'a0 c2 c2', and should have 'a0 b1 c2'")
    line = "receive=parts[net.rank], source=0"
    assert wrong("scatter", line, "receive=parts[0], source=0") == (
        "on 3 ranks, rank 1 has '0 b1 0', and should have '0 a1 0'")
    assert wrong("scatter", line, "receive=x, source=0") == (
        "on 3 ranks, ValueError: rank 0 sends 8 bytes, and rank 1 receives 24")


DOUBLING = """        have = 2**k
        if net.rank < have and net.rank + have < net.ranks:
            net.exchange(send=x, to=net.rank + have)
        elif have <= net.rank < 2 * have:
            net.exchange(receive=x, source=net.rank - have)


def reduce("""
FROM_AFAR = """        far = 2 ** ((net.ranks - 1).bit_length() - 1 - k)
        if net.rank % (2 * far) == 0 and net.rank + far < net.ranks:
            net.exchange(x, net.rank + far)
        if net.rank % (2 * far) == far:
            net.exchange(receive=x, source=net.rank - far)
    return x


def reduce("""
TO_THE_RIGHT = """net.exchange(send=parts[(net.rank - hop) % net.ranks], to=net.right,
                     receive=parts[(net.left - hop) % net.ranks], source=net.left)


def reduce_scatter"""
TO_THE_LEFT = """net.exchange(parts[(net.rank + hop) % net.ranks], net.left,
                     parts[(net.right + hop) % net.ranks], net.right)


def reduce_scatter"""


@pytest.mark.parametrize(("name", "ours", "other"), [
    ("broadcast", DOUBLING, FROM_AFAR), ("all_gather", TO_THE_RIGHT, TO_THE_LEFT)])
def test_another_way_with_as_many_rounds_and_bytes_is_right_too(name, ours, other, chapter_00):
    module = broken("00_collectives", ours, other)
    cases = (3, 6), (6, 6), (5, 3), (4, 6), (1, 2), (2, 0)
    assert simulate.has(getattr(module, name), *cases) == simulate.has(
        getattr(chapter_00, name), *cases)


ROUND = """\
        handles = dist.batch_isend_irecv(operations)    # gloo: one for each; NCCL: one for both
        for handle in handles:
            self.waits_for = words.pop(0) if len(handles) > 1 else " and ".join(words)
            handle.wait(timedelta(seconds=self.patience))
"""
ONE_BY_ONE = """        for handle in (dist.irecv(receive, group=self.group, group_src=source),
                       dist.isend(send, group=self.group, group_dst=to)):
            handle.wait()
"""
IN_TURN = """        dist.send(send, to)
        dist.recv(receive, source)
"""


def test_a_round_is_noted_whichever_calls_it_is_built_from():
    """And dist is what it was, afterwards."""
    found = []
    for body in ROUND, ONE_BY_ONE, IN_TURN:
        module = broken("00_collectives", ROUND, body)
        found.append(simulate.posts(module.Network, send=torch.ones(2), to=1,
                                    receive=torch.ones(2), source=2))
        assert module.dist is torch.distributed
    assert found[0] == found[1] and found[0]["begun before the first wait"] == 2
    assert found[2]["begun before the first wait"] == 1 and found[2]["isend"] == "rank 1 of all"
