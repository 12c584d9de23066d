"""State of the process that a test has to leave as it found it, compared before and after."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

_OURS = "sd_lowvram"
_CHECKOUT = str(Path(__file__).parents[2])
"""The folder whose places on ``sys.path`` are compared: torch's compiler adds some of its own."""
_THEIRS = ("torch", "diffusers", "transformers")
_PATCHED = ("torch", "torch.nn.functional", "torch.cuda")
"""Third-party modules whose functions are compared; of the rest, their classes."""
_TABLES = ("sd_lowvram.doors", "sd_lowvram.commands.interrupts")
"""Modules whose tables a test leaves as long as they were: what is registered, and signals that came."""
_ABSENT = object()
_SWITCHES = (
    "get_default_dtype", "get_deterministic_debug_mode", "get_float32_matmul_precision", "get_num_threads",
    "is_anomaly_enabled", "is_autocast_cache_enabled", "is_autocast_enabled", "is_grad_enabled",
    "is_inference_mode_enabled",
)  # fmt: skip
_ONCE = {
    "environment CUDA_MODULE_LOADING",
    "environment PYTEST_CURRENT_TEST",
    "environment TORCHINDUCTOR_CACHE_DIR",
    "environment _TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "environment TRITON_CACHE_DIR",
    "environment TRITON_PTXAS_PATH",
    *(f"thread {name}" for name in ("InductorSubproc", "subproc_worker_timer", "tqdm_monitor")),
    "torch.manual_seed",
    "torch.nn.modules.module.Module.__init__",
    "torch.nn.modules.module.Module.__setattr__",
    "torch.nn.modules.module.Module.__setstate__",
}
"""State that pytest, torch's compiler, transformers and tqdm set in every process that uses them, and nobody undoes."""
_BY_DYNAMO = ("__resume_at_", "__compiled_fn_")
"""Beginnings of the names of functions that torch's compiler stores in the module of what it compiles."""


class Namespaces:
    """Functions, classes and tables of the package and of the libraries, as they were when they were first seen."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._near: dict[str, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        self._far: dict[str, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        self._tables: dict[str, Any] = {}
        self._contexts: dict[str, ContextVar[Any]] = {}
        self._differing: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        """Per namespace: its content when it was last read, and how that differs from its first content."""

    def extend(self) -> None:
        """Take in what has been imported since."""
        if len(sys.modules) == len(self._seen):
            return
        for name in list(sys.modules.keys() - self._seen):
            module, top = sys.modules[name], name.partition(".")[0]
            if type(module) is ModuleType and top in (_OURS, *_THEIRS):
                self._take(name, module, top == _OURS)
        self._seen = set(sys.modules)

    def _take(self, name: str, module: ModuleType, ours: bool) -> None:
        import torch
        from torch import nn

        if ours or name in _PATCHED:
            self._near[name] = vars(module), dict(vars(module))
        for key, value in list(vars(module).items()):
            if issubclass(type(value), type) and value.__module__ == name:
                if ours or value in (nn.Module, torch.Tensor):
                    self._near[f"{name}.{key}"] = vars(value), dict(vars(value))
                elif name.startswith("diffusers") or issubclass(value, nn.Module):
                    self._far[f"{name}.{key}"] = vars(value), dict(vars(value))
            elif name in _TABLES and isinstance(value, (dict, list)) and key[:2] != "__":
                self._tables[f"{name}.{key}"] = value
            elif ours and isinstance(value, ContextVar):
                self._contexts[f"{name}.{key}"] = value

    def patched(self, far: bool = True) -> dict[str, Any]:
        """All that is not as it was when it was first seen, and its present value; of libraries, functions and classes.

        Args:
            far: in classes of the libraries too, which takes too long for each test.
        """
        found = {}
        for name, (space, before) in (self._near | self._far if far else self._near).items():
            if not _same(space, before):
                known, own = self._differing.get(name, (None, {}))
                if known is None or not _same(space, known):
                    own = self._changed(name, space, before)
                    self._differing[name] = dict(space), own
                found.update(own)
        return found

    def _changed(self, name: str, space: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for key in {*space, *before}:
            now, then = space.get(key, _ABSENT), before.get(key, _ABSENT)
            if name.startswith(_OURS):
                loaded = then is _ABSENT and (isinstance(now, ModuleType) or not callable(now))
                loaded = loaded or key.startswith(_BY_DYNAMO)
            else:
                loaded = then is _ABSENT or not callable(then)
            if now is not then and not loaded and f"{name}.{key}" not in _ONCE:
                found[f"{name}.{key}"] = now
        return found

    def state(self) -> dict[str, Any]:
        """Sizes of the package's tables, and its context variables."""
        doors = sys.modules.get("sd_lowvram.doors")
        hidden = () if doors and doors._found.is_set() else "sd_lowvram.doors."  # filled when they are first asked
        sizes: dict[str, Any] = {
            name: len(table) for name, table in self._tables.items() if not name.startswith(hidden)
        }
        return sizes | {name: context.get(None) for name, context in self._contexts.items()}


def _torch_state() -> dict[str, Any]:
    import torch
    from torch.nn.modules import module
    from torch.utils import _python_dispatch

    backends, cuda = torch.backends, torch.backends.cuda
    return {
        **{name: getattr(torch, name)() for name in _SWITCHES},
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "TF32": (backends.cudnn.allow_tf32, cuda.matmul.allow_tf32),
        "kernels of attention": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        "torch function modes": torch._C._len_torch_function_stack(),
        "torch dispatch modes": len(_python_dispatch._get_current_dispatch_mode_stack()),
        "hooks of all modules": (len(module._global_forward_hooks), len(module._global_forward_pre_hooks)),
    }


