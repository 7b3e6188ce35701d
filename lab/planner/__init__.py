"""Chapter 10's command line, what was published beside it, and its drawings."""
