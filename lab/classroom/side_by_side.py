"""Students graded side by side: each in a thread, which waits for processes of its own."""

import multiprocessing
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

END = object()


def in_turn(tasks, jobs, tell=lambda name, item: None):
    """Yield (name, item) of what the tasks give, {name: function that gives an iterator}, in the
    tasks' order, and (name, END) after the last of each. So many go on at once. tell(name, item) is
    called as soon as an item is there, be it early. Whatever ends this, a signal say, ends all
    processes that the tasks have started, and then the tasks."""
    arrived, is_ending = queue.SimpleQueue(), threading.Event()
    others = set(multiprocessing.active_children())

    def work(name):
        try:
            for item in tasks[name]():
                if is_ending.is_set():
                    return
                arrived.put((name, item, None))
            arrived.put((name, END, None))
        except BaseException as error:                  # for who waits
            arrived.put((name, END, error))

    pool = ThreadPoolExecutor(jobs)
    try:
        workers = [pool.submit(work, name) for name in tasks]
        early = {name: [] for name in tasks}
        for turn in tasks:
            has_end = False
            while not has_end:
                if not early[turn]:
                    name, item, error = arrived.get()
                    if error:
                        raise error
                    tell(name, item)
                    early[name].append(item)
                while early[turn]:
                    item = early[turn].pop(0)
                    has_end = item is END
                    yield turn, item
    finally:
        is_ending.set()
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(worker.done() for worker in workers):
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()                     # an overseer ends all below it first
            time.sleep(0.02)


class Progress:
    """A line on a terminal: how many students are graded, and how long it may still take. That is
    what a result has taken so far on average, times the results that are to come."""

    def __init__(self, students, results, stream):
        """results: of each student."""
        self.students, self.results = students, results
        self.stream = stream if stream and stream.isatty() and students > 1 else None
        self.begin, self.seen, self.ended = time.monotonic(), {}, 0

    def tell(self, name, item):
        is_end = item is END
        self.ended += is_end
        self.seen[name] = self.results if is_end else self.seen.get(name, 0) + 1
        self.show()

    def text(self):
        done, every = sum(self.seen.values()), self.students * self.results
        text = f"{self.ended} of {self.students} students"
        if done:
            seconds = (time.monotonic() - self.begin) / done * (every - done)
            text += f", {in_minutes(seconds)} left"
        return text

    def show(self):
        if self.stream:
            print(f"\r{self.text()}\x1b[K", end="", file=self.stream, flush=True)

    def clear(self):
        """Before something else is printed."""
        if self.stream:
            print("\r\x1b[K", end="", file=self.stream, flush=True)


def in_minutes(seconds):
    """As somebody would say it who does not know it to the second."""
    return f"about {round(seconds / 60)} min" if seconds >= 90 else f"about {seconds:.0f} s"
