"""A chapter's run, put together from all rooms: what common.launch calls, where there is a lab/.

The command line is refused or accepted; then comes the run, with its watch, its verifier, what it
is held to, and where asked for its checkpoints. What explains a wrong run, saves one and draws one
is imported where it is needed.
"""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from common import Refused, environment
from lab import chapters
from lab.run import commands, meeting, refusals, report, strict


def main(file: str, doc: str, variants: dict, requires: Callable, flags: Callable | None,
         formulas: Callable | None = None, argv: list[str] | None = None,
         make_run: Callable = report.Run, watch: Callable = meeting.Watch) -> int:
    """Run a chapter: refuse what does not fit, train. Returns the exit status. argv: None where the
    chapter is the program, whose output is then made `steady`. make_run: in place of report.Run.
    watch: see meeting.Watch."""
    if argv is None:
        sys.stdout, argv = commands.steady(sys.stdout), sys.argv[1:]
    try:
        args, checkpoint = accept(file, doc, variants, requires, flags, argv)
        if chapters.trains(args.chapter):
            run = with_instruments(args, formulas, checkpoint, make_run, watch)
        else:
            run = chapters.held(args.chapter[:2]).Run(args, formulas, watch, draw)
        train = variants[args.variant]
        train = train[0] if isinstance(train, tuple) else train
        with run.guard():
            run.found = train(run)                      # None, of those that train a model
        return run.finish()
    except Refused as refused:
        refusals.complain(refused)


def accept(file: str, doc: str, variants: dict, requires: Callable, flags: Callable | None,
           argv: list[str]) -> tuple:
    """The arguments of a run, and the checkpoint from which it goes on; raises Refused for those
    that do not fit. It changes nothing."""
    args = strict.parse(file, doc, variants, flags, argv, chapters.about(Path(file).stem))
    requires(args, environment("WORLD_SIZE", 1))
    strict.refuse_cuda(args)
    if not chapters.trains(args.chapter):
        return args, None
    for instrument in chapters.instruments(args):
        instrument.refuse(args)
    if not args.save and not args.resume:
        return args, None
    from lab.checkpoints import resuming

    return args, resuming.goes_on_from(args)


def parse(chapter: ModuleType, argv: list[str]) -> argparse.Namespace:
    """The arguments of a chapter's run, as strict.parse has them."""
    flags, about = getattr(chapter, "flags", None), chapters.about(Path(chapter.__file__).stem)
    return strict.parse(chapter.__file__, chapter.__doc__, chapter.VARIANTS, flags, argv, about)


def with_instruments(args, formulas, checkpoint, make_run, watch):
    """The run of a model."""
    more = {}
    if args.save:
        from lab.checkpoints import saving

        saving.make_folder(args.save)
        more["saver"] = saving.Saver
    run = make_run(args, formulas, about=chapters.about(args.chapter), checkpoint=checkpoint,
                   instruments=chapters.instruments(args), watch=watch, examine=examine,
                   explain=explain, draw=draw, **more)
    if args.resume:
        from lab.checkpoints import resuming

        resuming.refuse_disagreement(run)
    return run


def examine(*step):
    """What is known of a step that does not match one GPU's: see verify.Verifier."""
    from lab.diagnose.collect import collect

    return collect(*step)


def explain(run):
    """Sentences about why a run is wrong."""
    if not run.problems:
        return []
    from lab.diagnose import diagnose

    return diagnose.of_run(run)


def draw(record, path):
    """The figure of a run's JSON."""
    from lab import pictures

    pictures.draw([record], record["chapter"], path)


def launch(*chapter) -> None:
    """Run a chapter's `main` and leave cleanly, with its status.

    A process group that is still referred to when Python shuts down aborts the process: so collect
    garbage, then destroy it. PyTorch itself never lets go of one whose collectives a dispatch mode
    has seen (the meters are such), and its threads would run on: so leave at once.
    """
    signal.signal(signal.SIGINT, interrupt)
    try:
        status = main(*chapter)
    except SystemExit as leaving:
        status = leaving.code
    except KeyboardInterrupt as interrupted:
        if not interrupted.args and environment("RANK", 0) == 0:
            refusals.say("interrupted before the first step")
        status = 128 + signal.SIGINT
    except RuntimeError as error:
        if not any(words in str(error) for words in meeting.LOST):
            raise
        refusals.say(f"rank {environment('RANK', 0)}: another rank has ended")
        status = 1
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    for stream in filter(None, (sys.stdout, sys.stderr)):       # None: closed, by `>&-`
        stream.flush()
    os._exit(status or 0)


def interrupt(*signal_and_frame):
    """On Ctrl-C, once: it comes from the terminal, and then from torchrun as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
