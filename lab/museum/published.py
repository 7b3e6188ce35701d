"""What two papers have published of silent bugs, beside the exhibits here.

TrainCheck: its artifact has 18 of the 20 errors of the paper, those that it detects, with a script,
a thread and an invariant for most. Its authors have opened further threads under a name of their
own, traincheck-team. TTrace finds 14 bugs of Megatron-LM, 11 known ones and 3 new, which its table
1 lists. That table could not be read for this list: two of its threads are known from another list
that cites it, and 12 bugs are missing. The paper's first author has opened a third one.

`theirs` is what the artifact or a thread says of how they see a bug; "" if nothing does. What sees
it here is not written down a second time: it is the exhibit's caught_by, which the tests hold to
real runs.

Sources: github.com/OrderLab/TrainCheck-Evaluation-Workloads, silent-issue-detection/ (its README.md
has the table; each bug has a README.md, and most an invariant in JSON); OrderLab/TrainCheck,
bugs.md, docs/successful-stories.md and docs/ae-eval-s5.1-silent-issue-detection.md; the threads;
for TTrace its abstract (arXiv 2506.09280), and the other list's provenance note.
"""

import textwrap
from typing import NamedTuple

REFERENCE = "a tensor is not that of a reference run"
ALIKE = "replicated parameters have the same values on all ranks"


class Published(NamedTuple):
    """A bug of a catalogue. exhibit: (room, number) of ours, or (), and then why no room has it."""
    name: str               # in the catalogue
    thread: str             # that tells of it
    what: str               # is wrong
    theirs: str             # how they see it: an invariant that does not hold, if not REFERENCE
    exhibit: tuple = ()
    why: str = ""

    @property
    def is_same_thread(self):
        return self.thread == self.exhibit[1]


