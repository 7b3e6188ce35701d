"""The formulas of the course, which are plain text in its files, as MathML.

A formula is symbols that the glossary knows, numbers, and what joins them. Spaces bind: in
`b·s·h·e / bandwidth` all of b·s·h·e is over bandwidth, in `S (N-1)/N` only N-1 is over N. What can
be read in two ways is Unclear, and stays text.

    formula    sums, with = <= >= < > <- between them
    sum        products, with + or - between them
    product    quotients, with · ∘ @ or x between them
    quotient   a row, or a row / what is tight
    row        what is tight, side by side: 2 (N-1)/N
    tight      without any space: N-1, b·s/t, 2h², A_in, exp(score), √(L/K), |G|²
"""

import re
from html import escape
from typing import NamedTuple

FUNCTIONS = ("exp", "log", "log2", "sqrt", "max", "min", "mean", "tr", "ceil", "softmax", "silu",
             "sigmoid", "elu", "E4M3")
LETTERS = ("mk", "kn", "mn", "mnk")                     # products without a sign
UNITS = ("FLOP/s", "bytes/s")
SIGNS = {"<=": "≤", ">=": "≥", "<-": "←", "-": "−", "x": "×", "Σ": "∑"}
RELATIONS, SUMS, PRODUCTS = ("=", "<=", ">=", "<", ">", "<-"), ("+", "-"), ("·", "∘", "@", "x")
CLOSING = {"(": ")", "|": "|"}
HIGH, LOW = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻½ᵀ", "₀₁₂₃₄₅₆₇₈₉"
MARKS = dict(zip(HIGH + LOW + "-", "0123456789−½T0123456789−"))
TOKEN = re.compile(
    rf"(?P<unit>(?:{'|'.join(UNITS)})\b)|(?P<number>\d[\d,]*(?<!,)(?:\.\d+)?(?:e\d+)?|½)"
    rf"|(?P<high>[{HIGH}]+|\^-?[½\w]+)|(?P<low>[{LOW}]+)"
    r"|(?P<sign><=|>=|<-|[-=<>+/·∘@√(),|])|(?P<name>log2|E4M3|F&B|Ψ'|[^\W\d_][A-Za-z_]*)")
THIN = "<mspace width=.17em></mspace>"


class Unclear(ValueError):
    """It is no formula, or can be read in two ways."""


class Token(NamedTuple):
    kind: str               # of TOKEN
    text: str
    spaced: bool            # a space is before it


class Node(NamedTuple):
    kind: str
    parts: tuple            # Nodes, or a text


# ------------------------------------------------------------------------------------------ reading

def read(text, known):
    """The formula that a text is, as a Node. known(name): whether it is a symbol here."""
    return Reader(list(tokens(text, known))).formula()


def tokens(text, known):
    """Yield its Tokens. 2mkn is 2, m, k and n, if these are symbols."""
    at, last = 0, None
    while at < len(text):
        begin = at + len(text[at:]) - len(text[at:].lstrip())
        found = TOKEN.match(text, begin)
        if not found or found[0][0] == "0" and found[0][1:2].isdigit():     # chapter 04
            raise Unclear(text)
        kind, spaced, at = found.lastgroup, begin > at, found.end()
        words = [found[0]]
        if words == ["x"] and last and spaced and is_operand(last):         # h x 4h
            if not re.match(r" [\w(]", text[at:]):
                raise Unclear(text)
            kind = "sign"
        elif words == ["Σ"] and text[at:at + 1] == " ":
            kind = "sign"
        elif kind == "name" and not is_name(found[0], known):
            words = list(found[0])
            if not all(map(known, words)) or not (found[0] in LETTERS or (
                    last and last.kind == "number" and not spaced)):
                raise Unclear(text)
        for word in words:
            last = Token(kind, word, spaced)
            yield last
            spaced = False


def is_operand(token):
    return token.kind != "sign" or token.text == ")"


def has_over(node):
    return node.kind == "over" or any(isinstance(one, Node) and has_over(one) for one in node.parts)


def stands_alone(node):
    """In a row, one could not tell it from words: 2 N-1, 2 tokens, 2 bytes/s, 2 a rank, h (dim)."""
    inner = node.parts[0] if node.kind == "brackets" else None
    return node.kind in ("sum", "word", "unit") or node.parts == ("a",) or inner is not None and \
        inner.kind in ("word", "symbol")


