"""Least squares: polynomials through measured points, and how much of the scatter they explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fit:
    """A polynomial.

    Attributes:
        coefficients: from the constant on.
        r_squared: share of the values' variance that it explains; 1 where they do not vary.
    """

    coefficients: tuple[float, ...]
    r_squared: float

    def at(self, x: float) -> float:
        return sum(factor * x**power for power, factor in enumerate(self.coefficients))


def polynomial(xs: Sequence[float], ys: Sequence[float], degree: int) -> Fit | None:
    """The polynomial of ``degree`` nearest to the points; None where there are too few of them."""
    if len(set(xs)) <= degree:
        return None
    scale = max(map(abs, xs)) or 1.0  # powers of pixels would leave the range in which they can be solved
    x, y = torch.tensor(xs, dtype=torch.float64) / scale, torch.tensor(ys, dtype=torch.float64)
    powers = torch.stack([x**power for power in range(degree + 1)], dim=1)
    found = torch.linalg.lstsq(powers, y[:, None], driver="gelsd").solution[:, 0]
    left = (y - powers @ found).square().sum()
    variance = (y - y.mean()).square().sum()
    explained = float(1 - left / variance) if variance > 0 else 1.0
    return Fit(tuple(float(factor) / scale**power for power, factor in enumerate(found)), explained)
