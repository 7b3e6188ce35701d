"""Wrong answers to the exercises of chapter 10."""

from tests.chapters.wrong_answers import Wrong

WRONG = {
    "10.1": [
        Wrong("2 * m * k * n / flops", "m * k * n / flops", "and should be"),
        Wrong("width * (m * k + k * n) + 2 * m * n", "width * (m * k + k * n + m * n)",
              "and should be"),
        Wrong("FP8 * self.flops, 1", "FP8 * self.flops, 2", "in FP8"),
        Wrong("2 * m * k * n / flops + moved / self.bandwidth",
              "max(2 * m * k * n / flops, moved / self.bandwidth)", "and should be"),
    ],
    "10.2": [
        Wrong("hops / n * size", "size", "seconds of a gigabyte"),
        Wrong("min(hops, nodes)", "hops", "seconds of a gigabyte: 32"),
        Wrong("math.ceil(n * stride / cluster.per_node)", "n * stride // cluster.per_node",
              "in 3 calls"),
        Wrong("n % most or most", "most", "bytes/s"),
        Wrong("waits = calls * ", "waits = ", "in 3 calls"),
        Wrong("if n * stride <= cluster.per_node", "if n <= cluster.per_node", "bytes/s"),
        Wrong("members * cluster.nic * NIC", "cluster.nic * NIC", "bytes/s"),
    ],
    "10.3": [
        Wrong("tokens * model.keys,", "tokens * model.values,", "numbers of a layer"),
        Wrong("of_mlp * hidden", "2 * hidden", "numbers of a layer"),
        Wrong("outside = cut if self.sp else 1 / self.cp", "outside = cut", "shares"),
        Wrong("max(1 / self.tp, 1 / model.kv_heads)", "1 / self.tp", "shares"),
    ],
    "10.4": [
        Wrong("min(m, alive[layout.schedule])", "alive[layout.schedule]", "micro-batches alive"),
        Wrong("p - stage,", "p,", "on the last stage"),
        Wrong("(p - 1) / v * (F + B + W)", "(p - 1) * (F + B + W)", "the bubble"),
    ],
    "10.5": [
        Wrong(", 4 if recompute", ", 3 if recompute", "and should be"),
        Wrong("(passes * (2 * weights + attention) + 3 * head)",
              "passes * (2 * weights + attention + head)", "and should be"),
    ],
    "10.6": [
        Wrong("(found.total, found.bytes)", "found.bytes", "plans of the check's own"),
        Wrong("(others if found.why else fit)", "(fit if found.memory else others)",
              "others is "),
    ],
    "10.7": [
        Wrong("math.comb(allowed * m - m, k)", "math.comb(allowed * m - k, m)",
              "machines of a token"),
        Wrong("min(model.node_limit or machines, machines)", "machines", "machines of a token"),
        Wrong("max(far / (cluster.nic * NIC), near / (cluster.nvlink * NVLINK))",
              "(far / (cluster.nic * NIC) + near / (cluster.nvlink * NVLINK))", "seconds of rows"),
        Wrong("k * (1 / machines - 1 / ep)", "k * (1 - 1 / ep)", "seconds of rows"),
        Wrong("machines_of_token(model, machines) * (1 - 1 / machines)",
              "machines_of_token(model, machines)", "seconds of rows"),
        Wrong("layout.stage // cuts[kind]", "layout.dp * layout.cp", "what a GPU has"),
        Wrong("for first in (False, True)]", "for first in (False,)]", "what a GPU has"),
    ],
}
