"""Writes and grades hunts: lab/museum/hunt.py."""

from lab.classroom import checks

if __name__ == "__main__":
    checks.warm_up()                                    # another interpreter imports torch already
    from lab.museum import hunt
    from lab.run import commands

    commands.program(hunt.main)