def is_name(word, known):
    """dP is the gradient of P."""
    return word in FUNCTIONS or known(word) or word[0] == "d" and len(word) > 1 and known(word[1:])


class Reader:
    """What follows from the tokens, from the widest to the tightest."""

    def __init__(self, tokens):
        self.tokens, self.at = tokens, 0

    def next(self, *texts, spaced=None):
        """Take the next token, if its text is one of these, and it is spaced or is not."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if not token or texts and (token.kind != "sign" or token.text not in texts):
            return None
        if spaced is not None and spaced != self.is_spaced():
            return None
        self.at += 1
        return token

    def is_spaced(self):
        """Whether the next token has a space before it; a sign, one behind it as well."""
        here, *behind = self.tokens[self.at:self.at + 2]
        if behind and here.kind == "sign" and here.text not in CLOSING and here.text not in "√Σ" \
                and here.spaced != behind[0].spaced:
            raise Unclear(here.text)
        return here.spaced

    def formula(self):
        node = self.joined("formula", self.sum, RELATIONS)
        if self.at < len(self.tokens):
            raise Unclear(self.tokens[self.at].text)
        return node

    def joined(self, kind, part, signs, spaced=None):
        """Parts with signs between them; a single one is itself."""
        parts = [part()]
        while sign := self.next(*signs, spaced=spaced):
            parts += [Node("sign", (sign.text,)), part()]
        return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))

    def sum(self):
        return self.joined("sum", self.product, SUMS, spaced=True)

    def product(self):
        if sign := self.next("Σ"):
            return Node("of", (Node("sign", (sign.text,)), self.product()))
        node = self.joined("product", self.quotient, PRODUCTS, spaced=True)
        *before, last = node.parts
        if node.kind == "product" and last.kind == "over" and not any(map(has_over, before)) and (
                Node("sign", ("x",)) not in before):
            above, below = last.parts                   # q · kᵀ / √d is a fraction of all of it
            return Node("over", (Node("product", (*before, above)), below))
        return node

    def quotient(self):
        above = self.row()
        if not self.next("/", spaced=True):
            return above
        below = self.tight()
        if below.kind in ("sum", "product", "over", "beside"):      # x / t·C, x / N-1
            raise Unclear("/")
        return Node("over", (above, below))

    def row(self):
        parts = [self.tight()]
        while self.begins(spaced=True):
            parts.append(self.tight())
        if len(parts) == 1:
            return parts[0]
        if any(map(stands_alone, parts)) or any(one.kind == "number" for one in parts[1:]):
            raise Unclear(" ")
        return Node("row", tuple(parts))

    def tight(self):
        if sign := self.next("-"):
            if not self.begins(spaced=False):
                raise Unclear("-")
            return Node("of", (Node("sign", (sign.text,)), self.tight_product()))
        return self.joined("sum", self.tight_product, SUMS, spaced=False)

    def tight_product(self):
        parts = [self.beside()]
        while sign := self.next("/", *PRODUCTS[:2], spaced=False):
            part = self.beside()
            if sign.text != "/":
                parts += [Node("sign", (sign.text,)), part]
            elif part.kind == "beside" or parts[-1].kind == "over":  # 1/2n, 1/a/b
                raise Unclear("/")
            else:
                parts[-1] = Node("over", (parts[-1], part))
        return parts[0] if len(parts) == 1 else Node("product", tuple(parts))

    def begins(self, spaced):
        """Whether a symbol, a number or a bracket comes next, with or without a space."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        return token and token.spaced == spaced and (
            token.kind in ("name", "number", "unit") or token.text in ("(", "√"))

    def beside(self):
        parts = [self.marked()]
        while self.begins(spaced=False):
            parts.append(self.marked())
        if any(one.kind == "number" for one in parts[1:]):          # a0 is the name of a part
            raise Unclear(parts[0])
        return parts[0] if len(parts) == 1 else Node("beside", tuple(parts))

    def marked(self):
        """An atom, with what is written above or below it."""
        node = self.atom()
        while self.at < len(self.tokens) and not self.tokens[self.at].spaced:
            token = self.tokens[self.at]
            if token.kind in ("high", "low"):
                self.at += 1
                node = Node(token.kind, (node, Node("plain", (token.text,))))
            else:
                break
        return node

    def atom(self):
        token = self.next()
        if not token:
            raise Unclear("")
        if token.text in CLOSING and token.kind == "sign":
            inner = self.list()
            if not self.next(CLOSING[token.text]):
                raise Unclear(token.text)
            return Node("brackets" if token.text == "(" else "size", (inner,))
        if token.text == "√":
            return Node("root", (self.atom(),))
        if token.kind in ("number", "unit"):
            return Node(token.kind, (token.text,))
        if token.kind != "name":
            raise Unclear(token.text)
        if token.text in FUNCTIONS:
            return self.function(token)
        letter = token.text.rstrip("'").split("_")[0]
        return Node("symbol" if len(letter) == 1 else "word", (token.text,))

    def list(self):
        """What is in brackets. A comma may end it: (N·k,)."""
        parts = [self.sum()]
        while sign := self.next(","):
            parts.append(Node("sign", (sign.text,)))
            if self.at < len(self.tokens) and self.tokens[self.at].text != ")":
                parts.append(self.sum())
        return parts[0] if len(parts) == 1 else Node("list", tuple(parts))

    def function(self, token):
        """exp(x), or log2 N; or a symbol of the same name, such as mean."""
        follows = self.tokens[self.at:self.at + 1]
        if not follows or follows[0].text != "(" and not token.text.startswith("log"):
            return Node("word", (token.text,))
        argument = self.marked()
        if token.text == "sqrt":
            return Node("root", (argument,))
        return Node("of", (Node("word", (token.text,)), argument))


