"""The command line: flags and their ranges, refusals in one line, the edges of every command."""
