"""Options of a call of one MODEL's UNet, passed on to the UNet of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_AS_CALLED = ("cond_or_uncond", "uuids", "sigmas", "sample_sigmas")
"""Options that the sampler passes to a call of any model's UNet."""

Options = Mapping[str, Any]


def merge_options(call_options: Options, before: Options, theirs: Options, same_blocks: bool) -> dict[str, Any]:
    """The ``transformer_options`` of a call of the other UNet: its own, the sampler's word, and the patches that came
    to the call from behind: of nodes after ours, and of guidance that calls again with a changed attention (PAG, SAG).

    Args:
        call_options: of the call, as it came for the first model.
        before: the first model's own, as they were when our node had it.
        theirs: the other model's own.
        same_blocks: whether blocks have the same numbers in both; else only those of the middle block are passed on.
    """
    options = dict(theirs) | {key: call_options[key] for key in _AS_CALLED if key in call_options}
    patches = {name: [*some] for name, some in theirs.get("patches", {}).items()}
    for name, some in call_options.get("patches", {}).items():
        behind = some[len(before.get("patches", {}).get(name, ())) :]
        if behind:
            patches[name] = [*patches.get(name, ()), *behind]
    replaced = {name: dict(some) for name, some in theirs.get("patches_replace", {}).items()}
    for name, some in call_options.get("patches_replace", {}).items():
        replacements = before.get("patches_replace", {}).get(name, {})
        for place, patch in some.items():
            if place not in replacements and (same_blocks or place[0] == "middle"):
                replaced.setdefault(name, {})[place] = patch
    options |= {key: value for key, value in (("patches", patches), ("patches_replace", replaced)) if value}
    return options
