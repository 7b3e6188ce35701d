"""The exhibits of checkpoints: a run stops after 10 of 20 steps, and another one goes on."""

from functools import partial

from lab.museum.exhibit import Exhibit

CHECKPOINT, SAVING = "lab/checkpoints/checkpoint.py", "lab/checkpoints/saving.py"
REPORT = "lab/run/report.py"
ONE = partial(Exhibit, chapter="01_single_gpu.py")
STOPPED = ((1, 10),)
UNSEEN = ("first loss", "loss", "gradients", "gradient norm", "parameters", "sent", "kept")

EXHIBITS = [
    ONE(
        "NVIDIA/apex#42", "masters that are older than what was loaded",
        "The fp32 masters were copied from the model before the checkpoint was loaded into it. So "
        "the loaded run had the right weights in 16 bits, and masters drawn at random. The first "
        "loss was right. The first update then wrote the masters over the weights. The maintainer "
        "agreed, and has saved the masters themselves from then on.",
        REPORT,
        "        if self.checkpoint is not None:\n            self.checkpoint.load_model(model)\n",
        "        if self.checkpoint is not None and self.batch is not None:\n"
        "            self.checkpoint.load_model(model)\n",
        1, "--precision bf16", ("loss", "parameters", "resume"),
        ("first loss", "sent", "kept"), before=STOPPED,
        more=(("        if self.checkpoint is not None:\n"
               "            self.checkpoint.load_states(optimizer)\n",
               "        if self.checkpoint is not None:\n"
               "            if self.batch is None:\n"
               "                self.checkpoint.load_model(self.model)\n"
               "            self.checkpoint.load_states(optimizer)\n"),),
    ),
    ONE(
        "TensorAuto/OpenTau#185", "masters made anew from 16 bits",
        "An optimizer's state_dict has its moments, and not the parameters that it updates. So the "
        "fp32 masters were not in the checkpoint, and were made from the 16-bit weights when it "
        "was loaded. Each time a run goes on, it loses what the masters had gathered below the "
        "last bit. Its developers found it by reading, and compare it with a library that saves "
        "the masters.",
        CHECKPOINT, "                p.data.copy_(self.value(name, p))\n",
        "                p.data.copy_(self.value(name, p).bfloat16())\n",
        1, "--precision bf16", ("resume",), UNSEEN, before=STOPPED,
    ),
    ONE(
        "EleutherAI/gpt-neox#308", "steps that were skipped as if they were micro-batches",
        "A run that went on skipped as many micro-batches as it had taken steps. With "
        "accumulation, a step is several. So it read once more what it had read before the stop, "
        "and the loss fell after each restart, more than it should. The curve of a job with a "
        "time limit, which was restarted again and again, gave it away.",
        "common.py", "            tokens, targets, valid = self.text.batch(step)\n",
        "            skip = self.first_step * self.args.micro_batch // self.args.batch\n"
        "            tokens, targets, valid = self.text.batch(step - self.first_step + skip)\n",
        1, "--batch 6 --micro-batch 2", ("resume",), UNSEEN, before=STOPPED,
    ),
    ONE(
        "KempnerInstitute/KempnerForge#57", "the second stop forgets the first",
        "A loader counted the batches that it had given out since it was started, and saved that. "
        "The first time a run went on, it skipped as many as it should. But what it saved then was "
        "the number since it had gone on. So the third run skipped too few, and read data that the "
        "first one had read. A test of three runs in a row found it, where all tests had two.",
        SAVING, '        about = {"step": step, ',
        '        about = {"step": step - self.run.first_step, ',
        1, "", ("resume",), UNSEEN, before=((1, 5), (1, 15)),
    ),
    ONE(
        "KempnerInstitute/KempnerForge#115", "moments that begin at zero again",
        "A new optimizer has no moments before its first step. The checkpoint was loaded into what "
        "the optimizer had, and so there was no place for the saved moments, which were dropped "
        "without a word. Weights, data and learning rate were right. Runs that went on were not "
        "those that had not stopped, bit by bit, and that was the test.",
        CHECKPOINT, '        keys = {name.partition("/")[2] for name in self.index["tensors"]} - '
        '{""}\n',
        '        keys = {key for state in optimizer.state.values() for key in state}\n',
        1, "--optimizer momentum", ("resume",), UNSEEN, before=STOPPED,
    ),
    ONE(
        "NovaSky-AI/SkyRL#1403", "Adam counts its steps from one again",
        "Moments were loaded, and the count of steps was not: it stayed what a new optimizer has. "
        "Adam divides its moments by what is still missing in them, which the count tells. So "
        "moments of a long run were divided as if they were a first step's. Outputs drifted away "
        "after the run had gone on. It was one of three mistakes on the way of one state.",
        CHECKPOINT,
        "                tensor = torch.zeros_like(like, dtype=DTYPES[saved[\"dtype\"]])\n",
        "                tensor = torch.zeros_like(like, dtype=DTYPES[saved[\"dtype\"]])\n"
        "                if not saved[\"shape\"]:\n"
        "                    optimizer.state[p][key] = tensor\n"
        "                    continue\n",
        1, "--optimizer adamw", ("resume",), UNSEEN, before=STOPPED,
    ),
    ONE(
        "NVIDIA-NeMo/RL#3312", "each checkpoint is the first one again",
        "Checkpoints were written in the background, and what is where was remembered from the "
        "first one to save time. The tensors had been moved since. So each later checkpoint had "
        "the first one's numbers, and said that it was saved. Those of steps 90, 110 and 120 were "
        "the same, bit by bit. It was noticed when a run went on from the last and was as bad as "
        "long ago.",
        SAVING, "        state = checkpoint.state_of(optimizers, buffers)\n",
        '        self.first = getattr(self, "first", None) or checkpoint.state_of(optimizers, '
        'buffers)\n        state = self.first\n',
        1, "", ("resume",), UNSEEN, before=STOPPED,
    ),
    Exhibit(
        "ROCm/Megatron-LM#63", "right on as many ranks, and garbage on others",
        "Each rank saved its part of a matrix that is two in one. On as many ranks the parts were "
        "put back as they had been cut. On another number they were joined in the order of the "
        "ranks, which is not that of the matrix. The loss went from 2 to 10. Whoever compared all "
        "tensors saw that only this matrix differed.",
        CHECKPOINT, "        offsets[cut.dim] += cut.index * sizes[cut.dim]\n",
        "        offsets[cut.dim] += (cut.parts - 1 - cut.index) * sizes[cut.dim]\n",
        2, "--kv-heads 4 --vocab 256", ("first loss", "loss", "resume"), ("sent", "kept"),
        chapter="04_tensor_parallel.py", before=((4, 10),),
    ),
    Exhibit(
        "stanford-futuredata/Megatron-LM#5", "the optimizer goes on from what was drawn",
        "Weights in bf16 were loaded, and the optimizer was not told to take its fp32 masters from "
        "them. It had copied them before, from weights drawn at random. So training that was to go "
        "on began anew, with the first step. The same mistake had been mended in another fork.",
        "common.py",
        "            vars(master).update(vars(p), rounded=dtype)     ",
        "            vars(master).update(vars(p), rounded=dtype)\n"
        "            draw_weights(nn.ParameterList([master]), 0, p.device, p.dtype)     ",
        2, "--precision bf16 --dtype float64", ("parameters", "resume"),
        ("first loss", "loss", "gradients", "gradient norm", "sent", "kept"),
        chapter="02_data_parallel.py", before=((2, 10),),
    ),
]
