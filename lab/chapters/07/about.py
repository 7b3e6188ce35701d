"""What lab/ knows of chapter 07 alone."""

PLAYS = {"The order in which": ("schedules", {"controls": "schedule ranks micro_batches"})}
UNSAVED = ("2bw",)      # what is under way when a step ends is no state that can be saved


def is_late(args):
    """Whether a step's gradient is that of weights which are a step old."""
    return args.variant == "2bw"
