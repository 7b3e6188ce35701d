"""What the diagnosis says where no chapter is at fault (planted faults: tests/faults)."""

import re

import pytest

from tests.conftest import run_main
from tests.faults.test_faults import FLAGS

TWO = "02_data_parallel"

@pytest.mark.parametrize(("flags", "rate"), [
    ("--dtype=float32 --optimizer=adamw --lr=1e9", r"--lr 1e\+09"),  # not finite
    ("--dtype=float32 --optimizer=sgd --lr=30", "--lr 30"),  # the tensors
    ("--dtype=bfloat16 --lr=1e9", r"--lr 1e\+09"),  # the loss
])
def test_where_one_gpu_is_lost_too_the_rate_is_to_blame(ranks, tmp_path, flags, rate):
    flags = [*FLAGS, "--batch=6", *flags.split(), "--steps=5", "--variant=overlap"]
    (status, run, output), _ = ranks(2)(run_main, TWO, flags, tmp_path)
    assert status == 1 and len(run["diagnosis"]) == 1, output
    assert re.fullmatch(rf"in \d steps? that matched, one GPU's weights have moved by \S+ times "
                        rf"their size: {rate} is too high, and makes any difference of rounding "
                        r"large", run["diagnosis"][0])  # fmt: skip
