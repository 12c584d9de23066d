"""Weights in 8 bits: what the table says of pictures and layers."""

from __future__ import annotations

from benchmarks.storage import lines, run


def test_the_bench_tells_how_far_pictures_and_layers_are_off() -> None:
    report = run(prompts=["a red apple"], steps=3)
    fp8, int8 = report["rows"]
    assert 0.02 < fp8["layer_error"] <= fp8["worst_layer_error"] < 0.035
    assert 0.005 < int8["layer_error"] <= int8["worst_layer_error"] < 0.02
    for row in report["rows"]:
        assert row["psnr"] > 20 and 0 < row["mean"] < 10 and 0.25 < row["bytes"] < 0.4
    assert int8["psnr"] > fp8["psnr"]
    assert sum(line.startswith("| fp8 |") for line in lines(report)) == 1