# ------------------------------------------------------------------------------------------ writing

def mathml(node, mark, fractions=False):
    """A formula in MathML. fractions: with bars, not with slashes. mark(name): the attributes of a
    symbol's element, or ""."""
    return f"<math>{Writer(mark, fractions).write(node)}</math>"


class Writer:
    """A method for each kind of Node."""

    def __init__(self, mark, fractions):
        self.mark, self.fractions = mark, fractions

    def write(self, node):
        return getattr(self, node.kind)(*node.parts)

    def one(self, node):
        """As one element: the base of an index, a part of a fraction."""
        html = self.write(node)
        return html if node.kind in ("symbol", "word", "number", "unit", "plain", "high", "low") \
            and not html.startswith("<mi>d</mi>") else f"<mrow>{html}</mrow>"

    def all(self, *parts):
        return "".join(map(self.write, parts))

    formula = sum = product = beside = list = all

    def of(self, function, argument):
        """A function of what has no brackets stands apart from it, a minus does not."""
        apart = argument.kind != "brackets" and function.kind == "word"
        html = f"{self.write(function)}{THIN if apart else ''}{self.write(argument)}"
        return html if function.kind == "word" else f"<mrow>{html}</mrow>"

    def row(self, *parts):
        return THIN.join(map(self.write, parts))

    def over(self, above, below):
        if not self.fractions:
            return f"{self.write(above)}<mo lspace=0 rspace=0>/</mo>{self.write(below)}"
        self.fractions = False                          # one bar: what is in it has slashes
        inner = [self.one(one.parts[0] if one.kind == "brackets" else one)
                 for one in (above, below)]
        self.fractions = True
        return f"<mfrac>{inner[0]}{inner[1]}</mfrac>"

    def brackets(self, inner):
        inner = self.write(inner)
        still = "" if "<mfrac>" in inner else " stretchy=false"
        return f"<mrow><mo{still}>(</mo>{inner}<mo{still}>)</mo></mrow>"

    def size(self, inner):
        bar = "<mo stretchy=false>|</mo>"
        return f"<mrow>{bar}{self.write(inner)}{bar}</mrow>"

    def root(self, inner):
        return f"<msqrt>{self.write(inner.parts[0] if inner.kind == 'brackets' else inner)}</msqrt>"

    def high(self, base, mark):
        return f"<msup>{self.one(base)}{self.write(mark)}</msup>"

    def low(self, base, mark):
        return f"<msub>{self.one(base)}{self.write(mark)}</msub>"

    def plain(self, text):
        text = "".join(MARKS.get(one, one) for one in text.removeprefix("^"))
        kind = "mtext" if text.isalpha() else "mn"
        return f"<{kind}>{text}</{kind}>"

    def number(self, text):
        return f"<mn>{text}</mn>"

    def unit(self, text):
        return f"<mtext>{text}</mtext>"

    def sign(self, text):
        return f"<mo>{escape(SIGNS.get(text, text))}</mo>"

    def symbol(self, text):
        mark, (base, _, below) = self.mark(text), text.replace("'", "′").partition("_")
        if below:
            return f"<msub{mark}><mi>{base}</mi><mtext>{below}</mtext></msub>"
        return f"<mi{mark}>{base}</mi>"

    def word(self, text):
        mark = self.mark(text)
        if text == "log2":
            return '<msub><mi class="word">log</mi><mn>2</mn></msub>'
        if not mark and text[0] == "d" and text not in FUNCTIONS:
            inner = Node("symbol" if len(text) == 2 else "word", (text[1:],))
            return f"<mi>d</mi>{self.write(inner)}"
        return f'<mi class="word"{mark}>{escape(text)}</mi>'


