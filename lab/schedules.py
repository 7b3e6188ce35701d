"""A pipeline's schedule put to the test: whether its messages can block, and how long it takes.

A program is a list of actions (kind, stage, micro-batch) and, between them, batches: lists of
messages (output, sender, receiver) that a rank posts at once. An output is named by the action that
computes it: ("F", stage, micro-batch), or "B", whether a B or a BW does.
"""

import time
from collections import defaultdict

import torch


def check_rendezvous(programs, needs):
    """Run the programs of all ranks on the strictest network there is.

    A rank that has posted a batch waits until every partner has posted its side of it. Between two
    ranks the first send meets the first receive, the second the second, and so on: no tags, as in
    NCCL. needs(action): the outputs that it takes. Raises ValueError where a send meets the receive
    of another message, where an action lacks what it needs, and where ranks wait for ever.
    """
    left = [list(program) for program in programs]
    here = [set() for _ in programs]                    # outputs, computed or received
    waiting = [[] for _ in programs]                    # (message, its number) of the batch posted
    posted = defaultdict(list)                          # (sender, receiver, who posts): messages

    def is_met(rank, message, number):
        there = message.receiver if rank == message.sender else message.sender
        others = posted[message.sender, message.receiver, there][number:]
        if others and others[0] != message:
            raise ValueError(f"rank {rank} posts {message} where rank {there} has {others[0]}")
        return bool(others)

    def takes_a_step(rank):
        step = left[rank][0]
        if not isinstance(step, list):
            missing = [need for need in needs(step) if need not in here[rank]]
            if missing:
                raise ValueError(f"rank {rank} comes to {step} without {missing[0]}")
            kind, stage, micro_batch = step
            here[rank].add((kind[0], stage, micro_batch))
            return True
        if not waiting[rank]:
            for message in step:
                mine = posted[message.sender, message.receiver, rank]
                waiting[rank].append((message, len(mine)))
                mine.append(message)
        if not all(is_met(rank, *post) for post in waiting[rank]):
            return False
        here[rank] |= {message.output for message, _ in waiting[rank]}
        waiting[rank] = []
        return True

    moves = True
    while moves:
        moves = False
        for rank, program in enumerate(left):
            while program and takes_a_step(rank):
                program.pop(0)
                moves = True
    stuck = [f"rank {rank} for the other side of {program[0]}"
             for rank, program in enumerate(left) if program]
    if stuck:
        raise ValueError(f"ranks wait for ever: {'; '.join(stuck)}")


class SleepingStage:
    """In place of chapter 07's Stage: sleeps instead of computing, and gives `out` every time."""

    is_last = False

    def __init__(self, seconds, out):
        self.seconds, self.out, self.for_b, self.for_w = seconds, out, {}, {}

    def weights(self, micro_batch):
        if self.out.is_cuda:                            # where the host does not wait for what the
            torch.cuda.current_stream().synchronize()   # action takes, its stream does
        time.sleep(self.seconds)

    def forward(self, micro_batch, *given):
        self.weights(micro_batch)
        return self.out

    backward = forward
