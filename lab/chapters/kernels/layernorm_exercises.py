"""The exercises of kernels/layernorm.py."""

import torch

from lab.classroom.exercise import Exercise, Same, random

OUTPUTS = "sum", "y", "mean", "rstd"
GRADIENTS = "dx", "dweight", "dbias"


def forward_bytes(chapter, *residual):
    return [chapter.forward_bytes(1000, 768, width, *residual) for width in (2, 4)]


def forward_of_two_rows(chapter):
    """Of three rows of 8 numbers, of which 5 count: all else stays as it was."""
    x, y, weight = random(3, 8).float(), torch.ones(3, 5), random(8).float()
    mean, rstd = torch.ones(2, 2)
    chapter.forward_kernel[(2,)](x, x, weight, weight + 1, y, y, mean, rstd, 8, 8, 5, 0.5, False,
                                 8)
    return {"y": y, "mean": mean, "rstd": rstd}


def forward_around_100(chapter):
    x = 100 + random(3, 9).float()[:, 2:7]
    found = chapter.layer_norm_forward(x, random(5).float(), random(5).float(), 0.5)
    return dict(zip(OUTPUTS, found))


def forward_with_residual(chapter):
    x, weight, bias = (random(*shape).bfloat16() for shape in ((3, 1000), (1000,), (1000,)))
    residual = random(3, 1024).bfloat16()[:, :1000]
    return dict(zip(OUTPUTS, chapter.layer_norm_forward(x, weight, bias, 0.1, residual)))


def backward_of_two_programs(chapter):
    dy, x = random(2, 14, 21).float()
    mean, rstd = random(2, 14).float()
    dx, sums = torch.ones(14, 21), torch.zeros(2, 4, 21)
    chapter.backward_kernel[(2, 2)](dy, x, x, dy[12], mean, rstd, dx, *sums, 21, 21, 21, 10, 21,
                                    True, 4, 16, 2, 1)
    return {"dx": dx, "dweight": sums[0].sum(0), "dbias": sums[1].sum(0)}


def backward_without_residual(chapter):
    dy, x = random(150, 24).float()[:, 3:], random(150, 21).float()
    found = chapter.layer_norm_backward(dy, x, random(21).float(), *random(2, 150).float())
    return dict(zip(GRADIENTS, found))


def backward_of_long_rows(chapter):
    dy, x = random(2, 5000).float(), random(2, 5000).float()
    found = chapter.layer_norm_backward(dy, x, random(5000).float(), *random(2, 2).float())
    return dict(zip(GRADIENTS, found))


EXERCISES = [
    Exercise(
        "layernorm.1", "forward_bytes", 1,
        "How many bytes does forward_kernel move, without and with a residual? mean and rstd "
        "are in float32. weight and bias come from memory once, and then from the cache.",
        ("What does the kernel load and store for each number of a row, for each row, and for "
         "all rows together?",
         "For a number: x and y, with a residual two more. For a row: two numbers of 4 bytes. "
         "For all rows: two vectors of dim numbers."),
        (Same(forward_bytes, "[forward_bytes(1000, 768, width) for width in (2, 4)]"),
         Same(forward_bytes, "[forward_bytes(1000, 768, width, True) for width in (2, 4)]",
              (True,))),
    ),
    Exercise(
        "layernorm.2", "forward_kernel", 2,
        "A program takes one row of x, and BLOCK is at least its width. Store y, mean and rstd "
        "of the row. With RESIDUAL, add the residual first and store the sum in the precision "
        "of the stream; it is this rounded sum that is normalised.",
        ("A row may be shorter than BLOCK. What do the places past its end add to the mean, "
         "and what to the variance?",
         "All loads and stores of a row take the mask, and one computes in float32. Past the "
         "end there is 0, which is right for the mean; but x - mean is not 0 there, and has to "
         "be made so before it is squared. eps stands under the root."),
        (Same(forward_of_two_rows,
              "two rows of 5 numbers in blocks of 8, eps 0.5, in a y of three rows"),
         Same(forward_around_100, "three rows of 5 numbers around 100, eps 0.5"),
         Same(forward_with_residual, "rows of 1000 bfloat16 with a residual, eps 0.1")),
    ),
    Exercise(
        "layernorm.3", "backward_kernel", 3,
        "Store dx for the rows of this program, and the program's own sums over them for "
        "dweight and dbias. It takes ROWS rows at a time, all programs taking turns, and has "
        "one of PARTS parts of their columns, but the two means are those of whole rows. With "
        "RESIDUAL, the gradient of the sum is added to dx.",
        ("Two of the four sums go along a row, and two go down the columns. Which of them "
         "need numbers of other parts? And what do rows and columns past the end add to each?",
         "Walk from program · ROWS to rows, num_programs(1) · ROWS at a time. load_part gives "
         "dy, g and n of this part, and g and n of each other part, with that part's weight. "
         "The sums of g and g · n over all parts, over width, are the means. dy · n and dy are "
         "added up over the rows of this part alone, and stored behind the loop in row "
         "`program`."),
        (Same(backward_of_two_programs,
              "10 rows of 21 by 2 programs of 2 parts, in blocks of 4 by 16, with a residual, "
              "in a dx of 14 rows"),
         Same(backward_without_residual, "150 rows of 21, without a residual"),
         Same(backward_of_long_rows, "2 rows of 5000, in two parts")),
    ),
]
