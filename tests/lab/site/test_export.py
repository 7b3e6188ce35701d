"""The site as files: what is stored is unpacked as it was, and the sources that a browser gets
answer without torch, and without any other file, as they do here."""

import base64
import gzip
import json
import os
import re
import subprocess
import sys

from lab.site import answers, export, reading, server
from tests.conftest import ROOT
from tests.lab.site.test_page import Page


def unzipped(text):
    return gzip.decompress(base64.b64decode(text))


def assigned(script):
    """{name: data} that a script says of window."""
    return {name: json.loads(data)
            for name, data in re.findall(r'window\.(?:STORED\[")?(\w+)(?:"\])? = (.*);\n', script)}


# ---------------------------------------------------------------------------------- stored answers

class FewPages(reading.Course):
    def site(self):
        return {address: made for address, made in super().site().items()
                if address in ("rings.html", "common.html", "icon.svg")}


def test_all_of_it_as_files(tmp_path, monkeypatch):
    few = [("ring", {"ranks": "4"}), ("plan", {"model": "8b", "gpus": "8"}),
           ("ring", {"ranks": "99"})]
    monkeypatch.setattr(answers, "examples", lambda: iter(few))
    offline, site = FewPages(folder=tmp_path / "none", computes=False), tmp_path / "site"
    count, why = export.write(site, offline, tmp_path / "pyodide.tgz")
    assert "no pyodide.tgz" in why and "make site" in why
    files = {path.relative_to(site).as_posix(): path for path in site.rglob("*") if path.is_file()}
    assert len(files) == count and files.keys() == offline.site().keys() | {
        "answers.js", "answers/ring.js", "answers/plan.js"}
    assert assigned(files["answers.js"].read_text())["STORED"] == {
        "keys": {"ring": {"ranks": ["4", "99"]}, "plan": {"gpus&model": ["8&8b"]}},
        "files": ["plan", "ring"], "python": [], "megabytes": 0}
    stored = assigned(files["answers/ring.js"].read_text())["ring"]
    _, refused = server.answer("ring", "ranks=99")
    assert json.loads(unzipped(stored)) == {
        "ring?ranks=4": json.loads(json.dumps(answers.QUESTIONS["ring"]({"ranks": "4"}))),
        "ring?ranks=99": refused} and "error" in refused
    for page, asks in (("rings.html", True), ("common.html", False)):
        loaded = Page(files[page].read_text()).loaded
        assert ("answers.js" in loaded) == ("files.js" in loaded) == asks


def test_make_fetches_the_version_that_is_used():
    make = (ROOT / "Makefile").read_text()
    assert f"PYODIDE := .venv/{export.ARCHIVE.name}\n" in make
    assert f" pyodide@{export.PYODIDE} " in make


def test_an_archive_that_npm_did_not_publish_is_not_used(tmp_path):
    archive = tmp_path / "pyodide.tgz"
    archive.write_bytes(b"something else")
    runtime, why = export.pyodide(archive)
    assert runtime is None and "SHA-512" in why


# --------------------------------------------------------------------------- Python in the browser

ASKED = """
memory?billions=7&ranks=8&precision=bf16
roofline?cluster=h100&model=8b&strategy=both&chips=512&zero_axes=1&tp_axes=1
plan?model=deepseek-v3&gpus=2048&batch=960&pp=16&ep=64&schedule=dualpipe&software=deepseek
plan?model=foo
best?model=mixtral&cluster=a100&gpus=64&batch=64&tp=8
best?model=405b&gpus=8&batch=512
""".split()
ALONE = """
import os, sys
from lab.site import in_browser
in_browser.begin()
print("[" + ",".join(map(in_browser.answer, sys.argv[1:])) + "]")
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
assert not [file for file in files.values() if "/site-packages/torch/" in file]
ours = [file for name, file in files.items() if name.startswith(("lab.", "common", "0", "1"))]
assert len(ours) > 20 and all(file.startswith(os.getcwd()) for file in ours), ours
"""


def test_the_sources_alone_answer_as_they_do_here(tmp_path):
    for name, data in export.sources().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    schedules = [f"schedule?schedule={name}&ranks=4&micro_batches=8"
                 for name in answers.choices()["schedules"]]
    asked = [*ASKED, *schedules]
    assert {line.partition("?")[0] for line in asked} == set(export.ANSWERED)
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([sys.executable, "-c", ALONE, *asked], cwd=tmp_path, env=alone,
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for line, found in zip(asked, json.loads(ran.stdout), strict=True):
        name, _, query = line.partition("?")
        assert found == json.loads(json.dumps(server.answer(name, query)[1])), line
