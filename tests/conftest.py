"""Fixtures, and the chapters under test, which CHAPTERS=folder replaces."""

import contextlib
import functools
import gc
import importlib.util
import io
import json
import json.decoder
import os
import signal
import sys
import types
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton: without a GPU it interprets
    os.environ["TRITON_INTERPRET"] = "1"

import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = Path(os.environ.get("CHAPTERS", ROOT)).resolve()
sys.path.insert(0, str(ROOT))  # common.py and lab/ are always ours: they judge
TEXT = json.decoder.__file__  # a file that does not change with our own sources
import common  # noqa: E402  (after the path to it)
from lab import chapters, launch  # noqa: E402
from tests.support.pool import Pool  # noqa: E402

# A run of chapter 01 ends with a text of 160 tokens, a forward each. Here it has fewer, and still
# more than the 16 that most models of the tests see at once.
chapters.held("01").sample = functools.partial(chapters.held("01").sample, length=20)
torch.set_num_threads(1)  # on a busy machine, threads that wait for each other cost minutes

FULL = bool(os.environ.get("FULL"))  # as `make test-all` sets it
SMALL = ("--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--device=cpu")
# A second step has what the first has left: states, and what was updated. A third has nothing else.
STEPS = "--steps=3" if FULL else "--steps=2"


def no_flags(parser):
    """Of a chapter that has none of its own."""


def arguments(*flags, parse=common.parse, shares=1):
    """The arguments of a chapter that does not exist: a small model, trained for three steps."""
    flags = [*SMALL, "--steps=3", f"--data={TEXT}", *map(str, flags)]
    args = parse("00_test.py", "", {"test": None}, no_flags, flags)
    common.split_batch(args, shares)
    args.chapter = "00_test"
    return args


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers in every run of a test, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """The pool of rank processes, for the whole session."""
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.stop()


@pytest.fixture
def ranks(pool):
    """ranks(4)(function, *args): the results of function(*args) on a group of four ranks."""
    return lambda world, timeout=180: functools.partial(pool.call, world, timeout)


# ---------------------------------------------------------------------------------- what is tested


# Files that take long, the longest first. pytest-xdist hands out files in this order: one of these
# as the last would have one process work while the others have nothing left.
LONGEST = ("test_09_5d", "test_07_pipeline_parallel", "test_faults", "test_06_context_parallel",
           "test_museum", "test_08_expert_parallel", "test_pretend_cuda", "test_random_runs",
           "test_a_class", "test_11_muon", "test_checkpoint", "test_05_sequence_parallel",
           "test_04_tensor_parallel", "test_fp8", "test_cli", "test_03_zero", "test_common_run")


def pytest_collection_modifyitems(config, items):
    """Tests marked `full` run in `make test-all` alone, which sets FULL=1."""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
    chosen, others = [], []
    for item in items:
        is_full = item.get_closest_marker("full") and not os.environ.get("FULL")
        (others if is_full else chosen).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def sample(cases, size=1):
    """parametrize's cases: all of them in `make test-all`, and the first few in `make test`."""
    return [*cases] if FULL else [*cases][:size]


def needs_triton():
    """Skip a test of kernels/ where Triton is missing, or cannot interpret with this NumPy."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        return
    numpy = pytest.importorskip("numpy")
    version = lambda module: tuple(map(int, module.__version__.split(".")[:2]))
    if version(triton) < (3, 7) and version(numpy) >= (2, 4):
        pytest.skip(f"the interpreter of Triton {triton.__version__} needs a NumPy before 2.4")


# ------------------------------------------------------------------------------------ the chapters


def chapter(name):
    """The module of a chapter, from CHAPTERS; a test of a chapter that is not there is skipped."""
    path = CHAPTERS / f"{name}.py"
    if not path.exists():
        pytest.skip(f"there is no {name}.py in {CHAPTERS}")
    if CHAPTERS == ROOT:
        return chapters.chapter(name[:2])
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def chapter_names():
    """Those that run on ranks."""
    names = {path.stem for path in CHAPTERS.glob("[0-9][0-9]_*.py")}
    return sorted(names - {"10_planner"})


def training_chapters():
    """Those whose run trains a model."""
    return [name for name in chapter_names() if chapters.trains(name)]


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as behind a `&` in a shell's script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not chapter_names():
        raise pytest.UsageError(f"there is no NN_*.py in CHAPTERS={CHAPTERS}")
    config.option.loadscopereorder = False  # of pytest-xdist: not by the number of tests


def main(module, flags):
    """A chapter's run, as `python NN_name.py` starts it."""
    own, formulas = getattr(module, "flags", no_flags), getattr(module, "formulas", None)
    return launch.main(module.__file__, module.__doc__, module.VARIANTS, module.requires, own,
                       formulas, flags)


@pytest.fixture
def run_chapter(tmp_path, monkeypatch, capsys):
    """run_chapter("01_single_gpu", "--steps=3"): exit status, stdout and stderr of its main."""

    def run(name, *flags, **environment):
        module = chapter(name)
        gc.freeze()  # what is imported by now is no garbage: saves 0.2 s a run
        monkeypatch.chdir(tmp_path)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, str(value))
        try:
            status = main(module, [str(flag) for flag in flags])
        except SystemExit as leaving:
            status = leaving.code
        finally:
            if dist.is_initialized():
                gc.collect()
                dist.destroy_process_group()
            gc.unfreeze()  # or triton reports leaks at the end
        return status, *capsys.readouterr()

    return run


def run_main(name, flags, folder, source=None):
    """For a rank of the pool: run a chapter's main. Returns its status, its JSON and its output.

    source: the text to run instead of the chapter's own (see `edited`).
    """
    module = loaded(name, source) if source else chapter(name)
    json_file, output = Path(folder) / "run.json", io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            status = main(module, [*flags, f"--json={json_file}"])
        except SystemExit as leaving:  # as launch does
            status = leaving.code
    record = json.loads(json_file.read_text()) if dist.get_rank() == 0 else None
    return status, record, output.getvalue()


def edited(name, right, wrong):
    """A chapter's source with one piece replaced."""
    chapter(name)  # or skip
    source = (CHAPTERS / f"{name}.py").read_text()
    assert source.count(right) == 1, f"{name}.py contains {source.count(right)} times: {right}"
    return source.replace(right, wrong)


def loaded(name, source):
    """A module with this source, in place of a chapter."""
    module = types.ModuleType(name)
    module.__file__ = str(CHAPTERS / f"{name}.py")
    exec(compile(source, name, "exec"), module.__dict__)
    return module
