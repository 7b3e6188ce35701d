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
        4, "--numbers 3", ("values",), ("sent",),
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
        4, "--numbers 3", ("values",), ("sent",),
    ),
    Exhibit(
        "pytorch/pytorch#192920", "and so do scatter, broadcast and reduce",
        "A year after gather had been mended, somebody tried the others with a column of a matrix. "
        "Over gloo, scatter, broadcast and reduce still take numbers from where the memory begins. "
        "NCCL refuses such tensors, so few had met it. Nothing is said: the numbers are others.",
        "00_collectives.py",
        "            net.exchange(send=parts[rank], to=rank)\n",
        "            net.exchange(send=x[:len(parts[rank])], to=rank)\n",
        4, "--numbers 3", ("values",), ("sent",),
    ),
    Exhibit(
        "callummcdougall/ARENA_3.0#407", "a ring that sends all of x in every round",
        "The solution of a course's exercise on the ring passed the whole tensor around, and not a "
        "part of it. After the first half every rank had the sum, and the second half did nothing. "
        "Its result was right, so no test of results could find it. But each rank moved 2(N-1) "
        "tensors, where a ring moves 2(N-1)/N of one, which is all that the ring is for.",
        "00_collectives.py",
        "    reduce_scatter(net, x)\n    all_gather(net, x)\n",
        "    chunk, arrived = x.clone(), torch.empty_like(x)\n"
        "    for hop in range(2 * (net.ranks - 1)):\n"
        "        net.exchange(send=chunk, to=net.right, receive=arrived, source=net.left)\n"
        "        x += arrived if hop < net.ranks - 1 else 0\n"
        "        chunk, arrived = arrived, chunk\n",
        4, "--numbers 3", ("sent",), ("values",),
    ),
    Exhibit(
        "rapidsai/rapidsmpf#857", "who has told the root may leave",
        "In a barrier each rank tells the root that it has come, and waits for an answer. The "
        "root answered one rank after the other. So a rank could leave before others had arrived. "
        "It was observed while somebody looked for the reason of deadlocks at the end of "
        "programs. A barrier that ends is not yet a barrier.",
        "00_collectives.py",
        "    for k in range((net.ranks - 1).bit_length()):\n"
        "        net.exchange(send=token[:1], to=(net.rank + 2**k) % net.ranks,\n"
        "                     receive=token[1:], source=(net.rank - 2**k) % net.ranks)\n",
        "    for other in range(1, net.ranks) if net.rank == 0 else [0]:\n"
        "        if net.rank > 0:\n"
        "            net.exchange(send=token[:1], to=0)\n"
        "        net.exchange(receive=token[1:], source=other)\n"
        "        if net.rank == 0:\n"
        "            net.exchange(send=token[:1], to=other)\n",
        4, "--numbers 3", ("sent", "values"), (),
    ),
]