# ----------------------------------------------------------------------------------------- in texts

def runs(text, known):
    """Split a text into [(piece, its Node, or None if it is no formula)]. The longest formula is
    taken, if it is not a part of something that is none. A single symbol counts as one."""
    pieces = [(one.start(), one.end()) for one in re.finditer(r"\S+", text)]
    could = [could_be(text[begin:end], known) for begin, end in pieces]
    found, at, i = [], 0, 0
    while i < len(pieces):
        j = next((k for k in range(i, len(pieces)) if not could[k]), len(pieces))
        while j > i:
            begin, end, node = within(text, pieces[i][0], pieces[j - 1][1], known)
            if node and is_whole(text, at, begin, end, node, known):
                break
            j -= 1
        if j > i:
            found += [(text[at:begin], None), (text[begin:end], node)]
            at, i = end, j
        else:
            i += 1
    found.append((text[at:], None))
    return [(piece, node) for piece, node in found if piece]


def could_be(piece, known):
    """Whether what stands between two spaces could be a part of a formula."""
    piece = piece[slice(*stripped(piece, 0, len(piece)))]
    try:
        return piece in SIGNS or bool(list(tokens(piece, known)))
    except Unclear:
        return False


def within(text, begin, end, known):
    """A formula in a part of a text, without what is around it: (begin, end, its Node or None)."""
    begin, end = stripped(text, begin, end)
    node = formula(text[begin:end], known)
    if text[begin:end] == "a" and known("a") and text[end:end + 1] in ("", ",", ".", ":", ")"):
        return begin, end, Node("symbol", ("a",))       # no article
    if not node and text[begin:begin + 1] == "(" and text[end - 1] == ")":
        begin, end = begin + 1, end - 1
        node = formula(text[begin:end], known)
    return begin, end, node


def is_whole(text, at, begin, end, node, known):
    """Whether no sign stands beside a formula, and no number, bracket or symbol that belongs to it.
    The s in 2 s is seconds."""
    before, behind = text[at:begin].split(" ")[-2:], text[end:].split(" ")[:2]
    alone = node.kind == "symbol"
    signs = (*SUMS, *PRODUCTS, "/", *(() if alone else RELATIONS))
    if len(before) == 2 and not before[1] and (
            before[0] in signs or alone and (before[0][-1:].isdigit() or before[0] == "")):
        return False
    if len(behind) < 2 or behind[0] or behind[1] == "x" and not alone:
        return True
    follows = behind[1].rstrip(".,;:)")
    return follows not in signs and (
        alone or follows in ("s", "a") or follows.count("(") > follows.count(")")
        or follows.isalpha() and len(follows) > 1 or not could_be(follows, known))


def stripped(text, begin, end):
    """Without punctuation at the end, and without brackets that open or close outside of it."""
    while begin < end:
        inside = text[begin:end]
        if inside[-1] in ".,:;?!" or inside[-1] == ")" and inside.count(")") > inside.count("("):
            end -= 1
        elif inside[0] == "(" and inside.count("(") > inside.count(")"):
            begin += 1
        else:
            break
    return begin, end


def formula(text, known):
    """Its Node, if it is a formula that has a symbol; else None."""
    try:
        node = read(text, known)
    except Unclear:
        return None
    if node.kind in ("word", "unit") or text in ("a", "A", "I"):        # of the text; an article
        return None
    if node.kind == "brackets" and node.parts[0].kind != "list":
        return None
    return node if any(True for _ in symbols(node)) else None


def symbols(node):
    """Yield the names of the symbols in a formula, without functions."""
    for part in node.parts:
        if isinstance(part, Node):
            yield from symbols(part)
        elif node.kind in ("symbol", "word") and part not in FUNCTIONS:
            yield part
