"""Programs in processes of their own that import nothing anew: each is a fork of one that has imported already.

``python forked.py SETUP`` runs the program SETUP, then reads requests, one JSON object a line, and answers each with
the exit code of the fork that ran it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

SECONDS = 120


@contextlib.contextmanager
def forks_of(setup: str, env: dict[str, str]) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Forks of a process that has run ``setup``.

    Yields ``run(program, *arguments, folder=..., largest_file=...)``, which returns what subprocess.run would.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, setup], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    requests, answers = process.stdin, process.stdout

    def run(
        program: str, *arguments: object, folder: Path, largest_file: int = resource.RLIM_INFINITY
    ) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as told:
            streams = [Path(told, name) for name in ("out", "err")]
            request = {
                "program": program,
                "arguments": [str(argument) for argument in arguments],
                "folder": str(folder),
                "largest_file": largest_file,
                "streams": [str(path) for path in streams],
            }
            print(json.dumps(request), file=requests, flush=True)
            code = int(answers.readline())
            out, err = (path.read_text(encoding="utf-8", errors="surrogateescape") for path in streams)
            return subprocess.CompletedProcess(request["arguments"], code, out, err)

    with process:
        yield run
        requests.close()


def _become(request: dict) -> None:
    """The process that the request asks for, up to its program."""
    signal.alarm(SECONDS)  # one that hangs ends, by a signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has programs in the background ignore it
    os.chdir(request["folder"])
    for stream, path in zip((1, 2), request["streams"], strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file"], most))
    sys.argv = ["-c", *request["arguments"]]


def main() -> None:
    exec(sys.argv[1], {})
    gc.collect()
    gc.freeze()  # a fork that looks through what is imported, as each does at its end, copies all of it
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            request = json.loads(line)
            _become(request)
            exec(request["program"], {"__name__": "__main__"})
            return  # what ends a program ends the fork: Python's own way out
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    sys.path[0] = ""  # as ``python -c`` has it
    main()