def _on_the_card() -> dict[str, int]:
    """MiB that tensors hold on CUDA devices, once what is unused has been freed; libraries cache small tables there."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    gc.collect()
    torch.cuda.empty_cache()
    return {f"MiB on cuda:{one}": torch.cuda.memory_allocated(one) >> 20 for one in range(torch.cuda.device_count())}


def _process_state() -> dict[str, Any]:
    import logging

    mask = os.umask(0)
    os.umask(mask)
    environment = {f"environment {name}": value for name, value in os.environ.items()}
    environment = {name: value for name, value in environment.items() if name not in _ONCE}
    numbers = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGALRM", signal.SIGINT))
    return {
        **environment,
        "current directory": os.getcwd(),
        "umask": oct(mask),
        "signal handlers": [signal.getsignal(number) for number in numbers],
        "sys.path": [place for place in sys.path if place.startswith(_CHECKOUT) and "site-packages" not in place],
        "hooks of exceptions": (sys.excepthook, threading.excepthook),
        "logging": logging.root.manager.disable,
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
    }


class Leftovers:
    """Compares the process before and after a test, and before and after a file of tests."""

    def __init__(self) -> None:
        self._namespaces = Namespaces()
        self._before: dict[str, Any] = {}
        self._patched: dict[str, Any] = {}
        self._modules: dict[str, ModuleType] = {}
        self._threads: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
        self._carriers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def refresh(self) -> list[str]:
        """Take the present state as the one that the next test has to leave; return what is no longer imported."""
        self._namespaces.extend()
        self._before = {**_process_state(), **_torch_state(), **self._namespaces.state()}
        self._patched = self._namespaces.patched(far=False)
        return self._replaced()

    @contextlib.contextmanager
    def of_test(self, name: str) -> Iterator[list[str]]:
        """Yield a list of what the block leaves, filled when it has ended."""
        import torch

        found: list[str] = []
        before, patched = self._before, self._patched
        yield found
        self._note(name)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the next test finds no segments that this one has split
        found += self.refresh()
        found += _differences(before, self._before) + _differences(patched, self._patched, "patched ")
        if "TRITON_INTERPRET" in os.environ:  # Triton's interpreter adds its names to the modules of kernels
            found[:] = [one for one in found if f"{_OURS}.kernels.triton." not in one]

    @contextlib.contextmanager
    def of_file(self) -> Iterator[list[str]]:
        """The same for all tests of a file together, with its threads and models that carry hooks."""
        found: list[str] = []
        self.refresh()
        before, patched = self._before | _on_the_card(), self._namespaces.patched()
        self._note("before")
        yield found
        self._note("fixtures of the file")
        self.refresh()
        found += _differences(before, self._before | _on_the_card())
        found += _differences(patched, self._namespaces.patched(), "patched ")
        if any(value != "before" for value in (*self._threads.values(), *self._carriers.values())):
            gc.collect()
            for thread, test in list(self._threads.items()):
                pooled = thread.name.startswith("ThreadPoolExecutor-")  # of a library: ours have names
                if test != "before" and not pooled and f"thread {thread.name}" not in _ONCE:
                    thread.join(1)
                    found += [f"thread {thread.name} of {test}"] if thread.is_alive() else []
            tests = [test for test in self._carriers.values() if test != "before"]
            found += [f"hooks on a model that is still held, of {test}" for test in tests]
            for kept in (self._threads, self._carriers):
                kept.update(dict.fromkeys(list(kept), "before"))

    def _replaced(self) -> list[str]:
        """Modules of the package that are gone, or were replaced by now."""
        before, now = self._modules, sys.modules
        if before == now:
            return []
        self._modules = dict(now)
        lost = [name for name, one in before.items() if now.get(name) is not one]
        return [f"sys.modules[{name!r}]" for name in lost if name.partition(".")[0] == _OURS]

    def _note(self, test: str) -> None:
        """Write down after which test a thread or an attachment was first there."""
        for thread in threading.enumerate():
            self._threads.setdefault(thread, test)
        threads = sys.modules.get("sd_lowvram.memory.threads")
        for carrier in list(threads._carriers) if threads else ():
            self._carriers.setdefault(carrier, test)


def seed() -> None:
    """Set the generators of the process as a new process has them, whatever has been drawn before."""
    import numpy
    import torch

    torch.default_generator.manual_seed(torch.Generator().initial_seed())
    numpy.random.seed(0)
    random.seed(0)


def _same(space: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    try:
        return space == other
    except Exception:  # values that do not compare, as tensors
        return False


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], kind: str = "") -> list[str]:
    if before == after and not kind:
        return []
    found = []
    for name in sorted({*before, *after}):
        then, now = before.get(name, _ABSENT), after.get(name, _ABSENT)
        new = then is _ABSENT and not kind and not name.startswith("environment ")  # imported since
        if not new and ((now is not then) if kind else (now != then)):
            told = ("not there" if value is _ABSENT else repr(value)[:80] for value in (then, now))
            found.append(f"{kind}{name}" if kind else f"{name}: {' -> '.join(told)}")
    return found
