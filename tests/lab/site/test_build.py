"""The site in a folder: what is stored is unpacked as it was, and the folder is served."""

import base64
import gzip
import json
import re
import socket
import threading
import urllib.request

import pytest

from lab.site import __main__ as program
from lab.site import answers, build


def assigned(script):
    """{name: data} that a script assigns to names of window."""
    return {name: json.loads(data)
            for name, data in re.findall(r'window\.(?:STORED\[")?(\w+)(?:"\])? = (.*);\n', script)}


def test_what_is_stored_is_listed_and_unpacked_as_it_was(tmp_path, monkeypatch):
    asked = {"collective": "reduce", "ranks": 3}
    few = [("collective", asked), ("plan", {"gpus": 8, "model": "8b"}), ("plan", {"tp": 0})]
    monkeypatch.setattr(answers, "examples", lambda: iter(few))
    pages = {"a.html": lambda: "é", "b/c.png": lambda: b"\xff"}
    assert build.write_with(tmp_path, pages, build.stored_answers(), None) == 5
    assert (tmp_path / "a.html").read_text() == "é" and (tmp_path / "b/c.png").stat().st_size == 1
    assert assigned((tmp_path / "answers.js").read_text())["STORED"] == {
        "lines": {"collective": ["collective?collective=reduce&ranks=3"],
                  "plan": ["plan?gpus=8&model=8b", "plan?tp=0"]}, "python": [], "megabytes": 0}
    for name, questions in (("collective", few[:1]), ("plan", few[1:])):
        packed = assigned((tmp_path / f"answers/{name}.js").read_text())[name]
        lines = json.loads(gzip.decompress(base64.b64decode(packed)))
        expected = [answers.answer(*question) for question in questions]
        assert [*lines.values()] == json.loads(json.dumps(expected))
    assert "error" in lines["plan?tp=0"]


def test_an_archive_that_npm_did_not_publish_is_not_used(tmp_path):
    archive = tmp_path / "pyodide.tgz"
    _, problem = build.read_pyodide(archive)
    assert "no pyodide.tgz" in problem and "make site" in problem
    archive.write_bytes(b"something else")
    runtime, problem = build.read_pyodide(archive)
    assert runtime is None and "SHA-512" in problem


def test_a_folder_is_served_to_this_machine_alone(tmp_path, capsys):
    (tmp_path / "index.html").write_text("the course")
    with program.listen(tmp_path, 0) as server:
        host, port = server.server_address
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as page:
            assert page.read() == b"the course"
        server.shutdown()
    assert host == "127.0.0.1"
    with socket.socket() as other, pytest.raises(SystemExit) as end:
        other.bind(("127.0.0.1", 0))
        other.listen()
        program.listen(tmp_path, other.getsockname()[1])
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("error: --port") and "--port 0" in line
