"""Chapter 08's overlapped: two micro-batches take turns, in forward and, mirrored, in backward."""

import contextlib
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.chapters.test_04_tensor_parallel import FLOAT64
from tests.chapters.test_08_expert_parallel import EIGHT, eight, shared_out  # noqa: F401 (fixture)
from tests.conftest import chapter, hold_to_one_gpu, run_main


@pytest.mark.parametrize("flags", [
    "--ep=2 --batch=12 --optimizer=sgd --clip=0.1",  # an odd one at the end
    "--top-k=1 --batch=16 --block=llama --ffn=24 --shared-expert --recompute=selective",
])  # fmt: skip
def test_turns_go_from_layer_to_layer(ranks, tmp_path, flags):
    flags = (*FLOAT64, "--variant=overlapped", "--micro-batch=1", *flags.split())
    results = ranks(4)(run_main, EIGHT, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    assert "what is under way while the rank computes" in results[0][2]
    overlap = results[0][1]["recorded"]["overlap"]["all_to_all"]
    assert overlap["hidden"] > 0.02 and overlap["ratio"] > 0  # beside the lesson's condition


# ------------------------------------------------------------------------------- in which order


class Notes(TorchDispatchMode):
    """What happens: a matmul, or several in a row, is "computes"; ("start", 2) and ("wait", 2) are
    of the third all_to_all of rows that has started."""

    def __init__(self, eight):
        super().__init__()
        self.said, self.trips, self.eight = [], [], eight

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.said += ["computes"] * (self.said[-1:] != ["computes"])
        return func(*args, **kwargs or {})

    def note(self, what, under_way):
        if not any(under_way is trip for trip in self.trips):
            self.trips.append(under_way)
        [number] = [i for i, trip in enumerate(self.trips) if trip is under_way]
        self.said.append((what, number))

    @contextlib.contextmanager
    def of_trips(self):
        start = self.eight.start

        def noted_start(*args):
            self.note("start", args[-1])
            out = start(*args)
            handle, *rest = args[-1].pop()
            args[-1].append((SimpleNamespace(wait=partial(self.wait, handle, args[-1])), *rest))
            return out

        with mock.patch.object(self.eight, "start", noted_start), self:
            yield

    def wait(self, handle, under_way):
        self.note("wait", under_way)
        handle.wait()


def pair_of(rank):
    """Two micro-batches, other ones on each rank."""
    tokens = torch.randint(64, (2, 2, 8), generator=torch.Generator().manual_seed(rank))
    return [(x.clone(), x.clone()) for x in tokens]


def turns(layers):
    """What happens in the forward and in the backward of two micro-batches."""
    eight = chapter(EIGHT)
    cfg = eight.Mixture(layers, 16, 4, 4, 8, 64, sequences=8, balance_weight=0.01)
    model, said = shared_out(eight, cfg, eight.Overlapped), []
    with (notes := Notes(eight)).of_trips():
        pairs = pair_of(dist.get_rank())
        *_, losses = zip(*(eight.forward_in_turns(model, *pair) for pair in pairs))
        said.append(notes.said.copy())
        notes.said.clear()
        sum(losses).backward()
        said.append(notes.said)
    return said


def test_one_computes_while_the_rows_of_the_other_travel(ranks):
    """And backward does the same the other way round, in one order on all ranks."""
    layers, [(forward, backward), *others] = 2, ranks(2)(turns, 2)
    assert others == [[forward, backward]]
    trips = 4 * layers  # there and back, of both
    expected = ["computes", ("start", 0), "computes", ("start", 1)]
    for trip in range(2, trips):
        expected += [("wait", trip - 2), "computes", ("start", trip)]
    expected += [("wait", trips - 2), "computes", ("wait", trips - 1), "computes"]
    assert forward == expected
    other = {"start": "wait", "wait": "start"}
    assert backward == [what if what == "computes" else (other[what[0]], what[1])
                        for what in reversed(forward)]
    for first in range(trips - 1):  # nobody waits before the next one has started, and computed
        assert forward.index(("start", first + 1)) < forward.index(("wait", first))
        assert backward.index(("start", first)) < backward.index(("wait", first + 1))


# ------------------------------------------------------------------------------- what it costs


def kept_for_backward(model, micro_batches):
    """Bytes that autograd keeps when the forward of all of them has ended."""
    eight, storages = chapter(EIGHT), {}
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}

    def pack(x):
        storages[x.untyped_storage()._cdata] = x.untyped_storage()  # so that none is taken anew
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        *_, losses = zip(*(eight.forward_in_turns(model, *pair) for pair in micro_batches))
    return sum(kept.nbytes() for name, kept in storages.items() if name not in own)


def kept():
    eight = chapter(EIGHT)
    model = shared_out(eight, eight.Mixture(2, 16, 4, 4, 8, 64, sequences=8), eight.Overlapped)
    first, second = pair_of(dist.get_rank())
    kept_for_backward(model, [first])  # after which RoPE has its tables
    return [kept_for_backward(model, some) for some in ([first, second], [first], [second])]


def test_the_activations_of_both_are_alive(ranks):
    for both, *alone in ranks(2)(kept):
        tables = 2 * 8 * 2 * 8  # of RoPE, which both have: cos and sin, (8, 2), in float64
        assert both == sum(alone) - tables


def test_the_condition_is_of_what_travels_and_of_what_computes(eight):  # noqa: F811
    """Its FLOPs are those of a block's forward; its bytes a fourth of row_bytes for each way."""
    for more in ({}, {"gated": True, "ffn": 24, "shared_expert": True, "kv_heads": 2}):
        cfg = eight.Mixture(**{"layers": 1, "dim": 16, "heads": 4, "kv_heads": 4, "seq": 8,
                               "vocab": 64, "top_k": 3} | more)
        model, x = eight.mixture_gpt(cfg), torch.randn(2, 8, 16)
        with FlopCounterMode(display=False) as counter:
            model.block1(x)
        seconds = counter.get_total_flops() / 16 / 5e9  # of a token, at 5 GFLOP/s
        there_and_back = 2 * 3 * 16 * 2 * 3 / 4  # 3 rows of 16 numbers in bf16, 3/4 leave the rank
        assert eight.travel_over_compute(cfg, 4, 2, 5e9, 7e6) == pytest.approx(
            there_and_back / 7e6 / seconds)
    assert eight.travel_over_compute(cfg, 1, 2, 5e9, 7e6) == 0


def test_wide_experts_hide_what_narrow_ones_do_not(eight):  # noqa: F811
    """The lesson: the widths decide. OLMoE's and Mixtral 8x22B's, in bf16 on 8 H100s that send 50
    GB/s: the one sends nearly 7 times as much as can hide, and all of the other can.
    """
    shape = {"layers": 1, "seq": 4096, "vocab": 64, "gated": True}
    olmoe = {"dim": 2048, "heads": 16, "kv_heads": 16, "ffn": 1024, "experts": 64, "top_k": 8}
    mixtral = {"dim": 6144, "heads": 48, "kv_heads": 8, "ffn": 16384, "experts": 8, "top_k": 2}
    ratios = [eight.travel_over_compute(eight.Mixture(**shape, **of), 8, 2, 989e12, 50e9)
              for of in (olmoe, mixtral)]
    assert ratios == [pytest.approx(6.75, abs=0.01), pytest.approx(0.57, abs=0.01)]
