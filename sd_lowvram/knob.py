"""The declaration of a knob.

The command line, the hosts, the order of hooks, conflicts between knobs and the search all read the declaration, so
that a new knob is known everywhere once it is declared.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import SettingsError


class Fidelity(enum.IntEnum):
    """Distance of an optimisation from the model as the user loaded it; a larger value is farther."""

    BITWISE = 0
    """The same bits."""
    ROUNDING = 1
    """The same arithmetic, in another order or in a wider type."""
    APPROXIMATE = 2
    """Another picture, however close; a narrower type is this."""

    def __str__(self) -> str:
        return self.name.lower()

    @property
    def words(self) -> str:
        """The fidelity in the words that people read; ``FIDELITIES`` explains them."""
        return ("identical", "identical up to rounding", "approximate")[self]

    @property
    def lossless(self) -> bool:
        """True if the picture is identical, or identical up to rounding."""
        return self <= Fidelity.ROUNDING


FIDELITIES = (
    "Identical: the same bits as without the setting. Identical up to rounding: the same computation in another order, "
    "which nobody sees. Approximate: another picture, used only if you allow it."
)
"""The explanation of ``Fidelity.words``."""


class Act(enum.Enum):
    """A behaviour of a knob, by which other knobs exclude it and plans price it.

    Its value ends the sentence ``... cannot go with ..., which``.
    """

    ACTS_IN_BLOCKS = "acts inside the denoiser's blocks, where no compiler can follow it"
    ACTS_IN_DECODER = "acts inside the decoder's blocks, where no compiler can follow it"
    KEEPS_STATE = "keeps between layers what no compiled graph can"
    SKIPS_LAYERS = "runs other layers at other steps"
    COPIES_TO_HOST = "copies to host memory, or waits for the device, inside a pass"
    PARKS_WEIGHTS = "keeps weights in host memory between calls"
    STREAMS_WEIGHTS = "fetches weights at every call of a layer"
    WIDENS_WEIGHTS = "makes new weights at every call of a layer"
    COPIES_WEIGHTS = "keeps a second copy of weights"
    REPLAYS = "replaces the pass by a recording of it"
    RECORDS = "launches a recorded pass as one operator"
    FUSES = "computes several operators in one kernel"
    HALVES_PRODUCTS = "computes products alone in fp16"
    CONVERTS_WEIGHTS = "stores weights in another type or order"
    COMPRESSES_WEIGHTS = "stores weights in 8 bits"
    REORDERS_KERNELS = "stores the weights of convolutions in another order"
    PLACES_WEIGHTS = "chooses the place of weights"
    STREAMS_LAYERS = "has one layer on the device at a time"
    MOVES_MODELS = "has one whole model on the device at a time"
    ON_PROCESSOR = "computes on the processor next to a GPU"
    MAKES_STRIPS = "decodes in exact strips"
    OWN_WORKSPACE = "needs a workspace that differs from GPU to GPU"


class Depth(enum.IntEnum):
    """Layer of the model at which a knob's hook wraps it.

    From the inside: compiling, converting weights, computing layers, tiles and slices of the autoencoder, placing
    weights, dividing a call into parts, replaying a call, skipping layers, parking, guidance, wrapping a whole call.
    """

    COMPILES = 0
    CONVERTS = 1
    COMPUTES = 2
    TILES = 3
    SLICES = 4
    PLACES = 5
    DIVIDES = 6
    REPLAYS = 7
    SKIPS = 8
    PARKS = 9
    GUIDES = 10
    CALLS = 11


SURFACES = ("cli", "node", "panel")

GROUPS = ("Memory", "Step", "Other picture", "Picture")
"""Parts of a run under which nodes and panels show settings: whole run; sampler steps; faster with another picture;
decoding and encoding."""

ANY = ("*",)
"""Any value with which a knob acts at all."""


@dataclass(frozen=True)
class Choice:
    """A registered value of a knob.

    Attributes:
        hook: function ``(anatomy, settings, device) -> patches``; not read if the knob has one hook for all values.
        help, when: endings of the knob's texts, without the value's name.
    """

    fidelity: Fidelity
    hook: Callable[..., Any] | str = ""
    help: str = ""
    when: str = ""


@dataclass(frozen=True)
class Knob:
    """A setting: its texts for the surfaces, its facts for planning, and its hook.

    Attributes:
        fidelity: one for all values, or one for each choice.
        choices: values of a word. A number has a ``maximum`` instead, a switch neither.
        stages: names of the stages that it changes; None: all. Empty: it changes the plan alone.
        hook: name of the module in :mod:`sd_lowvram.hooks`, whose last part is also the function's; one for all values,
            or one for some choices. "": the hook of another knob reads it. A registered knob has the function itself.
        depth: the layer at which that hook wraps the model; hooks of one depth follow the order of the declarations.
        acts: behaviours, each with the values of this knob that show it (:data:`ANY`: all values with which it acts).
        excludes: behaviours of other knobs, each with the values of this knob that forbid it.
        undecided: values that count as not set, like None: a plan chooses ("auto").
        implies: values of other knobs that it sets if they are undecided.
        opened_with: name of what a fallback step opens to the search after memory ran out, this knob with it; "": none.
        closed: value that an undecided knob has until then; None: undecided.
        when: when the knob helps, and what it costs.
        place: position in the fixed order that payloads and saved workflows rely on. A new knob of ours takes the next
            one; registered knobs of other packages come last.
    """

    label: str
    help: str
    fidelity: Fidelity | Mapping[str, Fidelity]
    choices: tuple[str, ...] = ()
    minimum: int = 1
    maximum: int = 0
    unit: str = ""
    surfaces: tuple[str, ...] = SURFACES
    stages: tuple[str, ...] | None = None
    hook: str | Mapping[str, str | Callable[..., Any]] | Callable[..., Any] = ""
    depth: Depth = Depth.CALLS
    acts: Mapping[Act, tuple[str, ...]] = field(default_factory=dict)
    excludes: Mapping[Act, tuple[str, ...]] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()
    implies: Mapping[str, Any] = field(default_factory=dict)
    opened_with: str = ""
    closed: Any = None
    when: str = ""
    place: int = sys.maxsize

    @property
    def type(self) -> type[str] | type[int] | type[bool]:
        """The type of its values."""
        return str if self.choices else int if self.maximum else bool

    @property
    def group(self) -> str:
        """One of :data:`GROUPS`."""
        if self.fidelity is Fidelity.APPROXIMATE:
            return GROUPS[2]
        if self.stages and {*self.stages} <= {"decode", "encode"}:
            return GROUPS[3]
        return GROUPS[1] if self.stages == ("denoise",) else GROUPS[0]

    def check(self, name: str, value: Any) -> None:
        """Check that this knob accepts ``value``.

        Args:
            name: the knob's name, for the error.
            value: the value to check.

        Raises:
            SettingsError: it is not accepted; the message lists the choices or the bounds.
        """
        if self.choices:
            if value not in self.choices:
                raise SettingsError(f"{name}={value!r} is unknown: choose one of {', '.join(self.choices)}")
        elif self.type is bool:
            if not isinstance(value, bool):
                raise SettingsError(f"{name}={value!r} must be True or False")
        elif isinstance(value, bool) or not isinstance(value, int) or not self.minimum <= value <= self.maximum:
            raise SettingsError(f"{name}={value!r} must be a whole number from {self.minimum} to {self.maximum}")

    def fidelity_of(self, value: Any) -> Fidelity:
        """Fidelity of the knob with ``value``."""
        return self.fidelity[value] if isinstance(self.fidelity, Mapping) else self.fidelity

    def with_choices(self, more: Mapping[str, Choice]) -> Knob:
        """Return this knob with registered choices added."""
        if not more:
            return self
        fidelity = {choice: self.fidelity_of(choice) for choice in self.choices}
        fidelity |= {name: choice.fidelity for name, choice in more.items()}
        hook = self.hook
        if isinstance(hook, Mapping):
            hook = {**hook, **{name: choice.hook for name, choice in more.items()}}
        help = "; ".join([self.help, *(f"{name}: {choice.help}" for name, choice in more.items() if choice.help)])
        when = ", ".join([self.when, *(f"{name} {choice.when}" for name, choice in more.items() if choice.when)])
        return replace(self, choices=tuple(fidelity), fidelity=fidelity, hook=hook, help=help, when=when)

    def hook_of(self, value: Any) -> str | Callable[..., Any]:
        """Return the hook that ``value`` requests: the name of a module, a function, or "" for none."""
        if isinstance(self.hook, Mapping):
            return self.hook.get(value, "")
        return "" if value is None or value is False else self.hook

    def acts_of(self, value: Any) -> frozenset[Act]:
        """Behaviours of the knob with ``value``."""
        return _acts_of_value(self.acts, value)

    def excluded_by(self, value: Any) -> frozenset[Act]:
        """Behaviours of other knobs that this knob excludes with ``value``."""
        return _acts_of_value(self.excludes, value)


def _acts_of_value(acts: Mapping[Act, tuple[str, ...]], value: Any) -> frozenset[Act]:
    if value is None or value is False:
        return frozenset()
    return frozenset(act for act, values in acts.items() if values == ANY or value in values)
