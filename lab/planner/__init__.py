"""Chapter 10's command line, worked problems, and what was published beside what it predicts."""
