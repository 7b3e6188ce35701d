"""The exercises of chapter 09: places in the mesh, groups, who holds what, and whole steps."""

from argparse import Namespace
from collections import OrderedDict
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.classroom.exercise import TINY, Exercise, Run, Same, alone, random


def places(chapter, pp, dp, cp, tp, order):
    args = Namespace(pp=pp, dp=dp, cp=cp, tp=tp, order=order)
    return [str(place) for place in chapter.places_of_ranks(args)]


def ranks_by_pp_and_tp(chapter):
    every = [chapter.Place(pp, dp, 0, tp)
             for pp in range(2) for dp in range(2) for tp in range(2)]
    return sorted(map(sorted, chapter.sort_ranks(every, lambda at: (at.pp, at.tp))))


def groups_of_rank_5(chapter, pp, dp, cp, tp, ep, order):
    as_rank_5()
    args = Namespace(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, order=order, model=TINY,
                     experts=8 if ep > 1 else 0)
    axes, holders = chapter.make_groups(args, True)
    ranks = dist.get_process_group_ranks
    return {"axes": {axis: ranks(group) for axis, group in axes.items()},
            "holders": {kind: ranks(group) for kind, group in holders.items()},
            "groups_of_holders": len(set(holders.values()))}


def as_rank_5():
    """Of 16, of which the others are not there."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)


def stage_of_rank_5(chapter, experts, gated, documents=None, **ranks):
    """How two blocks and a head are cut. ranks: of this rank's group along each axis."""
    as_rank_5()
    axes = {axis: dist.new_group(those) for axis, those in ranks.items()}
    sizes = vars(TINY) | {"layers": 2, "dim": 16, "heads": 4, "kv_heads": 2, "gated": gated}
    cfg = chapter.Mixture(**sizes, experts=experts, shared_expert=bool(experts))
    args = Namespace(model=cfg, documents=documents, micro_batches=3)
    stage, core = chapter.build(cfg)[1:], lambda q, k, v: v
    chapter.cut_stage(stage, args, axes, core)
    found = {p.global_name: {"shape": tuple(p.shape), "cuts": [
        [cut.dim, cut.index, cut.parts, dist.get_process_group_ranks(cut.group)]
        for cut in getattr(p, "cuts", ())]} for p in stage.parameters()}
    for name, block in (("block1", stage[0]), ("block2", stage[1])):
        for part in ("attn", "mlp"):
            inner, around = getattr(block, part), "nothing"
            if isinstance(inner, chapter.SequenceParallel):
                around = f"SequenceParallel over {dist.get_process_group_ranks(inner.group)}"
                inner = inner.inner
            found[f"around {name}.{part}"] = around
            if part == "attn":
                found[f"the core of {name}"] = "given" if inner.core is core else "its own"
            elif experts:
                for axis in ("ep", "sequence"):
                    group = getattr(inner, axis)
                    found[f"{name}.mlp.{axis}"] = group and dist.get_process_group_ranks(group)
                inner.seen.extend(range(5))             # of exchanges
                found[f"what {name}.mlp.seen keeps of five"] = [*inner.seen]
    return found


def llama_of_rank_5(chapter):
    return stage_of_rank_5(chapter, 0, True, cp=[1, 5], tp=[4, 5, 6, 7])


def mixtures_of_rank_5(chapter):
    axes = {"tp": [4, 5], "ep": [4, 5, 6, 7], "cp and tp": [4, 5]}
    return stage_of_rank_5(chapter, 8, False, **axes)


def documents_on_rank_5(chapter):
    return stage_of_rank_5(chapter, 0, False, documents=9)


def dense_without_tp(chapter):
    return stage_of_rank_5(chapter, 0, False, cp=[4, 5])


class Group:
    """Of so many ranks, which are not there."""

    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


