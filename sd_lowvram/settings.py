"""Every knob, declared once: the command line, the ComfyUI nodes and the WebUI panel are generated from here.

The order is append-only, because saved workflows and WebUI arguments are positional.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import doors
from .errors import SettingsError
from .knob import ANY, SURFACES, Act, Depth, Fidelity, Knob
from .policies.named import policy

__all__ = ["SURFACES", "Fidelity", "Knob", "Preset", "Settings", "conflict", "knobs"]


_ATTENDING, _UNET, _VAE = ("control", "denoise", "decode", "encode"), ("denoise",), ("decode", "encode")

_NOT_COMFYUI = ("cli", "panel")
"""For knobs that would act on what ComfyUI does itself: it shares one set of weights among all clones of a model and
keeps account of where they are and in which type; it runs every prompt in inference mode, and compiles by a node."""


STREAMED = ("blocks", "halves", "layer")
"""Values of ``offload`` with which weights pass through a ring."""

_IN_BLOCKS = {Act.ACTS_IN_BLOCKS: ANY}
_STATEFUL = _IN_BLOCKS | {Act.KEEPS_STATE: ANY}
_UNFOLLOWED = (Act.ACTS_IN_BLOCKS, Act.STREAMS_WEIGHTS, Act.WIDENS_WEIGHTS)
"""What no code that follows the model's Python, to compile or to trace it, can follow."""


def _knob(**declaration: Any) -> Any:
    return dataclasses.field(default=None, metadata={"knob": Knob(**declaration)})


_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp16-storage", "autocast-fp16", "autocast-bf16")
_BITWISE, _ROUNDING, _APPROXIMATE = Fidelity.BITWISE, Fidelity.ROUNDING, Fidelity.APPROXIMATE


