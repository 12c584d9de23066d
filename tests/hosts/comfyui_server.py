"""Starts a real ComfyUI, posts prompts to it over HTTP, and reads back what came of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACK = "sd-lowvram-test"
Prompt = dict[str, dict[str, Any]]


class RunError(Exception):
    """A prompt was refused, failed or was interrupted."""


@dataclass
class Server:
    """One running ComfyUI."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    output: Path

    def call(self, path: str, body: Any = None) -> Any:
        raw = self.text(path, body)
        return json.loads(raw) if raw else None

    def text(self, path: str, body: Any = None) -> str:
        """What the server answers.

        Raises:
            RunError: it refused; the message is its own.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                raw: bytes = answer.read()
                return raw.decode()
        except urllib.error.HTTPError as error:
            raise RunError(error.read().decode()) from None

    def start(self, prompt: Prompt) -> str:
        """Queue a prompt; returns its id."""
        return str(self.call("/prompt", {"prompt": prompt})["prompt_id"])

    def finish(self, number: str, seconds: float = 900) -> dict[str, Any]:
        """Wait for a prompt's entry in the history.

        Raises:
            RunError: it failed; the message is the node's.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            entry = self.call(f"/history/{number}").get(number)
            if entry:
                if entry["status"]["status_str"] != "success":
                    raise RunError(json.dumps(entry["status"]["messages"]))
                return dict(entry)
            assert self.process.poll() is None, self.tail()
            time.sleep(0.3)
        raise RunError(f"not done after {seconds} s")

    def run(self, prompt: Prompt) -> dict[str, Any]:
        return self.finish(self.start(prompt))

    def pictures(self, entry: dict[str, Any]) -> dict[str, Path]:
        """The saved pictures by the ids of their nodes."""
        found = {}
        for node, shown in entry["outputs"].items():
            for image in shown.get("images", []):
                if image["type"] == "output":
                    found[node] = self.output / image["subfolder"] / image["filename"]
        return found

    def lines(self, word: str) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if re.search(word, line)]

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@contextlib.contextmanager
def serving(comfyui: Path, python: str, folder: Path, *options: str) -> Iterator[Server]:
    """A ComfyUI on the CPU for the time of the block, with no node pack but ours, writing to ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, output = folder / "comfyui.log", folder / "output"
    command = [python, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port), "--disable-auto-launch"]
    command += ["--output-directory", str(output), "--disable-all-custom-nodes", "--whitelist-custom-nodes", PACK]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *options],
            cwd=comfyui,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    server = Server(process, port, log, output)
    try:
        _wait(server)
        yield server
    finally:
        for end in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(end)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)


def _wait(server: Server) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert server.process.poll() is None, server.tail()
        with contextlib.suppress(OSError, ValueError):
            server.call("/system_stats")
            return
        time.sleep(0.5)
    raise AssertionError(server.tail())


def to_prompt(workflow: dict[str, Any], info: dict[str, Any]) -> Prompt:
    """A saved workflow as the page would queue it: values by position, links by number."""
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt: Prompt = {}
    for node in workflow["nodes"]:
        wired = {one["name"]: links[one["link"]] for one in node["inputs"] if one["link"] is not None}
        values = iter(node["widgets_values"])
        inputs = dict(wired)
        for name, (kind, *options) in _fields(info[node["type"]]).items():
            if name in wired or not (isinstance(kind, list) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")):
                continue
            value = next(values, None)
            if value is not None:
                inputs[name] = value
            if options and options[0].get("control_after_generate"):
                next(values, None)
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def _fields(definition: dict[str, Any]) -> dict[str, Any]:
    return {**definition["input"].get("required", {}), **definition["input"].get("optional", {})}
