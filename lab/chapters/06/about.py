"""What lab/ knows of chapter 06 alone."""

from lab.chapters import Stop

PLAYS = {"Who has to compute?": ("rings", {"ranks": 4})}
LIMITS = {"documents": (1, 2**31, 32), "window": (1, 2**31, 32)}
TOUR = (
    Stop("06_context_parallel.py --device=cpu --steps=5",
         "a ring in zig-zag, whose ranks work alike", 4, name="06_context_parallel"),
    Stop("06_context_parallel.py --device=cpu --steps=5 --variant=ring",
         "a plain ring, whose last rank works most", 4, name="06_context_parallel-ring"),
    Stop("06_context_parallel.py --device=cpu --steps=3 --documents=20 --cut=document",
         "packed documents, each cut in a zig-zag", 3, name="06_context_parallel-documents",
         drawn_on=4),
)
