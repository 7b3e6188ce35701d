"""The exhibits of chapter 00: collectives that end, and have gathered or added something else."""

from lab.museum.exhibit import Exhibit

EXHIBITS = [
    Exhibit(
        "pytorch/pytorch#158903", "gather reads where the storage begins",
        "Over gloo, gather took a tensor's numbers from the beginning of its memory, in the order "
        "in which they lie there. So a tensor that was a column of a matrix sent other numbers "
        "than its own, and nothing was said. There had been a test of just this case for years, "
        "and it passed: all of its numbers were the same, so whichever were sent, they were right. "
        "The fix came with a test whose numbers all differ.",
        "00_collectives.py",
        "        net.exchange(send=parts[net.rank], to=0)\n",
        "        net.exchange(send=x[:len(parts[net.rank])], to=0)\n",
        4, "--numbers 3", ("gather, ranks with what PyTorch's gives",),
        ("gather, rounds", "gather, bytes sent by all ranks"),
    ),
    Exhibit(
        "meta-pytorch/torchcomms#477", "the root adds up all but its own",
        "A reduce_scatter for parts of different sizes was made of one reduce for each part. It "
        "handed the root's output to that reduce as the tensor to add into, and had not copied the "
        "root's own input there. So each sum lacked the addend of the rank that got it, which "
        "counted as zero. The fix is that copy.",
        "00_collectives.py",
        "    arrived = torch.empty_like(x)\n    for k in reversed",
        "    arrived = torch.empty_like(x)\n    x *= net.rank > 0\n    for k in reversed",
        4, "--numbers 3", ("reduce, ranks with what PyTorch's gives",
                           "all_reduce_tree, ranks with what PyTorch's gives"),
        ("reduce, rounds", "reduce, bytes sent by all ranks",
         "all_reduce_ring, ranks with what PyTorch's gives"),
    ),
]
