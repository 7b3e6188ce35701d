"""The course as a site: read beside its code, and play with layouts and schedules.

    python -m lab.site --out site       write it to this folder, for any server of files
    python -m lab.site --port 8000      and serve it to this machine, until Ctrl-C

It is made from the files as they are: run it again after you have changed one.
"""

import contextlib
import functools
import http.server
import sys

from lab.run import commands, refusals


def parse(argv):
    parser = commands.Parser("-m lab.site", description=__doc__)
    parser.add_argument("--out", type=commands.output("site"), default="site",
                        help="the folder to write to; default: site")
    parser.add_argument("--port", type=commands.number(int, 0, 65536, 8000),
                        help="serve the folder on this port; 0: any that is free")
    return parser.parse_args(argv)


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):                      # a terminal has better things to show
        pass


def listen(folder, port):
    """A server of the folder, which no other machine reaches."""
    handler = functools.partial(Handler, directory=folder)
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        refusals.fail(f"--port {port}: {error.strerror}; --port 0 would work")


def main():
    args = refusals.accepted(parse, sys.argv[1:], alone=True)
    server = None if args.port is None else listen(args.out, args.port)
    from lab.site import build

    count, problem = build.write(args.out)
    if problem:
        print(f"no Python for the browser, so tools offer only what is stored: {problem}")
    print(f"{count} files in {args.out}; open {args.out / 'index.html'}")
    if server:
        print(f"the course is at http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)",
              flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    commands.program(main)
