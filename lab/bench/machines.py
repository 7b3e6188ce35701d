"""What machines can do, as their makers give it."""

# Dense bf16 FLOP/s of a chip, and bytes/s that it can send.
MACHINES = {
    "A100, NVLink 3": (312e12, 300e9),
    "A100, InfiniBand HDR": (312e12, 25e9),
    "H100, NVLink 4": (989e12, 450e9),
    "H100, InfiniBand NDR": (989e12, 50e9),
    "TPU v5p, one axis of ICI": (459e12, 180e9),
}

# Seconds that a message takes over these links, however small it is. Source: hwLat in NCCL's
# src/graph/tuning.cc, by which it chooses an algorithm: that of a ring and the protocol "Simple".
# (Small messages have another one, "LL", with 0.6 and 2.7 µs and a quarter of the bandwidth.)
LATENCY = {
    "A100, NVLink 3": 3.4e-6,
    "A100, InfiniBand HDR": 14e-6,
    "H100, NVLink 4": 3.4e-6,
    "H100, InfiniBand NDR": 14e-6,
}

# Dense bf16 FLOP/s of SXM modules (PCIe cards are slower), by CUDA's name of the device. Source:
# the data sheets at nvidia.com/en-us/data-center/ a100, h100, h200 and dgx-b200 (for 8 GPUs). From
# the H100 on they give the rate for sparse matrices, which is twice the dense one.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
