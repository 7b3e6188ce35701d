"""The exercises of kernels/: a list for each file."""

from lab.chapters.kernels import (
    elu_exercises,
    flash_attention_exercises,
    fp8_exercises,
    grouped_matmul_exercises,
    layernorm_exercises,
    matmul_exercises,
    swiglu_exercises,
)

EXERCISES = {"elu": elu_exercises.EXERCISES, "matmul": matmul_exercises.EXERCISES,
             "layernorm": layernorm_exercises.EXERCISES,
             "swiglu": swiglu_exercises.EXERCISES, "fp8": fp8_exercises.EXERCISES,
             "flash_attention": flash_attention_exercises.EXERCISES,
             "grouped_matmul": grouped_matmul_exercises.EXERCISES}
