"""What lab/ knows of chapter 08 alone."""

LIMITS = {"capacity_factor": (1e-6, 2**31, 1.25), "balance_weight": (0, 2**31, 0.01),
          "bias_speed": (0, 2**31, 0.001), "z_loss": (0, 2**31, 0.001)}
