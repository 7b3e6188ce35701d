"""What a chapter says of a bad argument."""


def hold_refusals(run_chapter, name, table):
    """Exit status 2, and one line that names the flag and something that works.

    table: (flags, how many ranks, the flag that is named, what works).
    """
    for flags, world, named, works in table:
        status, output, errors = run_chapter(name, *flags.split(), WORLD_SIZE=world, RANK=0)
        assert (status, output, errors.count("\n")) == (2, "", 1), (flags, errors)
        assert errors.startswith("error: "), (flags, errors)
        assert named in errors and f"{works} would" in errors, (flags, errors)
