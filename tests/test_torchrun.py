"""Every chapter under the real torchrun, which starts once; its ranks fork for each chapter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHAPTERS, ROOT, SMALL, TEXT, chapter_names, training_chapters

ALL = """
import json, os, runpy, sys
import lab.launch  # once, for all chapters: most of their time would be imports

statuses = {}
for i, (path, flags) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(i)  # so each meets at keys of its own
        sys.argv = [path, *flags]
        runpy.run_path(path, run_name="__main__")
        os._exit(1)  # a chapter ends the process itself
    statuses[path] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
with open(f"{os.environ['RANK']}.json", "w") as file:
    json.dump(statuses, file)
"""
FLAGS = *SMALL, "--batch=4", "--steps=1", f"--data={TEXT}"


@pytest.mark.parametrize("world", [1, 2])
def test_each_chapter_ends_with_status_0(tmp_path, world):
    """Chapter 01 has one rank."""
    names = [name for name in chapter_names() if name.startswith("01") == (world == 1)]
    runs = [(str(CHAPTERS / f"{name}.py"), [*FLAGS, *["--dp=2"] * name.startswith("09")]
             if name in training_chapters() else ["--device=cpu"]) for name in names]
    (tmp_path / "all.py").write_text(ALL)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc_per_node={world}", "all.py", json.dumps(runs)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{CHAPTERS}{os.pathsep}{ROOT}"},
        capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for rank in range(world):
        statuses = json.loads(Path(tmp_path, f"{rank}.json").read_text())
        assert statuses == {path: 0 for path, _ in runs}, done.stdout + done.stderr
