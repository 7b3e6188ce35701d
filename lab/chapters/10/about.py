"""What lab/ knows of chapter 10 alone."""

from lab.chapters import Stop

PLAYS = {"Chapters 02 to 09 each share out": ("planner", {"model": "70b", "gpus": 512})}

# What it says of published layouts.
LLAMA_3 = ("10_planner.py --model 405b --software llama3 --tp 8 --pp 16 --v 8 --zero 2 "
           "--recompute none")
TOUR = (
    Stop(f"{LLAMA_3} --gpus 8192 --batch 2048 --cp 1 --micro-batch 1",
         "Llama 3 on 8,192 GPUs", 1, ranks=0, drawn_on=None),
    Stop(f"{LLAMA_3} --gpus 16384 --batch 2048 --cp 1 --micro-batch 1",
         "Llama 3 on 16,384", 1, ranks=0, drawn_on=None),
    Stop(f"{LLAMA_3} --gpus 16384 --batch 128 --seq 131072 --cp 16 --micro-batch 1",
         "Llama 3 with sequences of 131,072", 1, ranks=0, drawn_on=None),
    Stop("10_planner.py --model deepseek-v3 --cluster h800 --software deepseek-v3 --gpus 2048 "
         "--batch 15360 --pp 16 --ep 64 --zero 1 --tp 1 --schedule dualpipe-v --v 1 --cp 1 "
         "--recompute full --micro-batch 1",
         "DeepSeek-V3", 1, ranks=0, drawn_on=None),
)
