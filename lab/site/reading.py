"""The pages that are read, as HTML: chapters, the front page, and what search looks through."""

import ast
import json
import re
from functools import cache, lru_cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from lab import ROOT, chapters, museum, pictures
from lab.classroom.exercises import EXERCISES
from lab.run import runs
from lab.site import figures, markdown, tables, tools
from lab.site.prose import inline, typeset
from lab.site.source import Source, before_and_now
from lab.texts import SOURCES

FILES = Path(__file__).parent / "files"
TEXT = "text/plain; charset=utf-8"
AS_THEY_ARE = {"fivefold.ipynb": "application/x-ipynb+json", "CITATION.cff": TEXT, "LICENSE": TEXT,
               "lab/deploy/fivefold.sbatch": TEXT, "lab/deploy/restart.sbatch": TEXT}


def files_to_read():
    """{name: path} of the course's files, in the order of reading."""
    first, *more = chapters.NAMES
    return {name: ROOT / f"{name}.py" for name in (first, "common", *more, *beside_chapters())}


@cache
def beside_chapters():
    """{name: (its room, its figure or None)} of the files that are read after the chapters."""
    return {name: (room, figure) for room, about in chapters.rooms_with("about").items()
            for name, figure in getattr(about, "FILES", {}).items()}


def address_of(name):
    """The page of a file: kernels/fp8 is kernels-fp8.html."""
    return f"{name.replace('/', '-')}.html"


def label_of(name):
    """What others call it: "04", or its name."""
    return name[:2] if name[0].isdigit() else name.split("/")[-1]


# ------------------------------------------------------------------------------------------- pages

@cache
def templates():
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(FILES), autoescape=True,
                              trim_blocks=True, lstrip_blocks=True,
                              undefined=jinja2.StrictUndefined)
    made.filters |= {"typeset": typeset, "inline": inline, "address": address_of,
                     "label": label_of, "thread": thread, "thread_id": thread_id,
                     "linked": tables.linked, "counted": counted, "called": called,
                     "headed": headed}
    made.globals["tool"] = lambda name: mount(name, {}, large=True)
    return made


def mount(name, begins, large=False):
    """A tool's HTML, in a lesson or on its own page."""
    return Markup(templates().get_template("mount.html").render(
        large=large, **tools.mounted(name, begins)))


source_of = lru_cache(maxsize=64)(Source)               # a file that has not changed is not parsed


