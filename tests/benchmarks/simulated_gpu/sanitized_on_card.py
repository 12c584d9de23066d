"""``correctness`` on the simulated card, in a process of its own, as torch's sanitizer stays on.

``python tests/benchmarks/simulated_gpu/sanitized_on_card.py WAY [FAULT]`` prints its row; a fault is planted in the
engine first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def main(way: str, fault: str = "") -> None:
    sys.path[:0] = [str(TESTS / "simulated_gpu"), str(TESTS / "support"), str(TESTS.parent)]
    from simulated_card.card import card

    card()
    import tiny
    import torch
    from on_card import Simulated, rates_here

    from benchmarks import models
    from benchmarks.gpu.correctness import trial_correctness
    from sd_lowvram.devices import this_machine
    from sd_lowvram.kernels.attention import determinism
    from sd_lowvram.streaming.copier import Copier

    torch.set_num_threads(1)
    simulated = Simulated()
    models.architecture = lambda name: tiny.config("sd15")
    this_machine.calibrate = rates_here
    determinism.SHAPES = ((1, 2, 16, 16, 40),)
    if fault == "nothing waits for copies":
        Copier.wait = lambda self, event: None
    (row,) = trial_correctness("cuda", "tiny", 64, [{"way": way}])
    print(json.dumps(row | {"unsimulated": simulated.card.unsimulated}))


if __name__ == "__main__":
    main(*sys.argv[1:])
