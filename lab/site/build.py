"""Write the site to a folder.

What tools can be asked is answered in two ways. A choice of questions is answered now: answers.js
lists them, and answers/NAME.js has the answers to the questions of one name. What needs no torch is
also computed in the reader's browser, by Pyodide, a Python that browsers run. It is one script,
python/python.js, with our sources, and is loaded by the first question without a stored answer.
`make site` fetches Pyodide from the registry of npm.

A page that is opened from a folder may load nothing but scripts: all else is gzip in base64.
"""

import base64
import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from collections import defaultdict

from lab import ROOT
from lab.site import answers
from lab.site.pages import Site
from lab.site.tools import written

PYODIDE = "0.29.5"
ARCHIVE = ROOT / f".venv/pyodide-{PYODIDE}.tgz"         # as `npm pack` names it
SHA512 = "TkYrUv9m8QmfImADKRmpwZulL48E0uUaBSO+dvRQKyAJc0qh9gu7jn8btyHPh3NZm1r2IH2YrJhIr7Q2B9urAw=="
RUNTIME = "pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip"


def write(folder, archive=ARCHIVE):
    """Returns the number of files, and why no Python is among them, or None."""
    runtime, problem = read_pyodide(archive)
    return write_with(folder, Site().files(), stored_answers(), runtime), problem


def write_with(folder, files, stored, runtime):
    """Write these files of the site, these answers, and Pyodide's files, if there are any. Returns
    the number of files."""
    python = python_script(runtime) if runtime else ""
    contents = {address: make() for address, make in files.items()}
    contents |= {f"answers/{name}.js": answers_script(name, lines)
                 for name, lines in stored.items()}
    contents["answers.js"] = index_script(stored, python)
    if python:
        contents["python/python.js"] = python
    for address, content in contents.items():
        path = folder / address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return len(contents)


# ---------------------------------------------------------------------------------- stored answers

def stored_answers():
    """{name: {question in a line: its answer}} of `answers.examples`."""
    stored = defaultdict(dict)
    for name, asked in answers.examples():
        stored[name][written(name, asked)] = answers.answer(name, asked)
    return stored


def index_script(stored, python):
    """What pages know before they load anything: which questions have a stored answer, and which
    Python answers."""
    computed = answers.IN_BROWSER if python else ()
    return assign("STORED", {"lines": {name: list(lines) for name, lines in stored.items()},
                             "python": computed, "megabytes": round(len(python) / 1e6)})


def answers_script(name, lines):
    data = json.dumps(lines, separators=(",", ":")).encode()
    return f"window.STORED[{json.dumps(name)}] = {json.dumps(in_base64(data))};\n"


def assign(name, data):
    """A script that assigns data to a name of window."""
    return f"window.{name} = {json.dumps(data, separators=(',', ':'))};\n"


def in_base64(data):
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


# --------------------------------------------------------------------------- Python in the browser

def read_pyodide(archive):
    """({file: bytes} of the archive, None); or (None, why not)."""
    if not archive.exists():
        return None, f"there is no {archive.name} in {archive.parent.name}/; make site fetches it"
    data = archive.read_bytes()
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != SHA512:
        return None, f"{archive.name} is not what npm published: its SHA-512 differs"
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        runtime = {name: files.extractfile(f"package/{name}").read()
                   for name in (*RUNTIME, "pyodide-lock.json")}
    lock = json.loads(runtime.pop("pyodide-lock.json"))     # no package needs to be fetched
    return runtime | {"lock.json": json.dumps(lock | {"packages": {}}).encode()}, None


def python_script(runtime):
    files = runtime | {"course.zip": zipped(sources())}
    return assign("PYTHON", {name: in_base64(data) for name, data in files.items()})


def sources():
    """{path: bytes} of the chapters, common.py and lab/, with the tables beside its modules."""
    paths = [*ROOT.glob("[0-9][0-9]_*.py"), ROOT / "common.py",
             *ROOT.glob("lab/**/*.py"), *ROOT.glob("lab/**/*.toml")]
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sorted(paths)}


def zipped(files):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as target:
        for name, data in files.items():
            target.writestr(zipfile.ZipInfo(name), data)    # without the time of writing
    return archive.getvalue()
