"""The page on 127.0.0.1, with the standard library's server; or all of it as files.

It serves what `Course.site` lists and `answers.QUESTIONS` answers, and nothing else: an address is
looked up, never joined to a folder. It needs no network, and asks nobody else for anything.
"""

import http.server
import json
import select
import socket
import sys
import traceback
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

from common import Refused
from lab.run.refusals import one_line
from lab.site import answers, plans
from lab.site.reading import Course

HOST = "127.0.0.1"
LONGEST = 4096          # of an address
HEADERS = {             # nothing from elsewhere, no script in a page, no page of others around it
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store"}


def answer(name, query, is_gone=plans.never):
    """(status, data) of a question such as ("ring", "ranks=4"). is_gone: whether nobody waits."""
    try:
        asked = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query),
                          max_num_fields=100)
        if name not in answers.QUESTIONS:
            raise Refused(f"there is no question {name!r}; there are "
                          + ", ".join(answers.QUESTIONS))
        if len(dict(asked)) < len(asked):
            raise Refused("a parameter is given twice")
        waits = (is_gone,) if name == "best" else ()    # the one that takes long
        return HTTPStatus.OK, answers.QUESTIONS[name](dict(asked), *waits)
    except Refused as refused:
        return HTTPStatus.BAD_REQUEST, {"error": one_line(refused.args[0])}
    except ValueError as error:                         # of parse_qsl
        return HTTPStatus.BAD_REQUEST, {"error": one_line(f"{query!r}: {error}")}


class Handler(http.server.BaseHTTPRequestHandler):
    """GET and HEAD of the site, and of /api/."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    server_version, sys_version = "Fivefold", ""

    def do_GET(self):
        try:
            status, kind, body = self.respond()
        except Exception:                               # ours: the terminal shows where
            traceback.print_exc()
            status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8"
            body = b"this page could not be made; the terminal says why\n"
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": kind,
                                       "Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def respond(self):
        """(status, type, body) of what is asked for."""
        plain, as_json = "text/plain; charset=utf-8", "application/json"
        own = {f"{host}:{self.server.server_port}" for host in (HOST, "localhost")}
        if self.headers.get("Host") not in own:         # a name of others that leads here
            return HTTPStatus.BAD_REQUEST, plain, b"this server answers to its own address only\n"
        if len(self.path) > LONGEST:
            return HTTPStatus.REQUEST_URI_TOO_LONG, plain, b"this address is too long\n"
        try:
            url = urlsplit(self.path)
        except ValueError:                              # of http://[/
            return HTTPStatus.BAD_REQUEST, plain, b"this is no address\n"
        if url.path.startswith("/api/"):
            status, data = answer(url.path.removeprefix("/api/"), url.query, self.is_gone)
            return status, as_json, json.dumps(data).encode()
        site = self.server.course().site()
        found = site.get(url.path.removeprefix("/") or "index.html")
        if not found:
            return HTTPStatus.NOT_FOUND, plain, b"there is no such page; / has them all\n"
        kind, make = found
        return HTTPStatus.OK, kind, as_bytes(make())

    def is_gone(self):
        """Whether the browser has closed the connection, as it does when a script asks anew."""
        try:
            said, _, _ = select.select([self.connection], [], [], 0)
            return bool(said) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def log_message(self, *words):                      # a terminal has better things to show
        pass


class Server(http.server.ThreadingHTTPServer):
    """On the loopback alone. course: makes the Course anew: a page is as its file is now."""

    daemon_threads = True

    def __init__(self, port, course=Course):
        self.course = course
        super().__init__((HOST, port), Handler)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):    # a browser that went on
            super().handle_error(request, client_address)

    @property
    def address(self):
        return f"http://{HOST}:{self.server_port}/"


def as_bytes(text):
    return text if isinstance(text, bytes) else text.encode()