@dataclass(frozen=True)
class Settings:
    """The knobs of sd-lowvram. ``None`` means undecided: a plan fills it in, and a hook leaves the model as it is.

    Knobs that others have registered (:mod:`.doors`) are given, read and replaced by name as those below are.

    Attributes:
        registered: of those that are decided a tuple of (name, value).

    Raises:
        SettingsError: an unknown choice, or a number out of range.
    """

    precision: str | None = _knob(
        label="Precision",
        help="how finely numbers are kept: fp16 and bf16 take half the memory of fp32; fp16-storage keeps half "
        "the memory and computes in fp32 (GTX 16xx); autocast-fp16 and autocast-bf16 are slower than fp16 and bf16",
        when="on a card whose memory or arithmetic fp32 is too much for; a narrower type is another picture, a "
        "wider one more memory",
        choices=_PRECISIONS,
        fidelity=dict.fromkeys(_PRECISIONS, _APPROXIMATE) | {"fp32": _ROUNDING},
        surfaces=_NOT_COMFYUI,
        hook="precision",
        depth=Depth.CONVERTS,
        acts={Act.WIDENS_WEIGHTS: ("fp16-storage",)},
    )
    attention: str | None = _knob(
        label="Attention",
        help="how parts of the picture look at each other: sdpa takes the fastest kernel for the size and the "
        "card; sliced and fused-softmax bound the memory that this takes",
        when="large pictures, where the scores are the peak; sliced takes more time, fused-softmax more still",
        choices=("sdpa", "flash", "efficient", "xformers", "fused-softmax", "sliced", "triton", "cudnn"),
        fidelity=_ROUNDING,
        stages=_ATTENDING,
        hook="attention",
        depth=Depth.COMPUTES,
        acts=_IN_BLOCKS,
    )
    attention_mib: int | None = _knob(
        label="Memory for attention",
        help="the most that sliced and fused-softmax take for attention at once",
        when="where sliced or fused-softmax still take too much; the less, the slower",
        maximum=65536,
        unit="MiB",
        fidelity=_ROUNDING,
        stages=_ATTENDING,
    )
    deterministic: bool | None = _knob(
        label="Deterministic",
        help="same seed, same picture to the last bit, run after run: only attention that proved it on this machine",
        when="where pictures are compared bit by bit; a slower kernel where the fastest does not repeat its bits",
        fidelity=_ROUNDING,
        stages=_ATTENDING,
        hook="attention",
        depth=Depth.COMPUTES,
        acts=_IN_BLOCKS | {Act.COPIES_TO_HOST: ANY},  # it asks the device which kernel proved itself
    )
    channels_last: bool | None = _knob(
        label="Channels last",
        help="another layout of the picture in memory; faster on recent cards and processors",
        when="nearly always on a GPU; weights are copied once into the other order",
        fidelity=_ROUNDING,
        surfaces=_NOT_COMFYUI,
        stages=_ATTENDING,
        hook="channels_last",
        depth=Depth.CONVERTS,
    )
    inference_mode: bool | None = _knob(
        label="Inference mode",
        help="run the model without what only training needs",
        when="always, unless gradients are wanted; it costs nothing",
        fidelity=_BITWISE,
        surfaces=_NOT_COMFYUI,
        hook="inference_mode",
    )
    vae_slices: bool | None = _knob(
        label="Decode one by one",
        help="decode and encode the pictures of a batch one after the other",
        when="batches; each picture is decoded by itself, which takes somewhat longer",
        fidelity=_ROUNDING,
        stages=_VAE,
        hook="vae_slices",
        depth=Depth.SLICES,
    )
    vae_tiles: str | None = _knob(
        label="Decode in parts",
        help="exact: strips that know the whole picture, no seam and no colour shift; fast: overlapping tiles, "
        "blended, which may show",
        when="large pictures, whose decode is the peak; exact takes little time while its map is held, fast "
        "less and changes tone and seams",
        choices=("off", "exact", "fast"),
        fidelity={"off": _BITWISE, "exact": _ROUNDING, "fast": _APPROXIMATE},
        stages=_VAE,
        hook={"off": "vae_whole", "exact": "vae_exact", "fast": "vae_fast"},
        depth=Depth.TILES,
    )
    vae_map: str | None = _knob(
        label="Decoding waits",
        help="where the unfinished picture waits while exact strips are made: held on the card, parked in RAM, "
        "or recomputed, which takes no memory and more time",
        when="held halves the plain peak, parked takes host memory and copies, recomputed several times the time",
        choices=("held", "parked", "recomputed"),
        fidelity=_ROUNDING,
        stages=_VAE,
    )
    vae_strip_mib: int | None = _knob(
        label="Memory for a strip",
        help="how much of the picture is decoded at once by exact strips",
        when="where a strip is the peak; the smaller, the more often layers are called",
        maximum=1024,
        unit="MiB",
        fidelity=_ROUNDING,
        stages=_VAE,
    )
    decoder_device: str | None = _knob(
        label="Decode on",
        help="what makes the finished picture: the card (gpu), the processor (cpu), or the processor only where "
        "the card cannot hold it (auto)",
        when="where the decode fits no other way; a processor takes many times as long",
        choices=("gpu", "cpu", "auto"),
        fidelity=_ROUNDING,
        stages=_VAE,
        hook={"cpu": "offload"},
        undecided=("auto",),
        depth=Depth.PLACES,
    )
    offload: str | None = _knob(
        label="Model on the card",
        help="how much of the model is on the card at once: all of it (none), one of its models (component), "
        "half a UNet (halves), as much as weights_mib says while the rest comes when needed (blocks), or "
        "one layer (layer)",
        when="models larger than the budget; little time where copies hide under the compute, and host memory "
        "for the weights",
        choices=("none", "component", "layer", "halves", "blocks"),
        fidelity=_BITWISE,
        surfaces=_NOT_COMFYUI,
        hook="offload",
        depth=Depth.PLACES,
        acts={Act.PARKS_WEIGHTS: ("component", *STREAMED), Act.STREAMS_WEIGHTS: STREAMED, Act.KEEPS_STATE: STREAMED},
    )
    feed_forward_chunks: int | None = _knob(
        label="Feed-forward in parts",
        help="work through the model's widest layers in this many parts; less memory for large pictures",
        when="large pictures, where the widest layers are the peak; a little time",
        maximum=1024,
        fidelity=_ROUNDING,
        stages=_UNET,
        hook="feed_forward",
        depth=Depth.DIVIDES,
        acts=_IN_BLOCKS,
    )
    residual_strips: int | None = _knob(
        label="Convolutions in strips",
        help="work through the model's convolutions in this many strips of the picture; less memory for large pictures",
        when="large pictures, where convolutions are the peak; some time for the rows that strips share",
        maximum=1024,
        fidelity=_ROUNDING,
        stages=_UNET,
        hook="residual_strips",
        depth=Depth.DIVIDES,
        acts=_STATEFUL,
    )
    transformer_chunks: int | None = _knob(
        label="Transformers in parts",
        help="work through the model's transformers in this many parts of the picture; less memory for large pictures",
        when="large pictures, where transformers are the peak; a little time",
        maximum=1024,
        fidelity=_ROUNDING,
        stages=_UNET,
        hook="transformer_chunks",
        depth=Depth.DIVIDES,
        acts=_STATEFUL,
    )
    park_skips: bool | None = _knob(
        label="Wait in RAM",
        help="what the model needs of the picture only later waits in RAM; with guidance in turn, so does the "
        "half not computed",
        when="large pictures; host memory and copies, most of which hide under the compute",
        fidelity=_BITWISE,
        stages=_UNET,
        hook="skip_parking",
        depth=Depth.PARKS,
        acts=_STATEFUL | {Act.COPIES_TO_HOST: ANY},
    )
    guidance_in_turn: bool | None = _knob(
        label="Guidance in turn",
        help="prompt and negative prompt one after the other inside the model, so that only one takes memory for "
        "the picture",
        when="wherever guidance doubles the batch; halves that are too small for the card take longer than both "
        "at once",
        fidelity=_ROUNDING,
        stages=_UNET,
        hook="guidance_in_turn",
        depth=Depth.GUIDES,
        acts=_STATEFUL,
    )
    weights_mib: int | None = _knob(
        label="Keep of the model on the card",
        help="keep this much of the model on the card and fetch the rest from RAM when it is needed; the less, "
        "the slower",
        when="a budget below the model's size; copies, which hide where the work before them takes as long",
        maximum=1048576,
        unit="MiB",
        fidelity=_BITWISE,
        surfaces=_NOT_COMFYUI,
        implies={"offload": "blocks"},
    )
    split_layers: bool | None = _knob(
        label="Split layers",
        help="fetch layers in parts where they are larger than the room for them",
        when="budgets below the largest layer; more, smaller copies",
        fidelity=_ROUNDING,
        surfaces=_NOT_COMFYUI,
    )
    weight_storage: str | None = _knob(
        label="Model in 8 bits",
        help="keep the model in 8 bits, half the memory of fp16, and widen each layer when it is used",
        when="models whose weights are too large for card and bus; another picture, and time to widen each layer",
        choices=("fp8", "int8"),
        fidelity=_APPROXIMATE,
        surfaces=_NOT_COMFYUI,
        stages=("denoise", "text"),
        hook="weight_storage",
        depth=Depth.CONVERTS,
        acts=_STATEFUL | {Act.WIDENS_WEIGHTS: ANY},
    )
    largest_mib: int | None = _knob(
        label="Largest piece",
        help="take no more memory than this in one piece, for cards that have such a limit",
        when="cards and drivers that refuse large pieces; smaller strips and parts, which take longer",
        maximum=1048576,
        unit="MiB",
        fidelity=_BITWISE,
        stages=(),
    )
    fused_kernels: bool | None = _knob(
        label="Fused kernels",
        help="norms together with their activations in one pass over the picture, by kernels in Triton (NVIDIA)",
        when="NVIDIA cards, where `doctor --calibrate` measured a gain; compiling once",
        fidelity=_ROUNDING,
        since="0.2",
        stages=_ATTENDING,
        hook="fused_kernels",
        depth=Depth.COMPUTES,
        acts=_IN_BLOCKS,
    )
    deep_cache: int | None = _knob(
        label="Deep features every",
        help="compute the model's deep layers only every so many steps and use their results again between; "
        "the more, the faster and the farther from the picture",
        when="many steps of a sampler; another picture, and memory for what is kept",
        minimum=2,
        maximum=100,
        unit="steps",
        fidelity=_APPROXIMATE,
        since="0.2",
        stages=_UNET,
        hook="deep_cache",
        depth=Depth.SKIPS,
        acts={Act.SKIPS_LAYERS: ANY, Act.KEEPS_STATE: ANY},
        excludes={Act.STREAMS_WEIGHTS: ANY},
    )
    deep_cache_branch: int | None = _knob(
        label="Layers between deep features",
        help="how many of the model's outer layers run at every step; more come nearer to the picture and take longer",
        when="with deep_cache; the more, the nearer and the slower",
        minimum=0,
        maximum=100,
        fidelity=_APPROXIMATE,
        since="0.2",
        stages=_UNET,
    )
    merge_tokens: int | None = _knob(
        label="Merge alike",
        help="let up to so much of the picture's parts that are alike go through self-attention as one; "
        "the more, the faster and the farther from the picture",
        when="large pictures, whose self-attention takes most of the time; another picture",
        maximum=75,
        unit="%",
        fidelity=_APPROXIMATE,
        since="0.2",
        stages=_UNET,
        hook="merge_tokens",
        depth=Depth.COMPUTES,
        acts=_STATEFUL,
    )
    compile: str | None = _knob(
        label="Compile",
        help="have torch.compile make code for each kind of block (regional) or for the model as one (whole): the "
        "first picture takes longer, all others are made faster",
        when="many pictures of one size; a warm-up of seconds to minutes, and a C++ compiler or Triton",
        choices=("off", "regional", "whole"),
        fidelity=dict.fromkeys(("regional", "whole"), _ROUNDING) | {"off": _BITWISE},
        since="0.2",
        surfaces=_NOT_COMFYUI,
        stages=("denoise", *_VAE),
        hook=dict.fromkeys(("regional", "whole"), "compiled"),
        depth=Depth.COMPILES,
        acts={Act.REPLAYS: ("regional", "whole")},
        excludes=dict.fromkeys(_UNFOLLOWED, ("regional", "whole"))
        | {Act.ACTS_IN_DECODER: ("regional", "whole"), Act.SKIPS_LAYERS: ("whole",)},
    )
    traced: bool | None = _knob(
        label="Traced",
        help="have torch write down once what the model does, and run that without Python; needs no compiler",
        when="small pictures, where Python is the slower part; a pass to write down for each size",
        fidelity=_ROUNDING,
        since="0.2",
        surfaces=("cli",),  # the hosts' own code acts between its layers, which a traced pass would not call
        stages=_UNET,
        hook="traced",
        depth=Depth.REPLAYS,
        acts={Act.REPLAYS: ANY},
        excludes=dict.fromkeys(
            (*_UNFOLLOWED, Act.PARKS_WEIGHTS, Act.SKIPS_LAYERS, Act.COPIES_WEIGHTS, Act.REPLAYS), ANY
        ),
    )
    packed_weights: bool | None = _knob(
        label="Keep weights in order",
        help="on a processor, keep large weights in the order of its kernels besides, which else bring them into it at "
        "every step; faster for small pictures, and more memory",
        when="processors and small pictures; a second copy of large weights",
        fidelity=_ROUNDING,
        since="0.2",
        surfaces=_NOT_COMFYUI,
        stages=_UNET,
        hook="packed_weights",
        depth=Depth.CONVERTS,
        acts={Act.COPIES_WEIGHTS: ANY},
        excludes=dict.fromkeys((Act.STREAMS_WEIGHTS, Act.WIDENS_WEIGHTS), ANY),
    )
    winograd: bool | None = _knob(
        label="Winograd convolutions",
        help="make and read pictures with fewer multiplications, on a processor: faster on most, and only in fp32",
        when="decodes on a processor in fp32; memory for the transformed strips",
        fidelity=_ROUNDING,
        since="0.2",
        stages=_VAE,
        hook="winograd",
        depth=Depth.COMPUTES,
        acts={Act.ACTS_IN_DECODER: ANY},
    )
    cuda_graphs: bool | None = _knob(
        label="CUDA graphs",
        help="record what the model does on an NVIDIA card once and replay it: faster where starting each operation "
        "takes longer than the operation",
        when="small pictures on fast cards, where launching takes longer than computing; memory for the recordings",
        fidelity=_BITWISE,
        since="0.2",
        surfaces=("cli",),  # the hosts' own code acts between its layers, which a recorded pass would not call
        stages=_UNET,
        hook="cuda_graphs",
        depth=Depth.REPLAYS,
        acts={Act.REPLAYS: ANY},
        excludes=dict.fromkeys((Act.COPIES_TO_HOST, Act.SKIPS_LAYERS, Act.WIDENS_WEIGHTS, Act.PARKS_WEIGHTS), ANY),
    )

    registered: Any = ()

    def __post_init__(self) -> None:
        for name, knob, value in self.decided():
            knob.check(name, value)

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
        """A copy without the knobs that make no difference in ``stage``."""
        foreign = {
            name: None for name, knob, _ in self.decided() if knob.stages is not None and stage not in knob.stages
        }
        return dataclasses.replace(self, **foreign)

    def filled(self, **defaults: Any) -> Settings:
        """A copy in which ``defaults`` decide what is undecided here."""
        undecided = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **undecided)

    @property
    def largest_bytes(self) -> float:
        """The most that may be allocated in one piece."""
        return self.largest_mib << 20 if self.largest_mib else math.inf

    def as_dict(self) -> dict[str, Any]:
        """All knobs by name, undecided ones too."""
        return {name: getattr(self, name) for name in knobs()}

    @staticmethod
    def smallest() -> Preset:
        """The least memory, whatever the time; lossless against the baseline."""
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
        """What another program does, as far as it can be said in knobs; "ours" leaves all to the plan.

        Of what "diffusers-model-offload", "-sequential" and "-group" do by diffusers' own calls, these are our nearest.

        Raises:
            SettingsError: no policy has this name.
        """
        return Preset(**policy(name).knobs)