class Course:
    """All files, as they are now; a page is made when it is asked for. folder: of the runs.
    computes: whether somebody answers the pages that compute."""

    def __init__(self, folder=ROOT / "runs", computes=True):
        self.folder, self.computes = folder, computes
        texts = {name: path.read_text(encoding="utf-8")
                 for name, path in files_to_read().items()}
        common = source_of(texts["common"], address_of("common"))
        self.sources = {name: common if name == "common" else
                        source_of(text, address_of(name), common) for name, text in texts.items()}

    def site(self):
        """{address: (type, function that makes it)}: all that there is."""
        html, script, style = ("text/html; charset=utf-8", "text/javascript; charset=utf-8",
                               "text/css; charset=utf-8")
        site = {"index.html": (html, self.front), "search.js": (script, self.search),
                "choices.js": (script, self.choices)}
        for name in self.sources:
            site[address_of(name)] = html, lambda name=name: self.chapter(name)
            site[f"source/{name}.py"] = TEXT, lambda name=name: self.sources[name].text
        for tool in tools.TOOLS:
            site[f"{tool}.html"] = html, lambda tool=tool: self.render(f"{tool}.html", here=tool)
        site["texts.html"] = html, self.texts
        for page in markdown.pages().values():
            site[page.address] = html, lambda page=page: self.written(page, site)
        kinds = {".js": script, ".css": style, ".svg": "image/svg+xml"}
        for path in sorted(FILES.rglob("*.*")):
            if path.suffix in kinds:
                site[path.relative_to(FILES).as_posix()] = kinds[path.suffix], path.read_bytes
        for path in sorted(figures.FOLDER.glob("*.svg")):
            site[f"figures/{path.name}"] = "image/svg+xml", path.read_bytes
        for name, kind in AS_THEY_ARE.items():
            site[name] = kind, (ROOT / name).read_bytes
        linked = [figures.figure(name, "") for name in linked_figures()]
        for figure in filter(None, (*figures_of_files().values(), *linked)):
            site |= {address: ("image/webp", make) for address, make in figure.files().items()}
        return site

    def render(self, template, here, **more):
        mounts = [here] if here in tools.TOOLS else sorted(
            {tool for tool, _ in tools.plays(here).values()})
        return templates().get_template(template).render(
            tools=tools.TOOLS, computes=self.computes, here=here, mounts=mounts,
            contents=self.contents(), course=markdown.grouped(),
            **({"parts": ()} | more))

    def titles(self):
        """{name: what its docstring begins with, without its number}."""
        return {name: title_of(source.doc)[0] for name, source in self.sources.items()}

    def contents(self):
        """{group of the contents: {name: its title, in few words}}."""
        few = {name: title.split(":")[0] for name, title in self.titles().items()}
        chapters = {name: few[name] for name in self.sources if name not in beside_chapters()}
        return {"Chapters": chapters, "Beside them": {name: few[name] for name in
                                                      self.sources if name not in chapters}}

    def front(self):
        exhibits = {name: self.exhibits(name) for name in self.sources}
        tour = [f"{name}.json" for name in self.sources if name[0].isdigit()]
        found = [run for run in read_runs(self.folder) if Path(run["file"]).name in tour]
        table = list(runs.summary(found)) if found else []
        return self.render("front.html", here="index", titles=self.titles(), exhibits=exhibits,
                           exercises={name: EXERCISES.get(name, ()) for name in self.sources},
                           figures={name: figures_of_files().get(name) for name in self.sources},
                           sources=self.sources, table=table)

    def chapter(self, name):
        source = self.sources[name]
        order = list(self.sources)
        at = order.index(name)
        title, lesson = title_of(source.doc)
        number = label_of(name) if name[0].isdigit() else None
        exhibits, exercises = self.exhibits(name), EXERCISES.get(name, ())
        plays, is_run = tools.plays(name), number and number != "10"
        parts = [("lesson", "Lesson")] if lesson else []
        parts += [(f"play-{tool}", f"▸ {tools.TOOLS[tool].title}") for tool, _ in plays.values()]
        headings = [piece.heading for piece in source.pieces if piece.heading]
        parts += [(f"section-{i}", headed(one)) for i, one in enumerate(headings, start=1)]
        parts += [part for part, is_there in ((("report", "The last report"), is_run),
                                              (("exercises", "Exercises"), exercises),
                                              (("museum", "Silent bugs"), exhibits)) if is_there]
        return self.render(
            "chapter.html", here=name, source=source, title=title, lesson=lesson, parts=parts,
            pieces=source.pieces, before=self.before(name), figure=figures_of_files().get(name),
            reports=reports_of(name, self.folder), exercises=exercises,
            exhibits=exhibits, number=number, plays=plays, opening=opening_of(source),
            beside={place: mount(tool, begins) for place, (tool, begins) in plays.items()},
            is_run=is_run, room=number or room_of(exhibits),
            earlier=order[at - 1] if at else None,
            later=order[at + 1] if at + 1 < len(order) else None)

    def written(self, page, site):
        """A page of pages/. site: what its links may lead to."""
        sections = markdown.sections(page, site)
        parts = [(one.anchor, one.title) for one in sections if one.title]
        return self.render("written.html", here=page.name, page=page, sections=sections,
                           parts=parts)

    def texts(self):
        differences = [(source, tables.lines_of(source)) for source in SOURCES]
        return self.render("texts.html", here="texts", entries=tables.contradictions(),
                           differences=differences, sources=self.sources)

    def before(self, name):
        """{function: (chapter, where, rows of before_and_now, or None: it is the same)} of what
        the last chapter before this one has under the same name."""
        found, numbered = {}, [one for one in self.sources if one[0].isdigit()]
        for other in numbered[:numbered.index(name)] if name in numbered else []:
            source = self.sources[other]
            for function in source.functions:
                found[function] = other, source.place(function), source.lines_of(function)
        beside, mine = {}, self.sources[name]
        for function in mine.functions:
            if function in found:
                (other, place, theirs), lines = found[function], mine.lines_of(function)
                rows = None if theirs == lines else before_and_now(theirs, lines)
                if rows or theirs == lines:
                    beside[function] = other, place, rows
        return beside

    def exhibits(self, name):
        """The silent bugs of the museum that are planted in this file, or that belong beside it."""
        rooms = museum.exhibits()
        in_files = [one for room in rooms.values() for one in room if one.file == f"{name}.py"]
        read = {f"{one}.py" for one in self.sources}
        homeless = [one for one in rooms["checkpoints"] if one.file not in read]
        return in_files + (homeless if name == "lab/checkpoints/checkpoint" else [])

    def search(self):
        """What search looks through: [title, address, text] of lessons, functions, exercises and
        exhibits; and of the five texts."""
        entries = []
        for name, source in self.sources.items():
            page, label = address_of(name), label_of(name)
            entries.append([f"{label} · {self.titles()[name]}", f"{page}#lesson", source.doc])
            entries += [[f"{label} · {function}", f"{page}#{function}",
                         "\n".join(source.lines[first - 1:last])]
                        for function, (first, last) in source.functions.items()]
            entries += [[f"exercise {one.number} · {one.what}", f"{page}#exercise-{one.number}",
                         one.question] for one in EXERCISES.get(name, ())]
            entries += [[f"bug in {label} · {one.title}", f"{page}#{thread_id(one)}",
                         f"{one.number} {one.story}"] for one in self.exhibits(name)]
        entries += [[f"{page.short} · {one.title}".removesuffix(" · "),
                     f"{page.address}#{one.anchor}".removesuffix("#"), one.text]
                    for page in markdown.pages().values()
                    for one in markdown.sections(page, ())]
        entries += tables.search()
        return f"window.SEARCH = {json.dumps(entries, ensure_ascii=False)};\n"

    def choices(self):
        """What the pages that compute can be asked about."""
        from lab.site import answers

        return f"window.CHOICES = {json.dumps(answers.choices())};\n"


