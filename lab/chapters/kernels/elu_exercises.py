"""The exercises of kernels/elu.py."""

import torch

from lab.classroom.exercise import Exercise, Same, random


def bytes_of(chapter, name):
    return [getattr(chapter, name)(1000, width) for width in (2, 4)]


def instruction_budget(chapter, *machine):
    return chapter.instruction_budget(*machine)


def elu_of_numbers(chapter):
    """Each by its name, so that it is said where it is wrong."""
    x = torch.cat([-torch.logspace(-7, 1, 25), torch.tensor([0.0, -0.4, -0.5, -1, -100])])
    return {f"elu({each:.3g})": value for each, value in zip(x.tolist(), chapter.elu(x))}


def backward_of_40_numbers(chapter):
    dy, x, dx = random(64).float(), random(64).float(), torch.ones(64)
    chapter.elu_backward_kernel[(3,)](dy, x, dx, 40, 0.7, 16)
    return dx


def backward_of_rows(chapter):
    return chapter.elu_backward(random(5, 700).float(), 2 * random(5, 700).float(), 0.7)


EXERCISES = [
    Exercise(
        "elu.1", "chain_bytes fused_bytes", 1,
        "How many bytes go through the GPU's memory, with five operators that are a kernel "
        "each, and with one kernel for all of them? A mask has one byte for each number.",
        ("Each operator reads its inputs from memory and writes its output there. Which of "
         "the five reads or writes something else than one tensor of numbers?",
         "The comparison reads x and writes a mask. Three operators read a tensor and write "
         "one. The choice reads the mask and two tensors, and writes one. The one kernel reads "
         "x and writes y."),
        (Same(bytes_of, "[chain_bytes(1000, width) for width in (2, 4)]", ("chain_bytes",)),
         Same(bytes_of, "[fused_bytes(1000, width) for width in (2, 4)]", ("fused_bytes",))),
        "the bytes of a chain, and of one kernel",
    ),
    Exercise(
        "elu.2", "instruction_budget", 1,
        "At every tick of the clock each processor issues an instruction for 128 numbers. How "
        "many instructions may a kernel spend on a number before they take longer than to read "
        "it and to write it?",
        ("How many instructions does the GPU issue in a second? And how many numbers can be "
         "read and written in that second?",
         "The first is the product of processors, 128 and clock. The second is the bandwidth "
         "over the bytes that one number moves, in and out."),
        (Same(instruction_budget, "instruction_budget(2)", (2,)),
         Same(instruction_budget, "instruction_budget(4, 78, 1.4e9, 9e11)",
              (4, 78, 1.4e9, 9e11))),
    ),
    Exercise(
        "elu.3", "expm1", 2,
        "Give exp(x) - 1 of x <= 0 in float32, right to six digits, also where x is -1e-7. "
        "Triton has tl.exp, and no expm1.",
        ("exp(-1e-7) is 0.9999999, of which float32 keeps seven digits. How many are left once "
         "1 is subtracted, and which term of exp's series should not have been added at all?",
         "Near 0, add up the series without its 1: x · (1 + x · (1/2 + x · (1/6 + ...))), to "
         "so many terms that the next would not be seen. Further off, tl.exp(x) - 1 is right. "
         "tl.where chooses, number by number."),
        (Same(elu_of_numbers, "elu(x), for x from -100 to 0"),),
    ),
    Exercise(
        "elu.4", "elu_backward_kernel", 1,
        "Store the gradient of x for this program's block: dy where x > 0, and "
        "dy · alpha · exp(x) elsewhere. What is past the n-th number must be neither loaded "
        "nor stored.",
        ("How does elu_forward_kernel find its block, and how does it stop at the end?",
         "The numbers of a block begin at program_id · BLOCK. Both loads and the store take "
         "the same mask, and tl.where chooses between the two gradients."),
        (Same(backward_of_40_numbers,
              "of 64 numbers n = 40 are to be stored, in blocks of 16"),
         Same(backward_of_rows, "x of (5, 700), alpha 0.7")),
    ),
]
