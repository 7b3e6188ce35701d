"""What lab/ knows of the kernels alone."""

FILES = {"kernels/elu": None, "kernels/matmul": None, "kernels/layernorm": None,
         "kernels/rmsnorm": None, "kernels/swiglu": None, "kernels/grouped_matmul": None,
         "kernels/flash_attention": None, "kernels/fp8": "fp8"}
