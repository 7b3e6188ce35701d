"""The grader's container has what it needs. (hadolint reads its Dockerfile in `make lint`.)"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.classroom import exercises, grade
from tests.conftest import ROOT

DOCKERFILE = ROOT / "container/Dockerfile"
README = (ROOT / "container/README.md").read_text()
LINES = DOCKERFILE.read_text().splitlines()


def copied():
    """(a path here, its place in the image) of all files and folders."""
    for line in LINES:
        if line.startswith("COPY "):
            *sources, place = line.split()[1:]
            for source in sources:
                found = sorted(ROOT.glob(source))
                assert found, line
                for path in found:
                    yield path, Path(place, path.name) if place.endswith("/") else Path(place)


@pytest.mark.full
def test_the_image_has_what_a_grader_needs(tmp_path):
    """Of one exercise; nobody has told it where the rest of the course is."""
    for path, place in copied():
        into = tmp_path / place.relative_to("/")
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, into) if path.is_dir() else shutil.copy(path, into)
    (tmp_path / "class/ada").mkdir(parents=True)
    text = exercises.solution("04_tensor_parallel")
    (tmp_path / "class/ada/04_tensor_parallel.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for line in LINES:
        if line.startswith("ENV "):
            environment |= dict(pair.split("=") for pair in shlex.split(line)[1:])
    environment |= {"HOME": str(tmp_path)}
    words = re.findall(r'"(.+?)"', LINES[-1])
    assert words[0] == "python"
    done = subprocess.run([sys.executable, *words[1:], tmp_path / "class", "04.7"],
                          cwd=tmp_path / "course", env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "04.7" in done.stdout, done


def test_the_line_that_runs_it_names_what_is_there(capsys):
    """Each path of the grader's words is a volume's, and each flag is one that it has."""
    [build, run] = re.findall(r"^docker (?:build|run).*?[^\\]$", README, re.MULTILINE | re.DOTALL)
    words = shlex.split(run.replace("\\\n", " "))
    [image] = re.findall(r"-t (\S+)", build)
    assert (ROOT / re.search(r"-f (\S+)", build)[1]) == DOCKERFILE
    given = words[words.index(image) + 1 :]
    volumes = [word.split(":")[1] for before, word in zip(words, words[1:])
               if before == "--volume"]
    for word in given:
        assert word[0] != "/" or any(Path(word).is_relative_to(place) for place in volumes), word
    with pytest.raises(SystemExit):
        grade.arguments(["--help"])
    shown = capsys.readouterr().out
    assert all(f"{word} " in shown for word in given if word.startswith("--"))
