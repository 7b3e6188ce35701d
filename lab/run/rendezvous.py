"""Whether the messages of chapter 07's programs can block on any network."""

from collections.abc import Callable


def check_rendezvous(programs: list[list], needs: Callable) -> None:
    """Raise ValueError if a rank would wait for ever on the strictest network there is, where a
    message passes once it is computed and both of its ranks have come to it. programs: of each
    rank, its actions and messages. needs(action): the outputs that it takes."""
    left, here = [list(program) for program in programs], [set() for _ in programs]
    while any(left):
        passing = []                                    # ranks that get beyond their next step
        for rank, program in enumerate(left):
            step = program[0] if program else None
            is_action = hasattr(step, "kind")
            if is_action and here[rank].issuperset(needs(step)):
                passing.append(rank)
            if step and not is_action and step.output in here[step.sender]:
                other = step.receiver if rank == step.sender else step.sender
                passing += [rank] if left[other][:1] == [step] else []
        if not passing:
            raise ValueError(f"ranks wait for ever before {[program[:1] for program in left]}")
        for rank in passing:
            here[rank].add(left[rank].pop(0).output)
