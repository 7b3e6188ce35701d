from conftest import *
from test_04_tensor_parallel import *
import test_05_sequence_parallel as t5
def test_x(ranks, tmp_path):
    for name, cov in ((FOUR, covering(variant=VARIANTS, vocab=(256, 257), **SETTINGS)), (t5.FIVE, covering(variant=t5.VARIANTS, **SETTINGS))):
        for par in cov:
            one=par.values[0]
            r=ranks(one["world"])(run_main, name, flags_of(one), tmp_path)[0]
            print(par.id, r[0], *("%.0e"%r[1][k] for k in ("max_loss_diff","max_grad_diff","max_param_diff")))
