"""Writes and grades hunts: lab/classroom/hunt.py."""

from lab.classroom import checks

if __name__ == "__main__":
    checks.warm_up()                                    # another interpreter imports torch already
    from lab.classroom import hunt
    from lab.run import commands

    commands.program(hunt.main)
