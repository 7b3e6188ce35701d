"""The site as files, for whatever serves files, or for a double click.

What was asked when they were written is stored: answers.js says what, answers/NAME.js has the
answers to a question of that name. What needs no torch is computed in the reader's browser, by
Pyodide, a Python that browsers run. It is one script, python/python.js, with the sources as they
are, and is loaded by the first question without a stored answer. `make site` fetches Pyodide from
the registry of npm; without it, sliders are bounded to what is stored.

Files that a page of files loads must be scripts: so what is none is gzip in base64.
"""

import ast
import base64
import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from common import Refused
from lab import ROOT, chapters
from lab.run.refusals import one_line
from lab.site import answers
from lab.site.reading import Course
from lab.site.tools import written

PYODIDE = "0.29.5"
ARCHIVE = ROOT / f".venv/pyodide-{PYODIDE}.tgz"         # as `npm pack` brings it
SHA512 = "TkYrUv9m8QmfImADKRmpwZulL48E0uUaBSO+dvRQKyAJc0qh9gu7jn8btyHPh3NZm1r2IH2YrJhIr7Q2B9urAw=="
RUNTIME = "pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip"
ANSWERED = "plan", "best", "schedule", "roofline", "memory"     # by Python in a browser
CHAPTERS = "00", "03", "07", "10"       # which these answers come from; 00: its names
MANY = 100                      # questions that are worth another process


def write(folder, course=None, archive=ARCHIVE):
    """Write the site. Returns the number of files, and why no Python is among them, or None."""
    runtime, why = pyodide(archive)
    return write_with(folder, course or Course(computes=False), stored_answers(), runtime), why


def write_with(folder, course, stored, runtime):
    """Write it with these answers, and Pyodide's files or None. Returns the number of files."""
    site = {address: make for address, (_, make) in course.site().items()}
    site |= {f"answers/{name}.js": lambda name=name: data_script(name, stored[name])
             for name in stored}
    python = python_script(runtime) if runtime else None
    if python:
        site["python/python.js"] = lambda: python
    site["answers.js"] = lambda: index_script(stored, python)
    for address, make in site.items():
        path = folder / address
        path.parent.mkdir(parents=True, exist_ok=True)
        made = make()
        path.write_bytes(made if isinstance(made, bytes) else made.encode())
    return len(site)


# ---------------------------------------------------------------------------------- stored answers

def stored_answers():
    """{question: {its line: answer, or {"error": why there is none}}} of `answers.examples`."""
    asked, found = list(answers.examples()), defaultdict(dict)
    searches = [one for one in asked if one[0] == "best"]           # which are remembered here
    others = [one for one in asked if one[0] != "best"]
    if len(others) > MANY:
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            told = list(pool.map(answered, others, chunksize=MANY // 4))
    else:
        told = map(answered, others)
    for (name, parameters), answer in (*zip(others, told), *zip(searches, map(answered, searches))):
        found[name][written(name, parameters)] = answer
    return found


def answered(question):
    name, asked = question
    try:
        return answers.QUESTIONS[name](asked)
    except Refused as refused:
        return {"error": one_line(refused.args[0])}


def index_script(stored, python):
    """What the pages need to know at once: whether Python is there, and what is stored. What Python
    answers need not be stored, and plans are many."""
    answered = ANSWERED if python else ()
    keys = {name: keys_of(lines) for name, lines in stored.items()
            if name not in answered or name == "best"}
    return assigned("STORED", {"keys": keys, "files": sorted(stored), "python": answered,
                               "megabytes": round(len(python or "") / 1e6)})


def keys_of(lines):
    """{"cut&ranks": ["sequence&4", ...]} of questions such as "ring?cut=sequence&ranks=4"."""
    found = defaultdict(list)
    for line in lines:
        pairs = [pair.split("=") for pair in line.partition("?")[2].split("&")]
        names, values = ("&".join(parts) for parts in zip(*pairs))
        found[names].append(values)
    return found


def data_script(name, lines):
    data = json.dumps(lines, separators=(",", ":")).encode()
    return f"window.STORED[{json.dumps(name)}] = {json.dumps(in_base64(data))};\n"


def assigned(name, data):
    return f"window.{name} = {json.dumps(data, separators=(',', ':'))};\n"


def in_base64(data):
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


# --------------------------------------------------------------------------- Python in the browser

def pyodide(archive):
    """({file: bytes} of the archive, None); or (None, why not)."""
    if not archive.exists():
        return None, f"there is no {archive.name} in {archive.parent.name}/; make site fetches it"
    data = archive.read_bytes()
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != SHA512:
        return None, f"{archive.name} is not what npm published: its SHA-512 differs"
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        read = {name: files.extractfile(f"package/{name}").read()
                for name in (*RUNTIME, "pyodide-lock.json")}
    lock = json.loads(read.pop("pyodide-lock.json"))    # of packages to be fetched: none is needed
    return read | {"lock.json": json.dumps(lock | {"packages": {}}).encode()}, None


def python_script(runtime):
    files = runtime | {"course.zip": zipped(sources())}
    return assigned("PYTHON", {name: in_base64(data) for name, data in files.items()})


def zipped(files):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)       # without the time of writing
    return held.getvalue()


def sources():
    """{path: bytes} of in_browser.py, the chapters that it asks, and all of ours that they import,
    wherever an import stands."""
    first = ROOT / "lab/site/in_browser.py"
    waiting = [first, *(ROOT / f"{chapters.name_of(number)}.py" for number in CHAPTERS)]
    found = {}
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = path.read_bytes()
            waiting += imported(found[path])
    return {path.relative_to(ROOT).as_posix(): found[path] for path in sorted(found)}


def imported(source):
    """The files of ours that one imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = set()
    for name in names:
        path = ROOT / name.replace(".", "/")
        packages = [folder / "__init__.py" for folder in (path, *path.parents) if folder != ROOT]
        found |= {each for each in (path.with_suffix(".py"), *packages)
                  if each.is_relative_to(ROOT) and each.exists()}
    return found