class Preset(Settings):
    """Knobs chosen together for any target. Those that find nothing to act on in the one at hand are left out, where
    single ones raise NoSiteError; so it is with a copy in which some are changed."""


def stated(settings: Settings | None) -> Settings:
    """The settings that a caller gave, or none.

    Raises:
        SettingsError: they are of another kind.
    """
    if settings is None or isinstance(settings, Settings):
        return settings or Settings()
    named = settings if isinstance(settings, Mapping) and settings else {"offload": "layer"}
    instead = ", ".join(f"{name}={value!r}" for name, value in named.items())
    raise SettingsError(f"settings {settings!r} are no Settings: give sd_lowvram.Settings({instead})")


def _with_registered(declared: Any) -> Any:
    """``Settings.__init__``, which takes registered knobs by name as well."""

    @functools.wraps(declared)
    def init(self: Settings, *args: Any, registered: tuple[tuple[str, Any], ...] = (), **values: Any) -> None:
        if values.keys() - Settings.__dataclass_fields__.keys():
            doors.find()
        theirs = dict(registered) | {name: values.pop(name) for name in doors.KNOBS if name in values}
        decided = tuple(sorted((name, value) for name, value in theirs.items() if value is not None))
        declared(self, *args, registered=decided, **values)

    return init


Settings.__init__ = _with_registered(Settings.__init__)  # type: ignore[method-assign]


