"""All knobs as one value: those that :mod:`.knobs` declares, and registered ones (:mod:`.doors`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import doors
from .errors import SettingsError
from .knob import SURFACES, Act, Choice, Fidelity, Knob
from .knobs.activations import ActivationsKnobs
from .knobs.attention import AttentionKnobs
from .knobs.autoencoder import AutoencoderKnobs
from .knobs.declaring import STREAMED
from .knobs.speed import SpeedKnobs
from .knobs.weights import WeightsKnobs
from .policies import policy

__all__ = ["STREAMED", "SURFACES", "Fidelity", "Knob", "Preset", "Settings", "conflict", "knobs"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings(WeightsKnobs, AttentionKnobs, AutoencoderKnobs, ActivationsKnobs, SpeedKnobs):
    """The knobs of sd-lowvram. ``None`` means undecided: a plan fills it in, and a hook leaves the model as it is.

    Registered knobs (:mod:`.doors`) are set, read and replaced by name like ours.

    Attributes:
        registered: (name, value) of the registered knobs that are decided.

    Raises:
        SettingsError: an unknown choice, or a number out of range.
    """

    registered: Any = ()

    def __post_init__(self) -> None:
        for name, knob, value in self.decided():
            knob.check(name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, _, value in self.decided())})"

    if not TYPE_CHECKING:  # or no misspelt knob of ours would be found

        def __getattr__(self, name: str) -> Any:
            if name in doors.KNOBS:
                return dict(self.registered).get(name)
            raise AttributeError(f"Settings have no knob {name!r}")

    def decided(self) -> Iterator[tuple[str, Knob, Any]]:
        """Name, knob and value of every setting that is not None."""
        for name, knob in knobs().items():
            value = getattr(self, name)
            if value is not None:
                yield name, knob, value

    def of_stage(self, stage: str) -> Settings:
        """Copy the settings without the knobs that make no difference in ``stage``."""
        foreign = {
            name: None for name, knob, _ in self.decided() if knob.stages is not None and stage not in knob.stages
        }
        return dataclasses.replace(self, **foreign)

    def filled(self, **defaults: Any) -> Settings:
        """Copy the settings and decide undecided knobs by ``defaults``."""
        undecided = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **undecided)

    @property
    def largest_bytes(self) -> float:
        """Largest single allocation in bytes that the settings allow; infinity without ``largest_mib``."""
        return self.largest_mib << 20 if self.largest_mib else math.inf

    def as_dict(self) -> dict[str, Any]:
        """All knobs by name, undecided ones too."""
        return {name: getattr(self, name) for name in knobs()}

    @staticmethod
    def smallest() -> Preset:
        """Return the preset with the least memory, whatever its time. Fidelity: ``rounding``."""
        return Preset(
            attention="fused-softmax",
            attention_mib=8,
            inference_mode=True,
            vae_slices=True,
            vae_tiles="exact",
            vae_map="parked",
            vae_strip_mib=4,
            offload="layer",
            feed_forward_chunks=16,
            residual_strips=16,
            transformer_chunks=16,
            park_skips=True,
            guidance_in_turn=True,
        )

    @staticmethod
    def policy(name: str) -> Preset:
        """Return settings that behave like another program, as far as knobs can express it.

        "diffusers-model-offload", "-sequential" and "-group" are our nearest equivalents of diffusers' own calls.
        "ours" decides nothing, so a plan chooses everything.

        Args:
            name: a name from ``sd-lowvram plan --list-policies``, such as "compvis" or "diffusers-default".

        Returns:
            The preset.

        Raises:
            SettingsError: no policy has this name.
        """
        return Preset(**policy(name).knobs)


class Preset(Settings):
    """Knobs chosen together for any target.

    A preset skips knobs without a site; plain Settings raise NoSiteError. dataclasses.replace keeps the class."""


def check_settings(settings: Settings | None) -> Settings:
    """Return a caller's ``settings``, or settings without decisions for None.

    Raises:
        SettingsError: ``settings`` are not Settings.
    """
    if settings is None or isinstance(settings, Settings):
        return settings or Settings()
    named = settings if isinstance(settings, Mapping) and settings else {"offload": "layer"}
    instead = ", ".join(f"{name}={value!r}" for name, value in named.items())
    raise SettingsError(f"expected Settings, got {settings!r}: give sd_lowvram.Settings({instead})")


def _init_with_registered(declared: Any) -> Any:
    """``Settings.__init__``, which takes registered knobs by name as well."""

    @functools.wraps(declared)
    def init(self: Settings, *, registered: tuple[tuple[str, Any], ...] = (), **values: Any) -> None:
        if values.keys() - Settings.__dataclass_fields__.keys():
            doors.find()
        theirs = dict(registered) | {name: values.pop(name) for name in doors.KNOBS if name in values}
        decided = tuple(sorted((name, value) for name, value in theirs.items() if value is not None))
        declared(self, registered=decided, **values)

    return init


Settings.__init__ = _init_with_registered(Settings.__init__)  # type: ignore[method-assign]


def knobs() -> dict[str, Knob]:
    """Every knob by name, in the order that saved workflows rely on; registered knobs without a place come last."""
    doors.find()
    registered = (*doors.KNOBS.items(), *doors.CHOICES.items(), *doors.ATTENTION_BACKENDS.items())
    return dict(_knobs(tuple((name, id(item)) for name, item in registered)))


@functools.lru_cache(maxsize=1)
def _knobs(_: Any) -> dict[str, Knob]:
    ours: dict[str, Knob] = {
        field.name: field.metadata["knob"] for field in dataclasses.fields(Settings) if field.metadata
    }
    more = {f"attention={name}": Choice(backend.fidelity) for name, backend in doors.ATTENTION_BACKENDS.items()}
    for written, choice in (doors.CHOICES | more).items():
        name, _, value = written.partition("=")
        ours[name] = ours[name].with_choices({value: choice})
    return dict(sorted((ours | doors.KNOBS).items(), key=lambda item: item[1].place))


def acts(settings: Settings) -> frozenset[Act]:
    """Behaviours of all decided knobs."""
    return frozenset().union(*(knob.acts_of(value) for _, knob, value in settings.decided()))


def only(settings: Settings, *behaviours: Act) -> Settings:
    """``settings`` with no knobs but those that declare one of ``behaviours``, whatever their values."""
    return Settings(**{name: getattr(settings, name) for name in _declaring(*behaviours)})


def without(settings: Settings, *behaviours: Act) -> Settings:
    """``settings`` without the knobs that declare one of ``behaviours``, whatever their values."""
    return dataclasses.replace(settings, **dict.fromkeys(_declaring(*behaviours)))


def _declaring(*behaviours: Act) -> list[str]:
    return [name for name, knob in knobs().items() if not knob.acts.keys().isdisjoint(behaviours)]


def add_implied(settings: Settings) -> Settings:
    """``settings`` with the values that decided knobs imply for undecided ones."""
    for _, knob, _ in list(settings.decided()):
        settings = settings.filled(**knob.implies)
    return settings


def conflict(settings: Settings) -> str | None:
    """Return the reason why two decided knobs exclude each other, by their declarations (:attr:`.knob.Knob.excludes`).

    Args:
        settings: knobs to check.

    Returns:
        A sentence that names both with their values, for errors; None if no two exclude each other.
    """
    decided = list(settings.decided())
    for name, knob, value in decided:
        excluded = knob.excluded_by(value)
        for other, other_knob, its in decided:
            conflicts = excluded & other_knob.acts_of(its) if other != name else frozenset()
            for act in Act:
                if act in conflicts:
                    return f"{name}={value!r} cannot go with {other}={its!r}, which {act.value}: leave one of them off"
    return None
