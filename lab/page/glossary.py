"""The symbols of the course, and its words: what each means, and in which files.

A letter means what the file says that uses it: t is ranks in chapter 04 and tokens in chapter 11.
Some files use one twice; then an entry holds only beside what it names, in the paragraph or the row
of a table.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from lab import chapters


class Entry(NamedTuple):
    name: str
    meaning: str
    unit: str               # "": it is a count, or a name
    at: str                 # where it is defined: "04", in that lesson; "09 Unit", in a function
    files: dict             # {file in which it means this: what is in the paragraph, or (): any}

    @property
    def id(self):
        """Its place in the glossary: t-04."""
        beside = self.files.get(self.at.split()[0], ())[:1]
        words = " ".join((self.name, self.at, *beside)).replace("'", " prime")
        return re.sub(r"\W+", "-", words).strip("-")


def symbol(name, meaning, at, files="", unit="", beside=(), only=None):
    """files: "04 05", where it means this; only where `at` is, if empty. beside: words, one of
    which is in each paragraph where it does. only: {file: such words there}."""
    where = (files or at.split()[0]).split()
    return Entry(name, meaning, unit, at, {file: (only or {}).get(file, beside) for file in where})


SYMBOLS = (
    # ranks, and how many there are of each kind
    symbol("N", "ranks that work together", "00", "00 02 03 06 lab/checkpoints/checkpoint"),
    symbol("N", "ranks that share the experts", "08"),
    symbol("N", "ranks of data parallelism", "11"),
    symbol("N", "parameters of the model, without its embedding", "01 rule_of_thumb", "01"),
    symbol("N", "ranks that hold the unit", "09 Unit", "09", beside=("(N·k,)",)),
    symbol("n", "ranks that hold the same parameters", "09"),
    symbol("t", "ranks of tensor parallelism", "04", "04 05 07 09 10 11", only={
        "07": ("tensor-parallel",), "09": ("1/t of the heads",), "11": ("(t-1)/t",)}),
    symbol("p", "ranks of a pipeline", "07", "07 10"),
    symbol("r", "a rank's number, from 0", "07", "06 07"),
    symbol("v", "slices of the model that a rank of a pipeline holds", "07", "07 10"),
    symbol("U", "neighbours, such as a machine's, that exchange heads", "06"),
    *(symbol(axis, f"ranks of an axis of the mesh: {what}", "09", "09 10")
      for axis, what in {"dp": "other sequences", "pp": "other layers",
                         "cp": "other parts of a sequence", "tp": "other heads"}.items()),
    symbol("ep", "ranks that share the experts of a mixture", "09"),
    symbol("M", "machines", "08"),

    # a batch
    symbol("b", "sequences of a micro-batch", "04", "01 04 05 06 07 09 10", only={
        "01": ("s·b·h",), "06": ("b sequences", "·b·")}),
    symbol("s", "tokens of a sequence", "04", "01 04 05 06 07 08 09 10 kernels/flash_attention",
           only={"01": ("s·b·h",)}),
    symbol("seq", "tokens of a sequence", "01"),
    symbol("M", "micro-batches of a step", "03", "03 09"),
    symbol("m", "micro-batches of a step", "07", "07 10", only={"10": ("dp · b · m",)}),
    symbol("T", "tokens of a rank", "08"),
    symbol("T", "tokens of a micro-batch that the ranks of tp have together", "09"),
    symbol("t", "tokens of the batch for each GPU", "09", beside=("t·h", "tp·t")),
    symbol("t", "tokens of a step", "11", beside=("6·t·m·n", "5·m/t")),
    symbol("tokens", "tokens of a rank's last micro-batch", "02"),
    symbol("tokens", "tokens of a micro-batch", "03"),
    symbol("B", "tokens of a batch whose noise is as large as its gradient", "02",
           beside=("tr(Σ)",)),
    symbol("D", "documents that a sequence is packed from", "06"),
    symbol("W", "keys that a query sees: its window", "06", beside=("--window",)),

    # the model
    symbol("h", "the model's width, dim", "04", "01 04 05 06 07 08 09 10 11",
           only={"11": ("4·h",)}),
    symbol("dim", "the model's width", "01"),
    symbol("L", "layers, or blocks, of the model", "03", "01 03 04 05 09 10"),
    symbol("layers", "layers of the model", "01"),
    symbol("Ψ", "parameters of the model", "03", "03 lab/checkpoints/checkpoint"),
    symbol("Ψ'", "the parameters with the zeros of padding", "03", "03", "bytes"),
    symbol("Ψ", "parameters of an expert", "08"),
    symbol("Ψ", "parameters that n ranks hold alike", "09"),
    symbol("Ψ", "numbers in all matrices of blocks", "11"),
    symbol("V", "words of the vocabulary", "01"),
    symbol("f", "hidden features of the MLP", "01"),
    symbol("heads", "attention heads", "01", "01 05 06"),
    symbol("kv_heads", "heads of keys and values, fewer than heads with GQA", "01"),
    symbol("a", "attention heads", "10", "01 10", only={"01": ("s·b·h",)}),
    symbol("kv", "width of the keys, and of the values", "06", "06"),
    symbol("kv", "heads of keys and values", "05", "05"),
    symbol("h_kv", "width of the keys, and of the values", "08"),
    symbol("k", "width of the keys that a rank holds", "09", "09",
           beside=("T·k", "2k numbers", "k: the width")),
    symbol("E", "experts of a layer", "08"),
    symbol("K", "experts that a token takes", "08", "08 09 10"),
    symbol("factor", "an expert's places, over its share of the picks", "08", "08",
           beside=("factor ·",)),
    symbol("world", "all ranks", "08"),
    symbol("d", "numbers of a head", "kernels/flash_attention"),

    # what is kept, or recomputed
    symbol("A_in", "what a block's input takes", "01", "01", "bytes"),
    symbol("A_layer", "what a block keeps for backward", "01", "01", "bytes"),
    symbol("A_in", "activations inside of the sub-layers", "04", "04 05", "bytes"),
    symbol("A_out", "activations that norms read and write", "04", "04 05", "bytes"),
    symbol("c", "groups of blocks that are computed again together", "01"),
    symbol("K", "blocks in such a group", "01"),
    symbol("x", "an activation of a micro-batch, b·s·h·e", "05", "05", "bytes"),
    symbol("P", "parameters", "03", "03", "bytes"),
    symbol("G", "gradients", "03", "03", "bytes"),
    symbol("O", "optimizer states", "03", "03", "bytes"),
    symbol("k", "blocks in a unit", "03", "03", beside=("2k blocks", "2·ceil(L/k)", "k of L")),
    symbol("k", "numbers of a rank's shard", "03 Unit", "03 09", beside=("(N·k,)",)),

    # what is sent
    symbol("S", "what the tensor takes", "00", "00", "bytes"),
    symbol("S", "gradients", "02", "02", "bytes"),
    symbol("α", "latency: what a message takes, however small it is", "00", "00 03", "seconds"),
    symbol("B", "what a rank sends in a second", "00", "00 06", "bytes/s", only={
        "06": ("B bytes/s",)}),
    symbol("m", "what a message has", "00", "00", "bytes", ("m/B",)),
    symbol("bandwidth", "what a rank sends in a second", "02", "02 03 07 08", "bytes/s"),
    symbol("W", "what a rank sends in a second", "04", "04 05", "bytes/s"),
    symbol("e", "bytes of a number", "04", "04 05 06 07 08"),
    symbol("g", "bytes of a gradient, for each parameter", "02", "02 03"),
    symbol("p", "bytes of a parameter", "03", "03"),
    symbol("B", "bytes of a number", "kernels/elu",
           "kernels/elu kernels/layernorm kernels/rmsnorm kernels/swiglu kernels/flash_attention"),

    # what is computed
    symbol("C", "what a rank computes in a second", "04", "04 05", "FLOP/s"),
    symbol("F", "what a rank computes in a second", "06", "06", "FLOP/s", ("F FLOP/s",)),
    symbol("parameters", "parameters of the model", "02"),
    symbol("F", "the time of a forward of a micro-batch, or this action", "07", "07"),
    symbol("B", "the time of a backward for the inputs, or this action", "07", "07 09"),
    symbol("W", "a stage's weights after so many batches", "07", "07",
           beside=("W(t-1)",)),
    symbol("t", "a batch's number", "07", beside=("W(t-1)",)),
    symbol("W", "the time of a backward for the weights, or this action", "07", "07 09"),
    symbol("F&B", "the time of a forward and a backward that run at once", "07"),
    symbol("k", "blocks of a stage", "07", "07", beside=("24·b·s·h²·k", "e/(24h)", "k blocks")),
    symbol("k", "how far F is ahead: once, or twice", "07 zero_bubble", "07",
           beside=("k(p-1-r)",)),
    symbol("n", "columns of the matrix behind f", "05"),
    *(symbol(one, "a size of a matrix: (m, k) by (k, n) gives (m, n)", "01",
             "01 10 kernels/matmul", only={"01": ("2mkn",), "10": ("2·m·k·n",)}) for one in "mkn"),
    symbol("F", "FLOPs of the update of all matrices", "11", "11"),

    # matrices and vectors
    *(symbol(one, f"the tensor of rank {rank}", "00", "00", beside=("a+b+c", "a, b and c"))
      for rank, one in enumerate("abc")),
    symbol("G", "the mean gradient of single tokens", "02"),
    symbol("Σ", "the covariance of the gradients of single tokens", "02"),
    symbol("A", "activations, the left matrix of a product", "04"),
    symbol("B", "weights, the right matrix of a product", "04", beside=("A·B", "all of A")),
    symbol("m", "the largest logit", "04", beside=("exp(logit - m)", "maximum")),
    symbol("logit", "a score of a token of the vocabulary", "04"),
    symbol("score", "a query times a key", "06"),
    symbol("lse", "logarithm of the sum of exp(score), for each query", "06",
           "06 kernels/flash_attention"),
    symbol("out", "attention's output", "06", "06 kernels/flash_attention"),
    symbol("v", "values", "06", "06 kernels/flash_attention"),
    symbol("q", "queries", "06", "06 kernels/flash_attention"),
    symbol("k", "keys", "06", "06", beside=("dS @ k",)),
    symbol("k", "keys", "kernels/flash_attention"),
    symbol("S", "scores of a block", "06"),
    symbol("P", "attention's weights: exp(S - lse)", "06"),
    symbol("M", "momentum of a matrix", "11"),
    symbol("U", "left singular vectors of the momentum", "11"),
    symbol("V", "right singular vectors of the momentum", "11"),
    symbol("S", "singular values of the momentum", "11"),
    symbol("s", "a singular value", "11"),
    symbol("X", "the momentum over its norm, and what the steps make of it", "11"),
    *(symbol(one, "a coefficient of a step of Newton-Schulz", "11", "11",
             beside=("(a, b, c)", "a·X")) for one in "abc"),
    symbol("W", "a matrix of weights", "11"),
    symbol("lr", "learning rate", "11"),
    symbol("decay", "weight decay", "11"),
    symbol("m", "rows of a matrix", "11"),
    symbol("n", "columns of a matrix", "11"),
    symbol("scores", "queries times keys", "kernels/flash_attention"),
    symbol("weights", "softmax of the scores", "kernels/flash_attention"),
    symbol("delta", "of a row, the sum of dout · out", "kernels/flash_attention"),
    symbol("x", "the input", "kernels/elu", "kernels/elu kernels/layernorm kernels/rmsnorm"
           " kernels/swiglu kernels/fp8"),
    symbol("y", "the output", "kernels/elu", "kernels/elu kernels/layernorm kernels/rmsnorm"
           " kernels/swiglu kernels/fp8"),
    symbol("w", "the weights", "kernels/fp8"),
    *(symbol(one, meaning, "07 LinearInHalves", "07", beside=("y = x Wᵀ",)) for one, meaning in
      {"x": "a linear's input", "y": "its output", "W": "its weights"}.items()),
    *(symbol(f"BLOCK_{one}", "a tile's sizes", "kernels/matmul") for one in "MN"),
    symbol("alpha", "the depth of ELU's negative side", "kernels/elu"),
    symbol("mean", "the mean of a row", "kernels/layernorm"),
    symbol("var", "the variance of a row", "kernels/layernorm"),
    symbol("eps", "a little, against a division by zero", "kernels/layernorm",
           "kernels/layernorm kernels/rmsnorm"),
    symbol("rstd", "1 over the standard deviation of a row", "kernels/layernorm"),
    symbol("rrms", "1 over the root mean square of a row", "kernels/rmsnorm"),
    symbol("rms", "the root mean square of a row", "kernels/rmsnorm"),
    symbol("weight", "a factor for each column", "kernels/layernorm",
           "kernels/layernorm kernels/rmsnorm"),
    symbol("bias", "what is added to each column", "kernels/layernorm"),
    symbol("g", "dy · weight", "kernels/layernorm", "kernels/layernorm kernels/rmsnorm"),
    symbol("n", "the input, normalised", "kernels/layernorm",
           "kernels/layernorm kernels/rmsnorm"),
    symbol("gate", "the output that decides", "kernels/swiglu"),
    symbol("up", "the output that goes on", "kernels/swiglu"),
    symbol("s", "sigmoid(gate)", "kernels/swiglu"),
    symbol("scale", "what a tile's numbers are divided by", "kernels/fp8"),
    symbol("values", "numbers of 8 bits", "kernels/fp8"),
    symbol("amax", "a tile's largest number", "kernels/fp8"),
)

TERMS = (
    symbol("rank", "a process with its own memory and, where there are GPUs, its own GPU", "00"),
    symbol("collective", "an operation that all ranks call together", "00"),
    symbol("latency", "what a message takes, however small it is", "00"),
    symbol("kept", "held from forward to backward, which reads it", "01", "01 05"),
    symbol("activations", "what forward leaves behind and backward reads", "01"),
    symbol("MFU", "FLOPs that the model needs, over the time and the chip's peak", "01", "01 10"),
    symbol("HFU", "the same, with what is recomputed", "01", "01 10"),
    symbol("bucket", "several gradients in one flat tensor, sent together", "02"),
    symbol("unit", "a module whose parameters are gathered together", "03"),
    symbol("shards", "the N equal parts of a unit, of which each rank keeps one", "03"),
    symbol("GQA", "grouped-query attention: fewer heads of keys and values than of queries", "04",
           "04 05 06 09"),
    symbol("zig-zag", "a rank holds a chunk from the front and one from the back", "06"),
    symbol("stage", "the slice of the model that one rank holds", "07"),
    symbol("bubble", "the time in which a rank of a pipeline is idle", "07", "07 10"),
    symbol("alive", "from a micro-batch's forward to the end of its backward", "07"),
    symbol("schedule", "the order in which a rank works", "07"),
    symbol("router", "a small matrix that gives each token a score for each expert", "08"),
    symbol("gate", "the weight of an expert for a token", "08"),
    symbol("row", "the vector of one token", "08"),
)


# ----------------------------------------------------------------------------------- in a file

def number_of(file):
    """What the entries call a file, by its name or its page: "04", or "kernels/elu"."""
    return file[:2] if file[0].isdigit() else file.removesuffix(".html").replace("-", "/")


@lru_cache(maxsize=64)
def of_file(file):
    """{name: its entries in a file}, first those that hold beside something."""
    found, number = {}, number_of(file)
    for entry in sorted(listed(file), key=lambda entry: not entry.files[number]):
        found.setdefault(entry.name, []).append(entry)
    return found


def meaning(name, file, text):
    """The Entry of a symbol in a paragraph of a file, or None."""
    for entry in of_file(file).get(name, ()):
        beside = entry.files[number_of(file)]
        if not beside or any(words in text for words in beside):
            return entry
    return None


def listed(file):
    """The symbols of a file."""
    return by_letter(one for one in SYMBOLS if number_of(file) in one.files)


def words(file):
    return by_letter(one for one in TERMS if number_of(file) in one.files)


def by_letter(entries):
    return sorted(entries, key=lambda entry: (entry.name.casefold(), entry.name))


def page_of(entry):
    """Where it is defined: "09 Unit" is a function of chapter 09."""
    file, _, function = entry.at.partition(" ")
    name = chapters.name_of(file) if file.isdigit() else file.replace("/", "-")
    return f"{name}.html#{function or 'lesson'}"


def said(entry):
    """The meaning, with its unit."""
    return f"{entry.meaning}, in {entry.unit}" if entry.unit else entry.meaning