def notes_of_holders(chapter):
    sizes = {"tables": 8, "norms": 8, "queries": 4, "keys": 6, "mlp": 1, "tied": 16}
    holders = {kind: Group(ranks) for kind, ranks in sizes.items()}
    mixture = chapter.Mixture(**vars(TINY) | {"layers": 1, "tie": True}, experts=4)
    parameters = list(chapter.build(mixture).parameters())
    chapter.note_holders(parameters, holders)
    return {p.global_name: {"kind": p.kind, "copies": p.copies,
                            "holders": p.holders is holders[p.kind]}
            for p in parameters}


def units(chapter, stage, tie=False, bucket=2**22):
    """Of two blocks, by their parameters. Who holds the same is told by the check: vectors are held
    by eight ranks, keys and values by four, and all else by one."""
    sizes = vars(TINY) | {"layers": 2, "dim": 16, "tie": tie}
    model = chapter.build(chapter.Mixture(**sizes))
    groups = {ranks: Group(ranks) for ranks in (8, 4, 1)}
    for p in model.parameters():
        is_key = ".k." in p.global_name or ".v." in p.global_name
        ranks = 8 if p.ndim == 1 else 4 if is_key else 1
        p.holders, p.copies = groups[ranks], ranks

    def unit(parameters, stage, keep_gathered=False):
        """In place of Unit."""
        return Namespace(said=[f"{p.global_name}, on {p.holders.size()}" for p in parameters]
                         + [f"stage {stage}, kept {keep_gathered}"])

    with (mock.patch.object(chapter, "Unit", unit),
          mock.patch.object(chapter.common, "ONE_BUCKET", bucket)):
        found = chapter.make_units(nn.ModuleList([model[:2], model[2:]]), stage, stage == 3)
    of_modules = {f"module {i}": sorted(unit.said for unit in module.units)
                  for i, module in enumerate(model)}
    return of_modules | {"in all": sorted(unit.said for unit in found)}


class NotedUnit:
    """In place of Unit: it notes when it is freed."""

    def __init__(self, name, said):
        self.name, self.said = name, said

    def free(self, last=False):
        self.said.append(f"free {self.name}" + ", last" * last)


def through_a_stage(chapter, first, last):
    """Two micro-batches forward, and back. What is called when, and what comes out of it."""
    said, names = [], [*first, "middle", *last]
    layers = {"embedding": nn.Embedding(6, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 6)}
    slice_of_model = nn.Sequential(OrderedDict((name, layers[name]) for name in names)).double()
    for p in slice_of_model.parameters():
        p.data.copy_(random(*p.shape))
    for name, module in slice_of_model.named_children():
        module.units = [NotedUnit(name, said)]
    positions = torch.tensor([0, 3, 4])
    stage = chapter.Stage(slice_of_model, positions)
    stage.reduce = lambda units, last: said.append(f"reduce {units[0].name}" + ", last" * last)

    def gather(modules):
        """It looks at two modules, the first and the next."""
        said.append("gather " + ", ".join(module.units[0].name for module in [*modules][:2]))

    found = {"calls": said}
    with mock.patch.object(chapter, "gather", gather):
        targets = torch.tensor([[1, 0, 0, 5, -100, 2]] * 2)
        for i in (0, 1):
            x = torch.randint(6, (2, 6)) if first else random(2, 3, 4)
            out = found[f"output {i}"] = stage.forward(i, x, targets, 7)
        found["output has a graph"] = out.requires_grad
        for i in (0, 1):
            gradient = None if last else random(*out.shape)
            found[f"gradient {i}"] = stage.backward(i, gradient, i == 1)
    return found | {name: p.grad for name, p in slice_of_model.named_parameters()} \
        | {"micro-batches still kept": [*stage.kept_for_backward]}


