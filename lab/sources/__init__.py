"""The five texts that the course grew from, row by row, each number beside the course's own.

`python -m lab.questions --seed 002` prints the rows of one: every formula, table and plot of it, in
its order. A row is a Row; a module has the rows of one text, and says what is left out, and why.

    asked             the tutorial's questions; the lecture's are beside its rows
    contradictions    what the texts say that does not hold
    worked            what rows and answers compute more than once
    texts             rows computed, and in words
"""

from typing import NamedTuple


class Source(NamedTuple):
    number: str             # by which it is asked for
    name: str
    title: str
    address: str


SOURCES = (
    Source("000", "playbook", "The Ultra-Scale Playbook (Hugging Face, 2025)",
           "https://huggingface.co/spaces/nanotron/ultrascale-playbook"),
    Source("001", "scaling_book", "How To Scale Your Model, part 5 (Austin et al., 2025)",
           "https://jax-ml.github.io/scaling-book/training"),
    Source("002", "megatron", "Efficient Large-Scale Language Model Training on GPU Clusters Using "
           "Megatron-LM (Narayanan et al., 2021)", "https://arxiv.org/abs/2104.04473"),
    Source("003", "lecture", "Scaling Transformers: a lecture on the playbook, in 45 slides", ""),
    Source("004", "tutorial", "Distributed Training Tutorial: a cheat sheet and 25 questions", ""),
)
