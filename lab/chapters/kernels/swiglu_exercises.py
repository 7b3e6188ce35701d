"""The exercise of kernels/swiglu.py."""

import torch

from lab.classroom.exercise import Exercise, Same, random


def gradients_of_40_numbers(chapter):
    dy, up, gate = (random(64).float() for _ in range(3))
    dup, dgate = torch.ones(64), torch.ones(64)
    chapter.backward_kernel[(3,)](dy, up, 2 * gate, dup, dgate, 40, 16)
    return {"the gradient of up": dup, "the gradient of gate": dgate}


def gradients_of_16_bits(chapter):
    """Where silu is rounded on the way, the gradient of up is another."""
    dy, up, gate = (random(5, 700).half() for _ in range(3))
    dup, dgate = chapter.swiglu_backward(dy, up, gate)
    return {"the gradient of up": dup, "the gradient of gate": dgate}


EXERCISES = [
    Exercise(
        "swiglu.1", "backward_kernel", 2,
        "From dy, up and gate, store the gradients of up and of gate for this program's block, in "
        "float32 until they are stored. Forward has not kept silu(gate): compute it again.",
        ("y is a product of two factors, up and silu(gate). What is the gradient of each, and what "
         "does the second have to be multiplied by to become that of gate?",
         "With s = sigmoid(gate), that of up is dy · gate · s. silu'(gate) is s + gate · s · "
         "(1 - s). Two loads, sigmoid and two stores, all with the mask of the loads."),
        (Same(gradients_of_40_numbers, "of 64 numbers n = 40 are to be stored, in blocks of 16"),
         Same(gradients_of_16_bits, "float16, (5, 700)")),
    ),
]
