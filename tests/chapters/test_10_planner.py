"""Chapter 10: held to what was published, to other chapters' formulas, and to its own search."""

import contextlib
import errno
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import common
from lab.bench import anatomy
from lab.cli import refusals
from lab.planner import planning, problems, published
from tests.conftest import ROOT, chapter, some
from tests.support import every_command, trials

TEN = "10_planner"


@pytest.fixture
def ten():
    return chapter(TEN)


def config(model):
    """The same model, as chapters 01 to 09 train it."""
    return common.Config(model.layers, model.dim, model.heads, model.kv_heads, model.seq,
                         model.vocab, model.tie, "plain", model.gated, model.ffn)


# ------------------------------------------------------------------------------- what was published


def test_published_tables_are_predicted(ten):
    assert published.beyond(ten) == []
    for table in published.PUBLISHED:
        ours, constant = published.errors(published.rows(ten, table))
        assert sum(map(abs, ours)) < sum(map(abs, constant)) / 2


def test_constants_are_those_that_fit(ten):
    assert published.fit(ten, start=(0.8, 0.8)) == pytest.approx([ten.HBM, ten.NVLINK], abs=3e-3)


def test_every_layout_of_table_1_fits_and_none_with_half_as_much_model_parallelism(ten):
    memory = ten.CLUSTERS["a100"].memory

    def bytes_on(row, fewer_tp=1, fewer_pp=1):
        layers, dim, heads, tp, pp, v, gpus, batch, micro_batch = map(int, row.split())
        tp, pp = tp // fewer_tp, pp // fewer_pp
        if not tp or not pp:
            return math.inf
        dp = gpus // (tp * pp)
        layout = ten.Layout(dp, tp, 1, pp, v if pp > 1 else 1, sp=False, micro_batch=micro_batch,
                            recompute="full")
        needed = ten.memory(ten.gpt(layers, dim, heads), layout, ten.SOFTWARE["megatron-2021"],
                            batch // dp // micro_batch)
        return sum(needed.values())

    for row, *_ in published.rows(ten, "table 1"):
        assert bytes_on(row) < ten.ROOM * memory
        assert min(bytes_on(row, fewer_tp=2), bytes_on(row, fewer_pp=2)) > memory


def test_micro_batch_of_two_is_best_where_megatron_found_it_best(ten):
    """Figure 16: 91 billion parameters, tp 8, pp 8, 64 GPUs, a batch of 128."""
    model = ten.gpt(layers=32, dim=15360, heads=120)
    seconds = {b: sum(ten.step_seconds(model, ten.Layout(1, 8, 1, 8, sp=False, micro_batch=b,
                                                         recompute="full"),
                                       ten.CLUSTERS["a100"], ten.SOFTWARE["megatron-2021"],
                                       128).values()) for b in (1, 2, 4, 8)}
    assert min(seconds, key=seconds.get) == 2


def test_worked_problems_have_the_books_answers(ten):
    text = " ".join(problems.problems(ten))
    for answer in ("13.0 G parameters (13.0)", "130 GB (130)", "42 TB (42)", "8 TB (8)",
                   "393 TB (393)", "850 tokens of a chip (850)", "below 235 (235)",
                   "over 1333 chips (1333)", "0.31 s", "2 is best (2)", "24% of the speed",
                   "each layer is one"):
        assert answer in text


def test_best_checkpoints_keep_least():
    layers, of_input, of_layer = 36, 1.0, 4.0
    kept = {c: c * of_input + layers / c * of_layer for c in range(1, layers + 1)}
    assert problems.best_checkpoints(layers, of_input, of_layer) == min(kept, key=kept.get) == 12


# ----------------------------------------------------------------------- other chapters' formulas


def test_activations_are_korthikantis(ten):
    model, b, t = ten.gpt(4, 256, 8, seq=128), 3, 4
    s, h, a = model.seq, model.dim, model.heads
    unfused = ten.Software(flash=False, dropout=True)
    kept = lambda **layout: ten.kept_by_layer(
        model, ten.Layout(**{"micro_batch": b, "sp": False} | layout), unfused)
    core = 5 * a * s / h
    assert kept() == s * b * h * (34 + core)
    assert kept(tp=t) == s * b * h * (10 + 24 / t + core / t)
    assert kept(tp=t, sp=True) == s * b * h * (34 + core) / t
    assert kept(tp=t, sp=True, recompute="selective") == s * b * h * 34 / t
    assert kept(recompute="full") == 2 * s * b * h


def test_what_is_planned_as_a_llama_is_trained_as_one(ten):
    """So that what chapters 01 to 09 measure of tiny-llama holds the planner's Llamas, too."""
    cfg, llama_1b = common.PRESETS["llama-8b"], ten.MODELS["1b"]
    assert anatomy.as_planned(cfg) == ten.MODELS["8b"]
    assert cfg.parameters() == ten.MODELS["8b"].parameters()
    assert config(llama_1b).parameters() == llama_1b.parameters()


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
@pytest.mark.parametrize(("flash", "gated"), [(False, False), (True, False), (True, True)])
def test_activations_are_those_of_chapters_04_and_05(ten, tp, flash, gated):
    """Of an odd model: fewer kv heads than ranks, a vocabulary that does not divide. But for what
    norms keep beside their inputs (LayerNorm the mean and the deviation of each token, 2 bytes
    each); and for the output of a flash kernel, which o reads as it is where a rank has one head,
    and else a copy of it."""
    model = replace(ten.gpt(3, 48, 6, seq=30, vocab=250, tie=False), kv_heads=3, gated=gated)
    software, of_inputs = ten.Software(flash=flash, swiglu_kept=4), 2 * 2 * 3 * 30 * 48
    copy = 2 * 3 * 30 * 48 / tp if flash and tp < 6 else 0
    cfg = replace(config(model), attention="sdpa" if flash else "plain")
    statistics = 2 * anatomy.norm_bytes(cfg, 3 * 30, 2) - of_inputs
    assert gated or statistics == 2 * 2 * 2 * 3 * 30
    for sp, name in ((False, "04_tensor_parallel"), (True, "05_sequence_parallel")):
        shares = chapter(name).kept(cfg, tp)
        measured = anatomy.kept_by_modules(cfg, 3, 2, shares)[1]
        ours = ten.kept_by_layer(model, ten.Layout(tp=tp, sp=sp, micro_batch=3), software)
        assert ours + statistics / (tp if sp else 1) + copy == measured


def test_model_states_are_shared_out_as_in_chapter_03(ten):
    """2 bytes of weights, 4 of gradients and 12 of the optimizer a parameter."""
    model, n = ten.gpt(4, 64, 4, seq=32, vocab=256), 4
    numbers, layer = model.parameters(), model.weights(1)
    states = lambda **more: [size / numbers for cause, size in ten.memory(
        model, ten.Layout(n, **more), ten.Software(), 1).items() if cause != "activations"]
    held = lambda *args: ten.parameters_of_gpu(*args, ten.Software())
    assert states() == [2, 4, 12]
    assert states(zero=1) == [2, 4, 12 / n]
    assert states(zero=2) == [2, 4 / n, 12 / n]
    assert states(zero=3) == [2 / n + 4 * layer / numbers, 4 / n, 12 / n]   # two layers are whole

    mixture = replace(model, experts=8)
    parts = held(mixture, ten.Layout(n, ep=2))
    experts, holders = parts["experts"]
    assert experts == 4 * 8 * 2 * 64 * 256 / 2 and holders == 2
    assert sum(size for size, _ in parts.values()) == mixture.parameters() - experts
    needed = ten.memory(mixture, ten.Layout(n, ep=2, zero=1), ten.Software(), 1)
    others = mixture.parameters() - 2 * experts
    assert needed["optimizer"] == 12 * (experts / 2 + others / n)
    kv_heads = held(replace(model, kv_heads=2), ten.Layout(2, tp=4))["keys"]    # tp of 4 has 2 each
    assert kv_heads == (4 * 2 * 64 * 32 / 2, 4)


def test_parameters_and_flops_are_chapter_01s(ten):
    one = chapter("01_single_gpu")
    for model in (ten.gpt(3, 64, 4, seq=32, vocab=256), ten.gpt(3, 64, 4, tie=False, vocab=500),
                  ten.llama(3, 64, 4, 2, 96, 500, 32)):
        cfg = config(model)
        assert model.parameters() == cfg.parameters()
        assert ten.step_flops(model, 5) == one.model_flops(cfg, 5)
        again = ten.step_flops(model, 5, recompute="full")
        assert again == one.step_flops(cfg, 5, "plain", "full")
    causal, every = ten.step_flops(model, 5, "causal"), ten.step_flops(model, 5)
    assert every - causal == 3 * model.layers * 5 * model.seq * 2 * model.seq * model.dim


def test_the_bubble_and_what_is_alive_are_chapter_07s(ten):
    seven = chapter("07_pipeline_parallel")
    names = {"1f1b": "1f1b", "zero-bubble": "zb-h1", "dualpipe-v": "dualpipe-v"}
    for (ours, theirs), p, m in itertools.product(names.items(), (2, 4, 8), (17, 32)):
        layout = ten.Layout(pp=p, schedule=ours)
        wait = ten.bubble(layout, F=3, B=4, W=2)
        assert wait / (m * 9) == pytest.approx(seven.bubble(theirs, p, m, 1, 3, 4, 2))
        stages = 2 if ours == "dualpipe-v" else 1
        assert ten.micro_batches_alive(layout, m) == seven.most_alive(theirs, 0, p, m, 1) / stages
    layout = ten.Layout(pp=4, v=2)
    assert ten.bubble(layout, 1, 1, 1) / (8 * 3) == seven.bubble("interleaved", 4, 8, 2)
    assert ten.micro_batches_alive(layout, 8) == seven.most_alive("interleaved", 0, 4, 8, 2) / 2


def layouts_of_8():
    """The flags of chapter 09 for every product of dense axes on 8 ranks, with each ZeRO."""
    for pp, cp, tp in itertools.product((1, 2, 4, 8), repeat=3):
        if 8 % (pp * cp * tp) == 0:
            schedules = ["1f1b"] + ["interleaved", "dualpipe-v"] * (pp > 1)
            for schedule, zero in itertools.product(schedules, range(3)):
                yield pp, cp, tp, schedule, zero


@pytest.mark.parametrize(("pp", "cp", "tp"), some(sorted({axes[:3] for axes in layouts_of_8()})))
def test_states_activations_and_traffic_are_those_of_chapter_09(ten, nine_runs, pp, cp, tp):
    """Its formulas, to which its runs are held, of the rank that has most."""
    for schedule, zero in [axes[3:] for axes in layouts_of_8() if axes[:3] == (pp, cp, tp)]:
        args, answers, e = nine_runs(pp, cp, tp, schedule, zero)
        model = anatomy.as_planned(args.model)
        v = 2 if schedule == "interleaved" else 1
        layout = ten.Layout(args.dp, tp, cp, pp, v, zero=zero, micro_batch=args.micro_batch,
                            schedule="dualpipe-v" if schedule == "dualpipe-v" else "1f1b")
        ours, m = ten.SOFTWARE["ours"], args.micro_batches

        # What each kind of parameter has on the fullest rank, and who shares it.
        planned = ten.parameters_of_gpu(model, layout, ours)
        fullest = max(answers, key=lambda answer: sum(numbers_of(args, answer).values()))
        assert {kind: size for kind, (size, _) in planned.items()} == numbers_of(args, fullest)
        assert {kind: n for kind, (_, n) in planned.items()} == {
            kind: fullest["holders"][kind] for kind in planned}

        # What a layer keeps, and how many micro-batches of it are alive at a time.
        shares = layout.shares(model, ours)
        assert shares == {name: anatomy.share_of(fullest["kept"], name) for name in shares}
        blocks = [max(alive_blocks(answer["schedule"])) for answer in answers]
        first, last = (ten.micro_batches_alive(layout, m, stage) for stage in (0, pp - 1))
        assert blocks[0] == first * model.layers / pp and blocks[-1] == last * model.layers / pp

        # What goes over each axis, in bytes on the wire, and messages to other stages.
        passes = m * model.layers // pp
        for axis, (numbers, n, _, _) in ten.messages(model, layout).items():
            sent = sum(part[1] for part in fullest["sent"].get(axis, {}).values())
            assert sent == (2 * passes * e * numbers if n > 1 else 0), axis


def numbers_of(args, answer):
    """{kind: numbers} of a rank, by lab/bench/anatomy.py."""
    held = anatomy.held_by_modules(args.model, answer["parameters"], answer["modules"])
    return {kind: sum(module.get(kind, (0, 0))[0] for module in held)
            for kind in ("queries", "keys", "mlp", "norms", "tables")}


def alive_blocks(schedule):
    """Blocks of micro-batches that a rank keeps, after each action."""
    alive, slices = 0, schedule["slices"]
    for kind, stage, _ in schedule["actions"]:
        start, end = slices[stage]
        blocks = end - start - (stage == 0) - (stage == len(slices) - 1)
        alive += blocks if kind == "F" else -blocks
        yield alive


@pytest.fixture
def nine_runs():
    """A function of axes: the arguments of a run of chapter 09, the formulas of its ranks along pp,
    and the bytes of a number."""
    nine = chapter("09_5d")

    def run(pp, cp, tp, schedule, zero, ep=1, experts=0, shared_expert=False):
        cfg = common.Config(16, 16, 8, 2, 32, 64, False, "plain", zero == 1, 48)
        args = SimpleNamespace(
            variant="hand", dtype="float32", precision="fp32", recompute="none", model=cfg,
            batch=128, micro_batch=1, pp=pp, cp=cp,
            tp=tp, ep=ep, dp=None, zero=zero, schedule=schedule, experts=experts, top_k=2,
            like=None, order="pp,dp,cp,tp", node_size=8, keep_gathered=False,
            shared_expert=shared_expert, documents=None)
        nine.requires(args, 8)
        full = nine.build(args.model)
        schedules, owners = nine.make_schedule(schedule, pp, args.micro_batches)
        slices, answers = nine.balanced(cfg.layers, len(owners)), []
        for stage in range(pp):
            parts = [full[slice(*slices[i])] for i, owner in enumerate(owners) if owner == stage]
            for block in (block for part in parts for block in part if experts and hasattr(
                    block, "mlp")):                     # all experts are chosen alike
                rows = [args.micro_batch * 32 // (cp * tp) * 2 // ep] * ep
                block.mlp.seen = [(rows, rows)] * args.micro_batches
            answers.append(nine.formulas(args, stage * (8 // pp), 8, Parts(parts)))
        return args, answers, 4

    return run


class Parts(list):
    """A rank's stages, whose parameters no group holds."""

    blocks = ()                                         # nothing is asked of who meets whom
    def parameters(self):
        return []


# ------------------------------------------------------------------------------- the command line


def planner(arguments):
    return subprocess.run([sys.executable, ROOT / f"{TEN}.py", *shlex.split(arguments)],
                          capture_output=True, text=True, timeout=60)


def test_it_answers_in_a_second_without_torch(tmp_path):
    file = tmp_path / "plan.json"
    begin = time.perf_counter()
    ran = planner(f"--model 70b --gpus 512 --batch 1024 --explain --json {file}")
    assert ran.returncode == 0 and time.perf_counter() - begin < 5, ran.stderr
    plan = json.loads(file.read_text())
    assert {"seconds", "tokens_per_second_per_gpu", "tflops", "tflops_causal", "mfu", "time",
            "memory", "layout", "found"} <= plan.keys()
    assert plan["seconds"] == pytest.approx(sum(plan["time"].values()))
    parts = [size for cause, size in plan["memory"].items() if cause != "total"]
    assert plan["memory"]["total"] == pytest.approx(sum(parts))
    assert plan["tokens_per_second_per_gpu"] * 512 * plan["seconds"] == pytest.approx(1024 * 8192)
    assert math.prod(plan["layout"][axis] for axis in ("dp", "tp", "cp", "pp")) == 512
    code = ("import sys; sys.argv = ['x', '--tp', '8']; import runpy; "
            f"runpy.run_path('{ROOT / TEN}.py', run_name='__main__'); "
            "assert 'torch' not in sys.modules")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_reader_that_leaves_ends_it_without_a_word():
    command = f"{shlex.quote(sys.executable)} 10_planner.py --problems | true"
    assert not subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True).stderr
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN      # and tests go on as they were


def test_help_says_what_the_chapter_says_of_each_number():
    said = " ".join(planner("--help").stdout.split())
    for words in ("--nic NIC bytes/s of its network card", "--memory MEMORY bytes",
                  "--v V slices of the model on each stage", "attention is one kernel"):
        assert words in said


def test_any_model_and_machine_can_be_given(ten, capsys):
    planning.main(ten, shlex.split(
        "--layers 4 --dim 512 --heads 8 --kv-heads 2 --ffn 2048 --no-gated --vocab 1000 --seq 512 "
        "--untie --peak 1e14 --matmul 0.5 --hbm 1e12 --memory 1e10 --nvlink 1e11 --nic 1e10 "
        "--per-node 4 --alpha 1e-5 --gpus 4 --batch 16 --no-flash --dropout --tp-hidden 0 "
        "--dp-hidden 0.5 --gradient-bytes 2"))
    said = capsys.readouterr().out
    assert "0.0 G parameters" in said and "layouts fit" in said


@pytest.mark.parametrize(("arguments", "words"), [
    ("--tp 3", "tp x cp x pp = 3; --tp"),
    ("--dp-hidden 2", "--dp-hidden: 2 is no number from 0 to 1; --dp-hidden 0.5"),
    ("--gpus 100000 --batch 2048", "; --batch 100000 would work"),
    ("--model 405b", "needs 919 GB of a GPU"), ("--tp 16", "gpus = 8 is not a multiple of tp"),
    ("--gpus 1 --tp 2", "gpus = 1 is not a multiple"), ("--tp x", "--tp: x is no whole number"),
    ("--gpus 0", "--gpus"), ("--model 9b", "--model"), ("stray", "; without stray"),
    ("--seq 100 --cp 8", "seq = 100 is not a multiple of cp = 8"),
    ("--pp 64 --gpus 64", "layers = 32"),
    ("--heads 3 --model 8b", "dim = 4096 is not a multiple of"),
    ("--heads 3", "--layers, --dim and --heads"), ("--matmul 0", "--matmul: 0 is no number from"),
    ("--attention 0", "--attention"), ("--matmul 5", "--matmul: 5 is no number from 0.001 to 1"),
    ("--gpus 8 --batch 1 --pp 8 --v 4 --tp 1", "1 micro-batches for pp = 8, v = 4"),
    ("--kv-heads 64", "heads = 32 is not a multiple of kv-heads"),
    ("--top-k 2", "than --experts = 1; --top-k 1 would work"),
    ("--kv-heads 5", "kv-heads = 5; without --kv-heads"),
    ("--pp 2 --schedule dualpipe-v --v 2", "dualpipe-v needs pp of 2 or more"),
    ("--nic nan", "--nic"), ("--peak 1e99", "--peak"), ("--memory 80", "--memory 80e9 would"),
    ("--fp8 --cluster a100", "a100 has no matmuls in FP8; without --fp8"),
    ("--json /proc/plan.json", "--json: cannot write"), ("--layer 3", "without --layer 3"),
    ("--layers 1000000000000", "--layers"), ("--dim 99999999999", "--dim"),
    ("--gpus 720720 --layers 90000 --dim 64 --heads 2 --seq 2000000 --experts 4096",
     "34,744,320 layouts are more than")])
def test_a_bad_argument_costs_one_line(ten, arguments, words):
    status, output, line = told(ten, shlex.split(arguments))
    assert status == 2 and not output
    assert line.startswith("error: ") and words in line and line.count("\n") == 1
    assert line.endswith(" would work\n")


def told(ten, argv):
    """(status, stdout, stderr) of the planner, called in this process."""
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            status = planning.main(ten, argv)
        except SystemExit as leaving:
            status = leaving.code
    return status, said.getvalue(), errors.getvalue()


def follow(ten, argv, line):
    """Each change that a refusal names works: something fits, for sure."""
    for change in re.search("; ([^;]*) would work\n$", line)[1].split(" or "):
        status, said, errors = told(ten, refusals.changed(argv, refusals.parsed(change)))
        assert status == 0 and " may fit" not in said, (argv, line, change, errors)


@pytest.mark.parametrize("arguments", [
    "--tp 3", "--model 405b", "--pp 64 --gpus 64", "--model 70b --tp 1", "--gpus 1 --tp 2",
    "--gpus 100000 --batch 2048", "--no-sp --tp 3", "--heads 3 stray --model 9b --layer=3",
    "--model 1t --gpus 1 --memory 1e6 --batch 1",
    "--gpus 8388608 --seq 200000000 --experts 32768 --top-k 2 --v 1 --micro-batch 1 --memory 1e6"])
def test_what_a_refusal_names_works(ten, arguments):
    argv = shlex.split(arguments)
    follow(ten, argv, told(ten, argv)[2])


ODD = {"int": ["-1", "0", "1", "2", "3", "5", "8", "12", "64", "1000", "x", "1.5", "", "--",
               "65536", "9" * 20],
       "float": ["0", "1e-9", "0.3", "1", "80", "1e12", "1e30", "nan", "inf", "-1", ""]}


def drawn(rng, ten):
    """A command line of one to five flags, of which some are bad, or do not fit each other."""
    argv = []
    flags = [action for action in planning.parser(ten)._actions if action.dest not in (
        "help", "published", "problems", "contexts", "json")]
    for action in rng.sample(flags, rng.choice((1, 1, 2, 2, 3, 4, 5))):
        flag = rng.choice(action.option_strings)
        if action.nargs == 0:
            argv.append(flag)
        elif action.choices:
            argv.append(f"{flag}={rng.choice([*action.choices, 'x'])}")
        else:
            kind = "int" if trials.kind_of(action) is int else "float"
            argv.append(f"{flag}={rng.choice(ODD[kind])}")
    return argv + ["stray"] * (rng.random() < 0.1)


@pytest.mark.parametrize("seed", [
    0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_every_odd_question_is_answered_or_refused_with_a_change_that_works(ten, seed):
    rng, refused = random.Random(seed), 0
    while refused < 30:
        argv, begin = drawn(rng, ten), time.process_time()
        status, said, line = told(ten, argv)
        assert time.process_time() - begin < 15, argv
        assert (status, line) == (0, "") and said or status == 2 and not said, (argv, line)
        if status == 2:
            refused += 1
            assert line.startswith("error: ") and line.count("\n") == 1, (argv, line)
            follow(ten, argv, line)


def test_the_sizes_of_a_search_are_limited(ten, monkeypatch):
    """As many layouts as are to be tried are counted before any is."""
    asked = planning.question(ten, [])[1]
    tried = []
    monkeypatch.setattr(ten, "Plan", lambda model, layout, *others: tried.append(layout)
                        or SimpleNamespace(why="", total=0, bytes=0))
    asked.find(8, {"zero": 1, "cp": 1})
    degrees = ten.degrees(asked.model, asked.cluster, asked.software, 8, {"zero": 1, "cp": 1}, 16)
    assert len(tried) == math.prod(map(len, degrees.values())) <= planning.MOST
    monkeypatch.setattr(planning, "MOST", len(tried) - 1)
    with pytest.raises(common.Refused, match="layouts are more than"):
        planning.question(ten, ["--zero=1", "--cp=1"])


def test_a_refusal_and_a_full_disk_leave_nothing(tmp_path, monkeypatch):
    """Other streams and files: tests/support/test_trials.py."""
    monkeypatch.chdir(tmp_path)
    assert told(chapter(TEN), ["--json=plan.json", "--tp=3"])[0] == 2 and os.listdir() == []

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    errors = io.StringIO()
    assert trials.call(every_command.PLANNER, ["--json=plan.json"], {}, None, errors) == 1
    assert errors.getvalue() == "error: cannot write all of a file: No space left on device\n"


def test_where_nothing_fits_for_sure_it_says_so_and_what_would():
    ran = planner("--gpus 8 --batch 8 --seq 16384 --tp 1 --cp 1 --recompute none")
    first, second, *_ = ran.stdout.splitlines()
    assert first.endswith("layouts may fit, and none does for sure")
    assert second.endswith("; --tp 2 or --cp 2 or --recompute full would work)")