def knobs() -> dict[str, Knob]:
    """Every knob by name, in the order that saved workflows rely on; registered knobs and choices come last."""
    doors.find()
    registered = (*doors.KNOBS.items(), *doors.ATTENTION_BACKENDS.items())
    return dict(_knobs(tuple((name, id(one)) for name, one in registered)))


@functools.lru_cache(maxsize=1)
def _knobs(_: Any) -> dict[str, Knob]:
    ours = {field.name: field.metadata["knob"] for field in dataclasses.fields(Settings) if field.metadata}
    theirs = {name: backend.fidelity for name, backend in doors.ATTENTION_BACKENDS.items()}
    return ours | {"attention": ours["attention"].with_choices(theirs)} | doors.KNOBS


def acts(settings: Settings) -> frozenset[Act]:
    """All that the decided knobs do."""
    return frozenset().union(*(knob.acts_of(value) for _, knob, value in settings.decided()))


def implied(settings: Settings) -> Settings:
    """``settings`` with what the decided knobs imply of others."""
    for _, knob, _ in list(settings.decided()):
        settings = settings.filled(**knob.implies)
    return settings


def conflict(settings: Settings) -> str | None:
    """Why two of the decided knobs exclude each other, as their declarations say; None where none do."""
    decided = list(settings.decided())
    for name, knob, value in decided:
        excluded = knob.excluded_by(value)
        for other, others, its in decided:
            found = excluded & others.acts_of(its) if other != name else frozenset()
            for act in Act:
                if act in found:
                    return f"{name}={value!r} cannot go with {other}={its!r}, which {act.value}: leave one of them off"
    return None
