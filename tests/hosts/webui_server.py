"""Starts a real WebUI on the CPU, asks its HTTP API, and reads its log."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
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

import numpy
from PIL import Image

NAME = "sd-lowvram"
FLAGS = "--skip-torch-cuda-test --no-hashing --skip-version-check"
_NO_DOWNLOADS = "--no-download-sd-model --do-not-download-clip"
ON_CPU = {
    "a1111": f"{_NO_DOWNLOADS} --use-cpu all --no-half --precision full",
    "forge": f"{_NO_DOWNLOADS} --always-cpu",
    "reforge": f"{_NO_DOWNLOADS} --always-cpu --all-in-fp32",
    "neo": "--cpu --skip-install --skip-python-version-check",
}
KINDS = {
    "backend/nn/anima.py": "neo",
    "backend/nn/unet.py": "forge",
    "ldm_patched": "reforge",
    "repositories/stable-diffusion-stability-ai": "a1111",
}


def kind_of(webui: str | None) -> str:
    """ "a1111", "forge", "neo" (Forge Neo) or "reforge", recognised by the folder; "" where it is none of them."""
    return next((kind for part, kind in KINDS.items() if webui and (Path(webui) / part).exists()), "")


class RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.text = status, text


@dataclass
class Made:
    """Pictures (H, W, 3) of one call, and what came with them."""

    pictures: list[numpy.ndarray]
    info: dict[str, Any]

    @property
    def picture(self) -> numpy.ndarray:
        return self.pictures[0]

    @property
    def infotext(self) -> str:
        return str(self.info["infotexts"][0])


@dataclass
class Server:
    port: int
    log: Path
    pid: int

    def ask(self, path: str, data: Any = None, timeout: float = 1800) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise RefusedError(error.code, error.read().decode(errors="replace")) from None

    def make(self, what: str = "txt2img", ours: Any = None, **asked: Any) -> Made:
        """One picture of 128x128 in two steps, unless ``asked`` otherwise; ``ours`` are the panel's arguments."""
        body = {"prompt": "a red cube", "steps": 2, "width": 128, "height": 128, "seed": 1, "cfg_scale": 5}
        body |= {"sampler_name": "Euler", "save_images": False, **asked}
        if ours is not None:
            args = ours if isinstance(ours, list) else [{"enabled": True, "vram": "16GB", **ours}]
            body["alwayson_scripts"] = {**body.get("alwayson_scripts", {}), NAME: {"args": args}}
        answer = self.ask(f"/sdapi/v1/{what}", body)
        pictures = [
            numpy.asarray(Image.open(io.BytesIO(base64.b64decode(one))).convert("RGB")) for one in answer["images"]
        ]
        return Made(pictures, json.loads(answer["info"]))

    def told(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def watched(self) -> list[dict[str, Any]]:
        """What webui_watch reported of every step and decode so far."""
        return [json.loads(line[8:]) for line in self.told().splitlines() if line.startswith("[watch] ")]

    def plans(self) -> list[str]:
        """Our lines in the log, one for each time that we planned and attached."""
        return [line for line in self.told().splitlines() if line.startswith(f"[{NAME}]")]

    def sites(self, line: str = "") -> dict[str, int]:
        """The hooks of a line of ours, by default the latest, and how many sites each hit."""
        told = line or self.plans()[-1]
        pairs = (pair.rsplit(" ", 1) for pair in told.partition("sites: ")[2].split(", "))
        return {name: int(count) for name, count in pairs}


@contextlib.contextmanager
def serving(webui: Path, python: str, data: Path, *flags: str) -> Iterator[Server]:
    """A server that is ready, its data in ``data``; ended afterwards by its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = data / f"server-{port}.log"
    command = [python, "launch.py", *FLAGS.split(), *ON_CPU[kind_of(str(webui))].split(), "--api"]
    command += ["--server-name", "127.0.0.1", "--port", str(port), "--data-dir", str(data), *flags]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
    environment |= {"SD_LOWVRAM_CACHE": str(data / "traces"), "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=webui, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    server = Server(port, log, process.pid)
    try:
        _wait(server, process)
        yield server
    finally:
        _end(process)


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.time() + 600
    while "Startup time" not in server.told():
        if process.poll() is not None or time.time() > end:
            raise RuntimeError(f"the WebUI did not start:\n{server.told()[-4000:]}")
        time.sleep(0.5)
    server.ask("/sdapi/v1/scripts")


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
