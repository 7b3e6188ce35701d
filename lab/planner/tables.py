"""Published runs, and what chapter 10 predicts of them.

The runs are in published.toml, playbook.toml and megatron.toml; the first lines of published.toml
describe the columns. ten: chapter 10's module, whichever is compared.
"""

import functools
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

FILES = "published", "playbook", "megatron"
MEASURED = "published", "gib"           # columns that the planner predicts


@functools.cache
def load(file):
    """The contents of a TOML file of this folder."""
    return tomllib.loads(Path(__file__).with_name(f"{file}.toml").read_text(encoding="utf-8"))


def find_table(name):
    """The table of that name, in whichever file."""
    for file in FILES:
        for table in load(file)["table"]:
            if table["name"] == name:
                return load(file).get("defaults", {}) | table
    raise KeyError(name)


def models(ten):
    """{name: Model}: the chapter's, and those that only published runs trained."""
    known = dict(ten.MODELS)
    for file in FILES:
        for name, sizes in load(file).get("models", {}).items():
            changes = {field: size for field, size in sizes.items() if field != "like"}
            known[name] = replace(known[sizes["like"]], **changes)
    return known


def fields_of(kind, values):
    """Those of the values that are fields of a class of the chapter."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


@dataclass(frozen=True)
class Run:
    """A row of a table. model, layout, cluster and software are the chapter's."""

    ten: object
    words: str              # the row's numbers, but what was measured
    published: float | None     # in the table's unit
    gib: float | None       # measured, of the fullest GPU
    model: object
    layout: object
    cluster: object
    software: object
    gpus: int
    batch: int
    unit: str
    scores: str

    @functools.cached_property
    def seconds(self):
        """Predicted, of a step."""
        return sum(self.ten.step_seconds(self.model, self.layout, self.cluster, self.software,
                                         self.batch).values())

    @property
    def flops(self):
        """Of a step and a GPU, by the table's convention."""
        recompute = self.layout.recompute
        return self.ten.step_flops(self.model, self.batch, self.scores, recompute) / self.gpus

    def in_unit(self, seconds):
        """What a step of so many seconds would be in the table's unit."""
        return {"s": seconds, "TFLOP/s": self.flops / seconds / 1e12,
                "tokens/s": self.batch * self.model.seq / seconds / self.gpus,
                "sequences/s": self.batch / seconds}[self.unit]

    @property
    def predicted(self):
        """By the planner, in the table's unit."""
        return self.in_unit(self.seconds)

    @property
    def error(self):
        """Of the prediction, as a share of what was published."""
        return self.predicted / self.published - 1

    def constant(self, tflops):
        """What is predicted if every GPU always computes so fast."""
        return self.in_unit(self.flops / (tflops * 1e12))

    @property
    def bytes(self):
        """Predicted, of the fullest GPU."""
        micro_batches = self.batch // (self.layout.dp * self.layout.micro_batch)
        return sum(self.ten.memory(self.model, self.layout, self.software, micro_batches).values())

    @property
    def fits(self):
        """Whether the planner would take it."""
        return self.bytes <= self.ten.ROOM * self.cluster.memory


def run_of(ten, table, row, changes):
    """The Run of a row. changes: {field: a value in place of the row's}."""
    columns = dict(zip(table["columns"], row, strict=True))
    values = table["fixed"] | columns | changes
    if "dtype" in values:
        values["fp8"] = values["dtype"] == "fp8"
    model, cluster = values.get("model"), values.get("cluster", table.get("cluster"))
    if model:
        model = replace(models(ten)[model], **fields_of(ten.Model, values))
    else:
        model = ten.gpt(values["layers"], values["dim"], values["heads"])
    cluster = replace(ten.CLUSTERS[cluster], **fields_of(ten.Cluster, values))
    software = ten.SOFTWARE[table["software"]] if "software" in table else ten.Software()
    layout = ten.Layout(**{"sp": values.get("tp", 1) > 1} | fields_of(ten.Layout, values))
    if "gpus" in values:
        layout = replace(layout, dp=values["gpus"] // (layout.tp * layout.cp * layout.pp))
    words = " ".join(str(columns[name]) for name in columns if name not in MEASURED)
    return Run(ten, words, values.get("published"), values.get("gib"), model, layout, cluster,
               replace(software, **fields_of(ten.Software, values)),
               layout.stage * layout.pp, values["batch"], table["unit"], table.get("scores", "all"))


def runs(ten, name, **changes):
    """The Runs of a table's rows; with changes, what the planner would say of other ones."""
    table = find_table(name)
    return [run_of(ten, table, row, changes) for row in table["rows"]]


def errors(runs):
    """Of all predictions, as shares of what was published."""
    return [run.error for run in runs]


def mean_and_largest(errors):
    """Of their sizes."""
    sizes = [abs(error) for error in errors]
    return sum(sizes) / len(sizes), max(sizes)
