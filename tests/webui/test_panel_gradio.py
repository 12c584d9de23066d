"""The panel built with the real gradio of AUTOMATIC1111 (3.41.2), which lives in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from webui_ext.arguments import arguments

HERE = Path(__file__).parents[1] / "support"
_OWN = Path(sys.prefix) / "gradio" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


@pytest.mark.slow(8)
def test_the_panel_is_built_with_a_control_for_every_argument() -> None:
    python = os.environ.get("GRADIO_PYTHON") or str(_OWN)
    if not os.access(python, os.X_OK):
        pytest.skip(f"no gradio: {python} is not there; make test sets it up, or name a Python by GRADIO_PYTHON")
    ran = subprocess.run(
        [python, str(HERE / "panel_page.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "GRADIO_ANALYTICS_ENABLED": "False", "MPLBACKEND": "Agg"},
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    kinds = {"switch": "Checkbox", "size": "Textbox", "number": "Number", "choice": "Dropdown"}
    for tab, controls in told["found"].items():
        assert list(controls) == [one.name for one in arguments()]
        for one in arguments():
            kind, value, elem_id = controls[one.name]
            assert (kind, value) == (kinds[one.kind], one.default)
            assert elem_id.startswith(f"{tab}_sd_lowvram_{one.name}")
