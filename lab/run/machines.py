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

# Dense bf16 FLOP/s, summed in float32, by CUDA's name of the device: an SXM module has more than a
# PCIe card of the same name. Sources: the data sheets at nvidia.com/en-us/data-center/ a30, a100,
# h100, h200, grace-hopper-superchip, dgx-b200 (for 8 GPUs), l4 and l40s; of GeForce, the white
# papers on GA102, Ada and Blackwell. Many sheets give the rate for sparse matrices, which is twice
# the dense one. A T4 and a V100 have no bf16.
PEAK_FLOPS = {
    "NVIDIA A30": 165e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 5090": 209e12,
}
