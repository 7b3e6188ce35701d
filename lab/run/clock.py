"""When something happened in a step: moments on a CPU and on CUDA, and the ends of collectives."""

import contextlib
import time

import torch
from torch.distributed import Work


class Clock:
    """Moments of a step: on a CPU seconds, on CUDA events, which tell the GPU's time and not the
    host's. A collective's end is an event on a stream that does nothing but wait for it, and a wait
    is between events on the stream that it holds up."""

    def __init__(self, cuda):
        self.cuda, self.ends = cuda, []
        self.side = torch.cuda.Stream() if cuda else None
        self.wait = Work.wait                           # as it is before a meter is told of waits
        self.start = self.now()

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def at_end(self, work, span):
        """Note the end of this work in the span, if the backend tells it."""
        if self.cuda:
            with torch.cuda.stream(self.side):
                self.wait(work)
                span[-1] = self.now()
        else:
            note = lambda future: span.__setitem__(-1, span[-1] or time.perf_counter())
            with contextlib.suppress(RuntimeError):     # gloo does not tell when sends, receives
                self.ends.append(work.get_future().then(note))      # and reduce_scatters end

    def since_start(self):
        """A function from moments to seconds since the start, once all have come."""
        if self.cuda:
            torch.cuda.synchronize()
            return lambda moment: self.start.elapsed_time(moment) / 1e3
        for end in self.ends:
            end.wait()
        return lambda moment: moment - self.start