def called(name, contents):
    """A file in the words of the contents: "04 Tensor parallelism"."""
    title = next(names[name] for names in contents.values() if name in names)
    return f"{label_of(name)} {title}" if name[0].isdigit() else title


def opening_of(source):
    """What stands above the first function of a file."""
    first = source.pieces[0]
    inside = [node for node in source.tree.body if first.first <= node.lineno <= first.last]
    only = all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in inside)
    return "imports" if only else "imports and constants"


def headed(heading):
    """As a headline: a capital first, if it does not begin with a name, such as f or all_reduce."""
    first, *_ = heading.split()
    return heading if re.search(r"^\w$|[_`]", first) and first != "a" \
        else heading[:1].upper() + heading[1:]


def counted(things, one, many=None):
    """In words: "1 exercise", "3 exercises"."""
    return f"{len(things)} {one if len(things) == 1 else many or one + 's'}"


def room_of(exhibits):
    """Where the museum has the first of them."""
    return next((room for room, those in museum.exhibits().items()
                 if any(one in exhibits[:1] for one in those)), None)


def title_of(doc):
    """(title, the rest) of a docstring. A long first paragraph is both, its beginning the title."""
    first, _, rest = doc.partition("\n\n")
    title = re.sub(r"^\d\d · ", "", first.replace("\n", " "))
    if len(title) > 100:
        title, rest = re.split(r"[:.]", title)[0], doc
    return title.rstrip("."), rest


def thread_id(exhibit):
    """An exhibit's anchor: a thread can have several, in different files."""
    return re.sub(r"\W+", "-", f"bug-{exhibit.number}-{exhibit.title}").lower().strip("-")


def thread(exhibit):
    """The address of the thread that tells of it."""
    repository, number = exhibit.number.split("#")
    return f"https://github.com/{repository}/issues/{number}"


# --------------------------------------------------------------------------------- figures, reports

@cache
def alts():
    """{figure: what the page that shows it says of it}."""
    image = re.compile(r"!\[([^\]]*)\]\((?:\.\./)*figures/(\w+)\.png\)")
    return {file: alt for page in markdown.pages().values()
            for alt, file in image.findall(page.text)}


def figures_of_files():
    """{name: its Figure}: with what its figure.py says of it, or else a page."""
    said = {name: figure.draw.__doc__ for name, figure in pictures.FIGURES.items()}
    files = {name: name for name in chapters.NAMES}
    files |= {name: figure for name, (_, figure) in beside_chapters().items() if figure}
    found = {name: figures.figure(file, said.get(name) or alts().get(file, ""))
             for name, file in files.items()}
    return {name: figure for name, figure in found.items() if figure}


def linked_figures():
    """The figures that pages of pages/ link to."""
    return sorted({file.removeprefix("figures/").removesuffix(".png")
                   for page in markdown.pages().values()
                   for file in markdown.linked_files(page.text) if file.startswith("figures/")})


def read_runs(folder):
    """The runs whose JSON is in a folder; what is no run of a chapter is left out."""
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            run = runs.read(path)
            if runs.misfit(run) is None:
                found.append(run | {"file": str(path), "written": path.stat().st_mtime})
        except (OSError, ValueError, RecursionError, TypeError):
            continue
    return found


def reports_of(name, folder):
    """What a report prints of the runs of a chapter, the newest first."""
    mine = [run for run in read_runs(folder) if run["chapter"] == name and "dtype" in run]
    return [report(run) for run in sorted(mine, key=lambda run: -run["written"])]


def report(run):
    losses, references = run.get("loss", []), run.get("reference_loss", [])     # 00 has none
    norms, seconds = run.get("grad_norm", []), run.get("step_seconds", [])
    shown = [i for i in range(len(losses)) if i < 5 or i == len(losses) - 1]
    steps = [(run.get("first_step", 0) + i + 1, losses[i], *(
        of_all[i] if i < len(of_all) else None for of_all in (references, norms, seconds)))
        for i in shown]
    return {"run": run, "steps": steps, "verdict": runs.verdict(run),
            "variant": runs.variant_of(run)}
