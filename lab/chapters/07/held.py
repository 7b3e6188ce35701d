"""What the schedules of chapters 07 and 09 are held to: their bubble, and their messages."""

from lab import schedules
from lab.run.instrument import Instrument


class Held(Instrument):
    def hold(self, run, answer):
        schedule = answer.get("schedule", {})
        if "bubble" in schedule:
            schedules.hold_bubble(run, schedule)
        if {"program", "programs"} & schedule.keys() and run.world > 1:
            schedules.hold_messages(run, schedule)