TRAINCHECK = [
    Published("deepspeed-1801", "deepspeedai/DeepSpeed#1801",
              "LayerNorms are clipped on the first rank of tp alone", ALIKE,
              ("04", "deepspeedai/DeepSpeed#1801")),
    Published("pytorch-104336", "pytorch/pytorch#104336",
              "a model is moved to the CPU and back, and DDP sums no gradient any more", ALIKE,
              ("02", "pytorch/pytorch#104336")),
    Published("x-jxmnop-ddp-out-of-sync", "x.com/jxmnop/status/1778520637193240892",
              "the model is wrapped by DDP in some calls and not in others", ALIKE,
              ("02", "pytorch/pytorch#104336")),
    Published("pytorch-84803", "pytorch/pytorch#84803",
              "what goes from one GPU to another arrives as zeros", ALIKE,
              ("07", "pytorch/pytorch#84803")),
    Published("pytorch-96600", "pytorch/pytorch#96600",
              "what goes from one GPU to another arrives as other numbers", ALIKE,
              ("07", "pytorch/pytorch#84803")),
    Published("baichuan2-86", "baichuan-inc/Baichuan2#86",
              "a model on two GPUs talks nonsense, on one it does not", ALIKE,
              ("07", "pytorch/pytorch#84803")),
    Published("stackoverflow-60335387", "stackoverflow.com/questions/60335387",
              "gradients are never set to zero", "a zero_grad comes before each step",
              ("01", "deepspeedai/DeepSpeed#7839")),
    Published("stackoverflow-67180955", "pytorch/pytorch#56488",
              "all workers of a data loader draw the same random numbers", "",
              ("02", "pixeli99/SVD_Xtend#75")),
    Published("pytorch-forum-84911", "discuss.pytorch.org/t/84911",
              "nearly all layers are frozen", "a step of Adam changes parameters",
              why="a setting of fine-tuning: no chapter freezes parameters"),
    Published("mmpretrain-702", "open-mmlab/mmpretrain#702",
              "layers that should be frozen are not, before train() has been called",
              "layers are frozen before train()",
              why="a setting of fine-tuning: no chapter freezes parameters"),
    Published("pytorch-115607", "pytorch/pytorch#115607",
              "a compiled step goes on as if there were no gradients",
              "zero_grad changes gradients to None",
              why="a compiler that takes old code for new: no chapter compiles its step (01 its "
                  "forward, for a comparison)"),
    Published("lightning-thunder-725", "Lightning-AI/lightning-thunder#725",
              "some operators run outside of autocast", "under autocast, outputs are of its dtype",
              why="a compiler's own autocast: by hand, chapters round parameters, not operators"),
    Published("deepspeed-5794", "deepspeedai/DeepSpeed#5794",
              "ranks do not agree on the sizes of an all_to_all, and wait for ever",
              "arguments of an all_to_all agree between ranks",
              why="it hangs, which is not silent"),
    Published("transformers-17877", "huggingface/transformers#17877",
              "parameters are drawn more than once", "normal_ is called once for each tensor",
              why="it makes the start slow; here each parameter has a generator of its own, and so "
                  "the same numbers, however often it is drawn"),
    Published("pytorch-51800", "pytorch/pytorch#51800",
              "a spectral norm is evaluated before it has been trained",
              "a forward comes before eval", why="no chapter has a spectral norm, or evaluates"),
    Published("transformers-33844", "huggingface/transformers#33844",
              "dropout goes on in evaluation", "in evaluation, attention has a dropout of 0",
              why="no chapter has dropout, or evaluates"),
    Published("transformers-23723", "huggingface/transformers#23723",
              "more tokens are generated than were asked for",
              "generate gives at most max_new_tokens",
              why="of inference: no chapter has a limit on what is generated"),
    Published("transformers-34204", "huggingface/transformers#34204",
              "of a batch of images, a processor gives one", "",
              why="no chapter has images, or a processor before its model"),
    Published("its authors' thread", "huggingface/accelerate#3256",
              "an optimizer of tensors that FSDP has replaced",
              "zero_grad and step change parameters", ("03", "huggingface/accelerate#3256")),
    Published("its authors' thread", "deepspeedai/DeepSpeed#6772",
              "ZeRO-3 writes over the attribute that says which GPU an expert is on", "",
              ("08", "deepspeedai/DeepSpeed#6772")),
    Published("its authors' thread", "deepspeedai/DeepSpeed#6771",
              "checkpoints lack the states of parameters that were frozen", "",
              why="no chapter freezes parameters"),
    Published("its authors' thread", "deepspeedai/DeepSpeed#6770",
              "the optimizer has parameters that the model has not", "",
              why="it ends in a KeyError, which is not silent"),
]
TTRACE = [
    Published("of table 1", "NVIDIA/Megatron-LM#599",
              "routers are not summed over tp under sequence parallelism", REFERENCE,
              ("09", "NVIDIA/Megatron-LM#599")),
    Published("of table 1", "NVIDIA/Megatron-LM#1446",
              "the final LayerNorm is not summed over tp under sequence parallelism", REFERENCE,
              ("05", "NVIDIA/Megatron-LM#1446")),
    Published("its first author's thread", "NVIDIA/Megatron-LM#1464",
              "gradients of attention under context parallelism", f"{REFERENCE}, by up to 300 ε",
              ("06", "NVIDIA/Megatron-LM#1464")),
]
CATALOGUES = {"TrainCheck, OSDI 2025, arXiv 2506.14813": TRAINCHECK,
              "TTrace, arXiv 2506.09280": TTRACE}
UNREAD = "not listed: 2 of TrainCheck's 20, which its artifact leaves out, and 12 of TTrace's 14"


def table(exhibits):
    """The lines of `--published`. exhibits: {room: its exhibits}. Raises KeyError if a bug names
    one that is not there."""
    ours = {(room, one.number): one for room, those in exhibits.items() for one in those}
    lines = []
    for catalogue, bugs in CATALOGUES.items():
        lines += [catalogue]
        for bug in bugs:
            lines += [f"  {bug.thread}: {bug.what}", f"    theirs: {bug.theirs or '(not told)'}"]
            told = beside(bug, ours[bug.exhibit]) if bug.exhibit else f"not here: {bug.why}"
            lines += textwrap.wrap(told, 99, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return [*lines, *summary(ours)]


def beside(bug, exhibit):
    """What sees a bug here, in words."""
    mechanism = "" if bug.is_same_thread else f", by the mechanism of {exhibit.number}"
    seen_by = ", ".join(name for name in exhibit.caught_by if name != "first loss")
    first = "sees it" if "first loss" in exhibit.caught_by else "does not"
    return f"ours: in {bug.exhibit[0]}{mechanism}: {seen_by}; the first loss {first}"


def summary(ours):
    bugs = [bug for those in CATALOGUES.values() for bug in those]
    here = [bug for bug in bugs if bug.exhibit]
    same = sum(bug.is_same_thread for bug in here)
    first = sum("first loss" in ours[bug.exhibit].caught_by for bug in here)
    return [f"{len(bugs)} published bugs: {same} are exhibits, {len(here) - same} are of the same "
            f"mechanism as one, {len(bugs) - len(here)} are not here",
            f"of the {len(here)} here, the first loss sees {first}", UNREAD]
