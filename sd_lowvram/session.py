"""Hooks are attached here and taken off again without a trace.

The record of what is attached lives on the target itself, so that both are freed together.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .compat import is_compiling
from .compat.private import exclude_from_graphs
from .devices.support import device_of
from .errors import BadInputError
from .hooks.joined_maps import joined_maps
from .hooks.parking.offload import step_groups
from .hooks.registry import active_hooks, applicable
from .hooks.replay.compiled import knobs_outside_graph
from .memory.limit import Bound
from .memory.pinned_buffers import PINNED_BUFFERS
from .memory.segments import begin_stage
from .memory.threads import Place, all_places, carries, pause_models, place_of, turn
from .models import dissect, dissect_any, dissect_rehearsed
from .models.anatomy import Anatomy
from .models.recorded import Rehearsal
from .models.support import run_pipeline_on, unsupported_error
from .patches import RECORD, Change, Patch, carries_hooks, refuse_conflicts, set_patch, wrap
from .settings import Settings, check_settings
from .streaming.timing import StepTiming


@dataclass(eq=False, repr=False)
class Attachment:
    """The result of one call of :func:`attach`: settings, the number of sites of each hook, and how to undo it.

    Attributes:
        bound: the budget that limits torch's allocator while the models run; None: nothing does.
        runs_uncompiled: the reason why a compiled model runs uncompiled with these hooks; empty if it does not.
    """

    anatomy: Anatomy
    settings: Settings
    device: torch.device
    timing: StepTiming | None = None
    sites: dict[str, int] = field(default_factory=dict, init=False)
    plan: Any = field(default=None, init=False)
    bound: Bound | None = field(default=None, init=False)
    runs_uncompiled: str | None = field(default=None, init=False)
    _steps: list[Patch | Change] | None = field(default=None, init=False)
    _undo: list[Callable[[], None]] = field(default_factory=list, init=False)

    def prepare(self) -> None:
        """Find the sites and make the patches without setting them.

        Raises:
            NoSiteError, SettingsError.
            NoSiteError, SettingsError: as :func:`attached`.
        """
        if self._steps is None:
            self.settings = applicable(self.settings, self.anatomy, self.device)
            hooks = active_hooks(self.settings, self.timing)
            self._steps = [step for hook in hooks for step in hook(self.anatomy, self.settings, self.device)]

    def apply(self) -> None:
        """Set every patch; if one fails, none stays. From now on calls of the components in several threads wait for
        each other.

        Raises:
            NoSiteError, ConflictError, SettingsError: before anything has been set.
        """
        self.prepare()
        assert self._steps is not None
        refuse_conflicts(step for step in self._steps if isinstance(step, Patch))
        self.sites = {}
        try:
            for step in self._steps:
                self._undo.append(step.apply() if isinstance(step, Change) else set_patch(step))
                self.sites[step.hook] = self.sites.get(step.hook, 0) + 1
            self.add(joined_maps(self.anatomy))
            self.add(self._thread_patches())
            buffers = contextlib.ExitStack()
            buffers.enter_context(PINNED_BUFFERS.keep())
            self._undo.append(buffers.close)
        except BaseException:
            self.undo()
            raise

    def add(self, patches: Iterable[Patch]) -> None:
        """Set further patches, outside those that are set.

        Args:
            patches: in the order in which they wrap the model; the last is the outermost.
        """
        self._undo.extend(set_patch(patch) for patch in patches)

    def _thread_patches(self) -> Iterator[Patch]:
        hidden = bool(knobs_outside_graph(self.settings))
        for group in step_groups(self.anatomy, self.anatomy.components):
            steps_of = self if self.anatomy.denoiser in group else None
            begin = functools.partial(self._begin, group, steps_of)
            for name, component in group.items():
                for entry in self.anatomy.entries[name]:
                    again = functools.partial(getattr, component, entry)
                    limited = functools.partial(self._limit, name, entry)
                    alone = functools.partial(self._call_alone, self._places(name), limited, begin, again)
                    around = functools.partial(self._call_outside_graph, is_compiling(), alone) if hidden else alone
                    yield wrap(component, entry, around, "threads")

    def modules(self) -> Iterable[nn.Module]:
        """The models that carry what is attached."""
        return self.anatomy.components.values()

    @property
    def places(self) -> set[Place]:
        """Devices and models that other threads do not use while this is attached or detached."""
        return {place for name in self.anatomy.components for place in self._places(name)}

    def _places(self, name: str) -> set[Place]:
        """Places that a call of the component needs: its device, where its inputs and outputs are, even for a decoder
        on the
        CPU. TF32 is process-wide, so take every device's lock."""
        if self.settings.precision == "tf32":
            return {*all_places(), place_of(self.device)}
        on_cpu = self.settings.decoder_device == "cpu" and name == self.anatomy.autoencoder
        return {place_of(device) for device in (self.device, *([torch.device("cpu")] if on_cpu else []))}

    def _limit(self, name: str, entry: str, inputs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.bound is None else self.bound.during(name, entry, inputs)

    def _begin(self, group: Iterable[str], steps_of: object | None) -> None:
        stages = self.plan.stages if self.plan is not None else ()
        sizes = [stage.segment_bytes for stage in stages if stage.component in group]
        begin_stage(self.device, steps_of, max(sizes) if all(sizes) and sizes else 0)

    def _call_alone(
        self,
        places: Iterable[Place],
        limited: Callable[[Any], contextlib.AbstractContextManager[None]],
        begin: Callable[[], None],
        again: Callable[[], Callable[..., Any]],
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call ``original`` when no other thread calls a model that carries hooks and runs where this does."""
        with turn(places):
            if self._undo:
                with limited((args, kwargs)):
                    begin()
                    return original(*args, **kwargs)
        return again()(*args, **kwargs)  # this has been taken off while the thread waited

    def _call_outside_graph(
        self, is_compiling: Callable[[], bool], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """``call``, and outside of its graph where somebody's torch.compile follows."""
        if is_compiling():
            return exclude_from_graphs(self._call_uncompiled)(call, *args, **kwargs)
        return call(*args, **kwargs)

    def _call_uncompiled(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.runs_uncompiled is None:
            names = ", ".join(knobs_outside_graph(self.settings))
            self.runs_uncompiled = (
                f"this model is compiled by torch.compile, and runs uncompiled: no compiler follows {names}"
            )
            warnings.warn(self.runs_uncompiled, stacklevel=2)
        return call(*args, **kwargs)

    def add_undoing(self, undo: Callable[[], None]) -> None:
        """Register ``undo`` to be called when this is taken off."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo everything, in reverse order; an error in one step does not keep the other steps from running."""
        with contextlib.ExitStack() as stack:
            for undo in self._undo:
                stack.callback(undo)
            self._undo = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise carries_hooks("copied")


def anatomy_of(target: Any, settings: Settings | None = None, rehearsal: Rehearsal | None = None) -> Anatomy:
    """Return the anatomy of ``target``: its family, components and sites.

    Args:
        target: a pipeline, a host's shell of one, or a model by itself.
        settings: if they decide ``offload``, any pipeline or module is accepted.
        rehearsal: record of the pipeline's own call; with one, any pipeline is accepted.

    Returns:
        The anatomy; of an unknown family, only the components with their weights.

    Raises:
        UnsupportedModelError: ``target`` is of an unknown family, or a part of it cannot be planned.
    """
    if rehearsal is not None:
        return dissect_rehearsed(target, rehearsal)
    placed = settings is not None and settings.offload is not None
    anatomy = dissect_any(target) if placed else dissect(target)
    if anatomy is None:
        raise unsupported_error(target)
    return anatomy


def attach(
    target: Any,
    settings: Settings,
    device: torch.device,
    timing: StepTiming | None = None,
    rehearsal: Rehearsal | None = None,
) -> Attachment:
    """Attach the hooks that ``settings`` request to ``target``, outside any that are attached already.

    Args:
        target: as for :func:`attached`.
        settings: undecided knobs leave the model as it is.
        device: device that computes.
        timing: times of a step's modules, from the plan; they decide which weights stay on the device.
        rehearsal: as for :func:`anatomy_of`.

    Returns:
        The attachment, for :func:`detach`.

    Raises:
        UnsupportedModelError, NoSiteError, ConflictError: as :func:`attached`; nothing is attached then.
    """
    attachment = Attachment(anatomy_of(target, settings, rehearsal), settings, device, timing)
    with pause_models(attachment.modules(), attachment.places):
        _put_on(target, attachment)
    return attachment


def _put_on(target: Any, attachment: Attachment) -> None:
    forget = carries(attachment, attachment.places)
    try:
        attachment.apply()
    except BaseException:
        forget()
        raise
    attachment.add_undoing(forget)
    attachment.add_undoing(run_pipeline_on(target, attachment.device))
    vars(target).setdefault(RECORD, []).append(attachment)


def prepare(target: Any, settings: Settings, device: torch.device) -> Attachment:
    """Prepare an attachment without setting it, for hosts that enter and leave around every call.

    Args:
        target: as for :func:`attached`.
        settings: as for :func:`attach`.
        device: device that computes.

    Returns:
        The attachment, for :func:`enter_hooks`.

    Raises:
        BadInputError, NoSiteError, SettingsError: as :func:`attached`.
    """
    attachment = Attachment(anatomy_of(target, settings), settings, device)
    attachment.prepare()
    return attachment


@contextlib.contextmanager
def enter_hooks(target: Any, attachment: Attachment) -> Iterator[None]:
    """Set an attachment from :func:`prepare` on ``target`` within the block; it may be entered any number of times.

    Other threads that call a hooked model on the same device wait until the block ends.

    Args:
        target: the target of ``attachment``.
        attachment: from :func:`prepare`.
    """
    with turn(attachment.places):
        with pause_models(attachment.modules()):
            _put_on(target, attachment)
        try:
            yield
        finally:
            detach(target, attachment)


def detach(target: Any, attachment: Attachment) -> None:
    """Remove one attachment from ``target``, in any order.

    Args:
        target: as for :func:`attached`.
        attachment: from :func:`attach`.
    """
    with pause_models(attachment.modules(), attachment.places):
        records = vars(target).get(RECORD, [])
        if attachment in records:
            records.remove(attachment)
            if not records:
                del vars(target)[RECORD]
        attachment.undo()


def attachments(target: Any) -> list[Attachment]:
    """Attachments of ``target``, in the order in which they were attached."""
    return list(getattr(target, "__dict__", {}).get(RECORD, []))


def restore(target: Any) -> None:
    """Remove everything of ours from ``target``, bit for bit; without an attachment nothing happens.

    Args:
        target: what was given to ``optimize`` or :func:`attach`. Its calls in other threads are waited for.

    Raises:
        BadInputError: ``target`` cannot carry an attachment (a name or a dictionary, for example).
    """
    if not hasattr(target, "__dict__") or isinstance(target, type):
        raise BadInputError(f"restore() takes what was given to optimize(), not {target!r:.100}")
    present = attachments(target)
    models = [model for attachment in present for model in attachment.modules()]
    with pause_models(models), contextlib.ExitStack() as stack:
        for attachment in attachments(target):
            stack.callback(detach, target, attachment)


@contextlib.contextmanager
def attached(
    target: Any, settings: Settings, *, device: torch.device | str | None = None, timing: StepTiming | None = None
) -> Iterator[Attachment]:
    """Attach the hooks of ``settings`` to ``target`` within the block. Undecided knobs attach nothing.

    Args:
        target: a diffusers pipeline of SD1.x, SD2.x, SDXL or FLUX.1, or a model of CompVis, ComfyUI or Forge; or a
            component.
        settings: undecided knobs (None) leave the model as it is. A preset (``Settings.smallest()``) skips knobs that
            have no site in this target.
        device: device that computes; None: a GPU if there is one, else the CPU.
        timing: as :func:`attach`.

    Yields:
        The attachment, with the anatomy of the target and the number of sites of each hook (``sites``).

    Raises:
        UnsupportedModelError: the target cannot be planned.
        BadInputError: ``device`` is not a device, or ``settings`` are not Settings.
        NoSiteError: a hook finds no site in the target.
        ConflictError: two hooks exclude each other.
    """
    attachment = attach(target, check_settings(settings), device_of(device), timing)
    try:
        yield attachment
    finally:
        detach(target, attachment)
