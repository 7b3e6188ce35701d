"""The model of a run as chapter 10 has it."""

from common import Config
from lab.chapters import chapter


def as_planned(cfg: Config):
    """The same model, as a Model of the planner."""
    return chapter("10").Model(cfg.layers, cfg.dim, cfg.heads, cfg.kv_heads, cfg.hidden, cfg.gated,
                               cfg.vocab, cfg.seq, cfg.tie)
