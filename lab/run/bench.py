"""What every run beside lab/ has, whether it trains a model or not: ranks that meet, and say why
they end; a first line that says what runs where; the files that it is asked for."""

import argparse
import contextlib
import json
from collections.abc import Callable

import torch
import torch.distributed as dist

import common
from common import environment
from lab.run import meeting
from lab.run.words import count


class Bench(common.Run):
    """The base of report.Run and of chapter 00's. Only rank 0 prints. Both have what they have
    measured in `as_json`, what is wrong in `problems`, and why in `diagnosis`; where they are in
    words, `at` and `so_far`; a `watch` (meeting.Watch); and draw_record(record, path)."""

    def prepare(self, args):
        """What is asked for can be written; then join the other ranks."""
        for path in filter(None, (args.json, args.plot, args.profile)):
            path.parent.mkdir(parents=True, exist_ok=True)
        meeting.set_timeout(args.timeout)
        meeting.join(args)

    def of_all_ranks(self, mine: object) -> list:
        """That of each rank. Communication: an all_gather_object."""
        everyones = [None] * self.world
        dist.all_gather_object(everyones, mine)
        return everyones

    @property
    def on_cuda(self):
        return self.device.type == "cuda"

    def first_line(self, precision):
        chapter = self.args.chapter.replace("_", " ")
        self.say(f"{chapter} · {self.args.variant} · {count(self.world, 'rank')} · {self.where()} "
                 f"· {precision}")

    def where(self):
        """The device and the backend, and why those."""
        local_world = environment("LOCAL_WORLD_SIZE", self.world)
        gpus = torch.cuda.device_count()
        why = f"GPUs: {gpus}, local ranks: {local_world}" if gpus else "no GPU"
        why = why if self.args.device == "auto" else f"--device {self.args.device}"
        machines = count(self.world // local_world, "machine")
        return f"{self.device.type}, {dist.get_backend()} ({machines}, {why})"

    @contextlib.contextmanager
    def guard(self):
        """Around all that ranks do together: a line says why they end early, and which is lost."""
        try:
            yield
        except BaseException as error:
            self.watch.leave(error)
            raise
        finally:
            meeting.set_timeout(None)

    def say(self, line):
        if self.rank == 0:
            print(line, flush=True)

    def finish(self) -> int:
        """Judge and report, and only then write and draw what the flags ask for. Returns the exit
        status: 1 on rank 0 if anything did not match, was not finite or could not be written."""
        with self.guard():                              # in which the last save ends
            status = self.judge_and_report()
        self.watch.stop()
        return status

    def report_problems(self, **outputs: Callable) -> int:
        """Print them, then write and draw. outputs: what else is written, {flag: write(path)}.
        Returns the exit status."""
        for problem in self.problems:
            print(f"  ✗ {problem}", flush=True)
        for sentence in self.diagnosis:
            print(f"  → {sentence}", flush=True)
        outputs = {"json": self.write_json, "plot": self.draw_picture} | outputs
        written = [wrote(self.args, flag, write) for flag, write in outputs.items()]
        return 0 if all(written) and not self.problems else 1

    def write_json(self, path):
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def draw_picture(self, path):
        """Of --plot."""
        self.draw_record(self.as_json(), path)
        print(f"  picture: {path}", flush=True)


def wrote(args: argparse.Namespace, flag: str, write: Callable) -> bool:
    """Whether write(path) has worked, if the flag names a path. By now the verdict is printed, so
    what stops it, be it a full disk or a matplotlib that is missing, costs a line."""
    path = getattr(args, flag)
    try:
        if path:
            write(path)
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        print(f"  ✗ --{flag} {path} is not written: {type(error).__name__}: {why}", flush=True)
        return False
    return True
