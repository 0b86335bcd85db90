"""What the presets render to is committed: a change of the chart shows what it changes.

`PYTHONPATH=tests python -m support.chart` writes the files anew.
"""

from __future__ import annotations

from support import chart


def test_the_presets_render_to_their_goldens() -> None:
    wanted = {path.name: text for path, text in chart.goldens()}
    found = {path.name: path.read_text() for path in chart.GOLDENS.iterdir()}
    assert found == wanted
