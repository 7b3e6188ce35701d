"""What lab/ knows of chapter 08 alone."""

from lab.chapters import Stop

# How a small model's experts are balanced, for which two ranks are enough.
SMALL = ("08_expert_parallel.py --device=cpu --layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=32 "
         "--steps=200 --no-verify")
TOUR = (
    Stop("08_expert_parallel.py --device=cpu --steps=5",
         "rows to experts and back", 5, name="08_expert_parallel"),
    Stop(f"{SMALL} --balance=none",
         "experts that nobody balances", 9,
         name="08_expert_parallel-none", ranks=2, drawn_on=2),
    Stop(f"{SMALL} --balance=loss",
         "a loss that balances them", 3, name="08_expert_parallel-loss", ranks=2, drawn_on=2),
    Stop(f"{SMALL} --balance=bias",
         "a bias that does", 3, name="08_expert_parallel-bias", ranks=2, drawn_on=2),
)
LIMITS = {"capacity_factor": (1e-6, 2**31, 1.25), "balance_weight": (0, 2**31, 0.01),
          "bias_speed": (0, 2**31, 0.001), "z_loss": (0, 2**31, 0.001)}