def summed(chapter, stage):
    """Of two micro-batches on two ranks; of the second, one parameter has no gradient."""
    rank, parameters = dist.get_rank(), [nn.Parameter(random(*shape)) for shape in ((2, 3), (3,))]
    for p in parameters:
        p.holders = dist.group.WORLD
    unit, found = chapter.Unit(parameters, stage, False), {}
    for i, gradients in enumerate(zip(random(2, 2, 2, 3)[rank], random(2, 2, 3)[rank])):
        for p, gradient in zip(parameters, gradients):
            p.grad = gradient.clone()
        if i:
            parameters[1].grad = None
        unit.start_reduce()
        unit.finish_reduce()
        unit.finish_reduce()                            # nothing is under way any more
        found |= {f"p{k}.grad after {i}": None if p.grad is None else p.grad.clone()
                  for k, p in enumerate(parameters)}
        if stage:
            found[f"shard.grad after {i}"] = unit.shard.grad.clone()
    return found


def dtype_of_no_gradient(chapter):
    """Of bf16 weights with a master, none of which has a gradient."""
    p = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    p.holders = alone()
    unit = chapter.Unit([p], 1, False)
    unit.shard.grad_dtype = torch.float32
    unit.hold(unit.full)
    unit.start_reduce()
    unit.finish_reduce()
    return f"{unit.shard.grad.dtype}"


def balanced(chapter, layers, stages):
    return chapter.balanced(layers, stages)


class Unit:
    """In place of chapter 09's: it notes what is called. freed: it has no memory for numbers."""

    def __init__(self, number, stage, freed, said):
        self.number, self.stage, self.said, self.gathering = number, stage, said, None
        self.full = torch.zeros(0 if freed else 1)

    def start_gather(self):
        self.said.append(f"start {self.number}")
        self.gathering = self

    def wait(self):
        self.said.append(f"wait {self.number}")


def gathers_of_three_modules(chapter, stage, freed):
    """The second module has two units; of what is there already, the first is under way."""
    said = []
    units = [Unit(number, stage, number in freed, said) for number in range(4)]
    if 0 not in freed:
        units[0].gathering = units[0]
    modules = [Namespace(units=own) for own in (units[:1], units[1:3], units[3:])]
    chapter.gather(modules)
    return ", ".join(said)


def sent_in_a_layer(chapter, *sizes):
    return chapter.sent_in_a_layer(*sizes)


def traffic(chapter, experts, recompute, cp, tp, ep, pp):
    """Of a rank of 8, two blocks and three micro-batches, whose rows come from all alike."""
    args = Namespace(cp=cp, tp=tp, ep=ep, pp=pp, micro_batch=2, top_k=2, recompute=recompute,
                     model=chapter.Mixture(**vars(TINY) | {"experts": experts}))
    rows = 6 * 2 * TINY.seq * 2 * 2 // (args.cp * args.tp) if experts else 0
    return chapter.traffic(args, 8, 6, rows, 3, 4)


