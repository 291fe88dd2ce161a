"""A stand-in for a server or a draft service, as a program: `python member.py PORT [WHAT ...]`.

It says on /health what the file of --state says, "ok" without one, and answers POST with one JSON body. WHAT:
`--state=FILE`, `--child=FILE` (has a child of its own, whose pid it writes there), `--stubborn` (ignores SIGTERM),
`--status=N` (ends with N at once, and says what `--says=TEXT` has), `--ends=FILE` (as well, with what the file says,
while there is one); other options are taken and ignored.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT = int(sys.argv[1])
GIVEN = dict(option.partition("=")[::2] for option in sys.argv[2:])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        state = Path(GIVEN.get("--state", "/nonexistent"))
        said = state.read_text() if state.exists() else "ok"
        self.answer({"status": said, "detail": ""}, 503 if said == "dead" else 200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({"port": PORT, "pid": os.getpid()}, 200)

    def answer(self, body: dict, status: int) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    print("member begins", flush=True)
    if "--status" in GIVEN:
        print(GIVEN.get("--says", "this option is wrong"), file=sys.stderr)
        sys.exit(int(GIVEN["--status"]))
    if Path(GIVEN.get("--ends", "/nonexistent")).exists():
        print("this start is one too many", file=sys.stderr)
        sys.exit(int(Path(GIVEN["--ends"]).read_text()))
    if "--child" in GIVEN:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(GIVEN["--child"]).write_text(str(child.pid))
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    if "--stubborn" in GIVEN:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    server.server_close()


main()
