"""The course in a browser: read beside its code, and play with layouts and schedules.

    python -m lab.site [--port 8000]    on this machine alone, until Ctrl-C; it prints its address
    python -m lab.site --out site       as files, for whatever serves files, or for a double click

What is shown is made from the files as they are: save a chapter, and load its page again. Numbers
of runs come from runs/, which `make tour` fills.
"""

import sys
import threading

from common import Refused
from lab.run import commands, refusals


def parse(argv):
    parser = commands.Parser("-m lab.site", description=__doc__)
    parser.add_argument("--port", type=commands.number(int, 0, 65536, 8000), default=8000,
                        help="default: 8000; 0: any that is free")
    parser.add_argument("--out", type=commands.output("site"), help="write files to this folder")
    return parser.parse_args(argv)


def listen(port):
    from lab.site.server import Server

    try:
        return Server(port)
    except OSError as error:
        raise Refused(f"--port {port}: {error.strerror}", "--port 0") from None


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    if args.out:
        from lab.site import plans
        from lab.site.export import write

        plans.SECONDS = 600                             # no reader waits for these searches
        count, why = write(args.out)
        if why:
            print(f"no Python for the browser, so that only what is stored is answered: {why}")
        print(f"{count} files in {args.out}; open {args.out / 'index.html'}")
        return 0
    try:
        server = listen(args.port)
    except Refused as refused:
        refusals.fail(f"{refused.args[0]}; {refused.args[1]} would work")
    print(f"the course is at {server.address} (on this machine alone; Ctrl-C ends it)", flush=True)
    from lab.site import answers

    threading.Thread(target=answers.warm_up, daemon=True).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:                           # its usual end
        print()
    return 0


if __name__ == "__main__":
    commands.program(main)