EXERCISES = [
    Exercise(
        "09.1", "places_of_ranks sort_ranks", 1,
        "Give the Place of every rank. args.order is a string that names the axes, such as "
        "\"pp,dp,cp,tp\": along the last of them, ranks are neighbours. And sort ranks into lists: "
        "together are those for whose places key(place) is the same.",
        ("Of 8 ranks with --order pp,dp,cp,tp, which two differ in their place on pp alone? In "
         "which order does itertools.product count?",
         "product of a range for each axis, in the order of args.order: the last one runs "
         "fastest. A Place takes its axes by name, whatever their order is. In sort_ranks, a "
         "defaultdict(list) has the ranks of each key."),
        (Same(places, "pp 2, dp 2, tp 2, in the usual order", (2, 2, 1, 2, "pp,dp,cp,tp")),
         Same(places, "pp 2, cp 2, tp 3, --order tp,cp,dp,pp", (2, 1, 2, 3, "tp,cp,dp,pp")),
         Same(ranks_by_pp_and_tp, "8 ranks, by pp and tp")),
        "where each rank stands",
    ),
    Exercise(
        "09.2", "make_groups", 3,
        "Give this rank's group along tp, cp, pp, ep and \"cp and tp\" (a sequence's ranks), "
        "if it has more than one rank; and for each kind of parameter (those of KINDS, norms, "
        "and tied if tied_stages) the group of those who hold the same part. Kinds of the same "
        "ranks share a group. The report knows a group by its group_desc: the axis, or a name "
        "of its own.",
        ("Two ranks are together on tp if all else of their places is the same. When do two "
         "ranks hold the same part of q, of k, of an expert? The lesson's table says it.",
         "Each group is a key for sort_ranks, whose lists go to dist."
         "new_subgroups_by_enumeration. Along an axis, it is the place with that axis set to "
         "0; for ep, each ep neighbours of a stage. For tables and norms it is pp; for queries pp "
         "and tp; for keys pp and tp · n // t, if t ranks of tp hold n different parts of them; "
         "for mlp as for queries or, if there are experts, each ep-th rank of a stage; for tied pp "
         "or its mirror image, whichever is less."),
        (Same(groups_of_rank_5, "the groups of rank 5 of 16, with pp 2, dp 4, tp 2, ep 4",
              (2, 4, 1, 2, 4, "pp,dp,cp,tp")),
         Same(groups_of_rank_5, "the groups of rank 5 of 16, with cp 2, tp 8, 4 kv heads, "
              "--order tp,cp,dp,pp", (1, 1, 2, 8, 1, "tp,cp,dp,pp")),
         Run(4, "--dp 2 --tp 2 --kv-heads 1 --experts 4 --ep 2 --batch 12 --micro-batch 2")),
    ),
    Exercise(
        "09.3", "cut_stage", 3,
        "Cut the blocks of a stage as the lesson's table says, and put SequenceParallel around "
        "sub-layers that tp cuts; a mixture takes the rank's own tokens, and is told ep and its "
        "sequence's group. Under cp, and with documents, attention gets the core. "
        "`seen` is to keep no more than a step's micro-batches.",
        ("Take the parameters of a block one by one. Which axis cuts it, along which "
         "dimension, into how many parts? What of this is needed only if that axis has more "
         "than one rank?",
         "keep_shard(module, name, dim, group, parts). tp cuts q, up and gate along 0, o and "
         "down along 1, k and v along 0 into no more parts than kv heads. mlp.columns are up "
         "and, if there is one, gate. Experts, (experts, dim, hidden) and (experts, hidden, "
         "dim), are cut along 0 by ep, and each is whole. seen is a deque with a maxlen."),
        (Same(llama_of_rank_5, "a Llama's blocks on rank 5, with cp 2 and tp 4"),
         Same(mixtures_of_rank_5, "mixtures on rank 5, with tp 2 and ep 4"),
         Same(dense_without_tp, "a GPT's blocks on rank 5, with cp 2 alone"),
         Same(documents_on_rank_5, "the same with documents alone"),
         Run(4, "--cp 2 --tp 2 --batch 4 --micro-batch 2 --ignore 0.3 --block llama --ffn 96"),
         Run(4, "--dp 2 --tp 2 --kv-heads 1 --experts 4 --ep 2 --batch 12 --micro-batch 2")),
    ),
    Exercise(
        "09.4", "note_holders", 2,
        "Note on each parameter its kind (p.kind), the group of those who hold the same part "
        "of it (p.holders), and for the norm how many they are (p.copies).",
        ("A parameter's global name says what it is. Which kind is left for what no word of "
         "KINDS is in?",
         "The kind is that of the word of KINDS that p.global_name contains, else norms. If "
         "there are holders of tied, the embedding, which is the head as well, is of that "
         "kind."),
        (Run(4, "--pp 2 --tp 2 --batch 3 --ignore 0.3"),
         Same(notes_of_holders, "a tied model with one mixture")),
    ),
    Exercise(
        "09.5", "make_units", 2,
        "Make a Unit for each module of the list and each group of holders; module.units are "
        "those of a module. What two modules share belongs to the first. Stage 0 only sums "
        "gradients, and has no unit for what one rank holds alone.",
        ("Why can the q and the norms of one block not be in the same unit, if tp is 2?",
         "A unit is shared out among the ranks of one group, p.holders. Walk over the modules "
         "of all stages (`model` is a list of lists), sort a module's parameters by p.holders, "
         "and leave out those that were seen before."),
        (Same(units, "stage 1", (1,)),
         Same(units, "stage 3, tied, and kept", (3, True)),
         Same(units, "stage 0, of few numbers", (0,)),
         Same(units, "stage 0, of many numbers", (0, False, 100)),
         Run(2, "--preset gpt2 --vocab 128 --dp 2 --zero 2 --batch 4 --micro-batch 1 "
                "--verify"),
         Run(4, "--dp 2 --tp 2 --zero 2 --batch 12 --micro-batch 2 --ignore 0.3"),
         Run(2, "--pp 2 --zero 3 --batch 3 --layers 3 --schedule 1f1b")),
    ),
    Exercise(
        "09.6", "Stage.forward Stage.backward", 2,
        "Put a micro-batch through the stage's modules, each with a detached input, and keep what "
        "its backward needs, no more; then go back the same way. Tokens and targets are those of "
        "whole sequences, of which this rank has self.positions. Parameters are there from a "
        "module's gather until its units are freed; after its backward, self.reduce.",
        ("Where does the graph of a module begin, and where does it end? What goes from one "
         "module to the one before it in backward?",
         "Before forward and backward of module k, gather(self.modules[k:]), or [k::-1] on the "
         "way back; after them each of module.units has its free(), in backward with `last`. "
         "Keep x and get_gradient_edge(out), which does not keep out alive. Tokens get no "
         "gradient. The last stage ends with loss_sum over its targets / valid. Backward goes "
         "through the modules in reverse: autograd.backward(edge, gradient), and x.grad is the "
         "next gradient."),
        (Same(through_a_stage, "a stage with the embedding", (("embedding",), ())),
         Same(through_a_stage, "a stage with the head", ((), ("head",))),
         Run(4, "--pp 2 --cp 2 --zero 3 --batch 6 --micro-batch 2 --ignore 0.3"),),
        "a stage, module by module",
    ),
    Exercise(
        "09.7", "balanced", 1,
        "Cut the model's list into slices (start, end), one for each stage: as many blocks in "
        "each, the first ones one more if that does not divide. The first has the embedding, "
        "too, and the last the head.",
        ("With 7 blocks and 3 stages, which items of the list are in which stage? The list has "
         "9 items, and the embedding is item 0.",
         "A stage has layers // depth blocks, and the first layers % depth stages have one "
         "more. Stage s ends where all blocks up to it end, plus 1 for the embedding; the last "
         "one ends at layers + 2."),
        (Same(balanced, "balanced(8, 4)", (8, 4)),
         Same(balanced, "balanced(7, 3)", (7, 3)),
         Same(balanced, "balanced(5, 1)", (5, 1)),
         Same(balanced, "balanced(3, 3)", (3, 3))),
    ),
    Exercise(
        "09.8", "gather", 2,
        "Wait for the parameters of the first of these modules, if they are under way. Under "
        "stage 3, see to it that those of the next module are under way then, too; what is not "
        "freed is there already, or on its way.",
        ("What tells a unit that was freed from one that was not? And which modules may begin to "
         "travel, if memory is to hold two at a time?",
         "Of the first two modules, a unit of stage 3 whose full.untyped_storage() has no bytes "
         "is to be started. Then the first module's units wait for what is in unit.gathering."),
        (Same(gathers_of_three_modules, "stage 3, all units are freed", (3, (0, 1, 2, 3))),
         Same(gathers_of_three_modules, "stage 3, the second module is freed", (3, (1, 2))),
         Same(gathers_of_three_modules, "stage 2, none is freed", (2, ())),
         Run(4, "--dp 2 --pp 2 --zero 3 --batch 8 --micro-batch 1 --ignore 0.3")),
    ),
    Exercise(
        "09.9", "Unit.start_reduce Unit.finish_reduce", 2,
        "Start to sum the gradients that the unit's parameters have by now, over its group: in "
        "stage 0 all of them, in later ones so that each rank gets its shard of the sum. In "
        "stages 0 and 1 the parameters keep gradients, as views of what was sent; else they have "
        "none. `finish_reduce` waits, if something is under way, and in stages 1 to 3 adds what "
        "has come to shard.grad.",
        ("Which of the four stages reduce more than once in a step, and what must shard.grad be "
         "then? And what has to live until the transfer has ended?",
         "flatten gives one tensor of the gradients, in which a parameter without one counts as "
         "zero. Stage 0 is an all_reduce of it; else common.reduce_scatter takes where the sum "
         "goes (self.mine(flat), or from stage 2 on a new tensor of the shard's shape) and what "
         "is sent. Keep the handle with what is sent. shard.grad is None, or a sum to add to."),
        (Same(summed, "stage 0, on two ranks", (0,), 2),
         Same(summed, "stage 1, on two ranks", (1,), 2),
         Same(summed, "stage 2, on two ranks", (2,), 2),
         Same(dtype_of_no_gradient, "shard.grad of bf16 weights without a gradient"),
         Run(4, "--dp 2 --tp 2 --batch 8 --micro-batch 2 --ignore 0.3"),
         Run(2, "--pp 1 --dp 2 --zero 1 --batch 8 --micro-batch 2 --layers 3"),
         Run(4, "--dp 2 --pp 2 --zero 2 --batch 8 --micro-batch 2 --ignore 0.3")),
        "Unit: how it sums gradients",
    ),
    Exercise(
        "09.10", "sent_in_a_layer", 1,
        "What does a rank send in a layer, over tp and over ep, if there are t tokens for each "
        "GPU: in units of t · h, forward and backward? With `cut`, tp cuts each expert as it cuts "
        "an MLP; else each is whole, and a rank routes its own tokens.",
        ("How many tokens does a rank send through ep in each layout, if those of its tp group "
         "have tp · t together? And around which sub-layers are gathers and scatters left?",
         "A gather or scatter of tp · t tokens sends (tp - 1) · t · h; there are four of "
         "attention, and four of an MLP that is cut. Rows go there and back, twice: 4 · K for a "
         "token, of which (n - 1)/n leave: n is ep or, where tp cuts each expert, ep/tp."),
        (Same(sent_in_a_layer, "tp 8, ep 64, K 8", (8, 64, 8)),
         Same(sent_in_a_layer, "the same, cut", (8, 64, 8, True)),
         Same(sent_in_a_layer, "tp 2, ep 2, K 1, cut", (2, 2, 1, True)),
         Run(4, "--dp 2 --tp 2 --ep 4 --experts 4 --batch 4 --micro-batch 2")),
        "what folding saves",
    ),
    Exercise(
        "09.11", "traffic", 3,
        "Count what a rank sends in a step on each axis with more than one rank, but for "
        "gradients: {axis: {op: (calls, bytes)}}. Around a mixture tp sends nothing; on \"cp and "
        "tp\" it adds up b · experts counts for its balance.",
        ("Which of the gathers and scatters of forward and backward are left if the MLP is a "
         "mixture? What does a forward that runs again send again, and what comes last in it?",
         "tp: attention gathers and scatters forward, and scatters and gathers backward, and so "
         "does an MLP. cp: keys and values are gathered, their gradients scattered. ep: counts "
         "(int64), rows there and back, and gradients of both; `rows` are those sent and received. "
         "The norm is one number on \"world\"."),
        (Same(traffic, "dense, tp 2, cp 2", (0, "none", 2, 2, 1, 1)),
         Same(traffic, "dense, tp 2, recomputed", (0, "full", 1, 2, 1, 1)),
         Same(traffic, "8 experts, tp 2, cp 2, ep 4", (8, "none", 2, 2, 4, 1)),
         Same(traffic, "8 experts, tp 2, ep 8, pp 2, recomputed", (8, "full", 1, 2, 8, 2)),
         Run(4, "--dp 2 --tp 2 --ep 2 --experts 4 --batch 4 --micro-batch 1 --recompute full")),
        "bytes of every axis",
    ),
]
