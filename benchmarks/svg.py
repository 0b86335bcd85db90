"""Plots as SVG that is read on white and on black, in a page or in a document.

Lines of text stay text, backgrounds are left out, and what would be black takes the colour of its surroundings: inside a page
that is the page's own text colour, and a file of its own brings a style for both. One figure always gives the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

#: Stand-ins that no plot uses otherwise; each becomes a colour of the surroundings.
_INK, _FAINT = "#010203", "#010204"
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
_STAND_ALONE = "<style>svg{color:#1f2328;--faint:#d0d7de}@media(prefers-color-scheme:dark){svg{color:#e6edf3;--faint:#3d444d}}</style>"
#: Told apart on both backgrounds, and by people who see fewer colours.
PALETTE = ("#8b949e", "#e08a1e", "#2f9e6e", "#3b82d9", "#b06bd6", "#d4526e", "#8d6e3f", "#17a2b8", "#6a8f1f", "#c2569b")


def styled() -> Any:
    """A context in which figures are made."""
    return mpl.rc_context(_STYLE)


def new_figure(width_in: float = 4.6, height_in: float = 3.2, columns: int = 1) -> tuple[Figure, list[Any]]:
    """A figure with axes side by side; to be made within `styled()`."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def to_svg(figure: Figure, *, title: str, stand_alone: bool = False) -> str:
    """The figure as an SVG element, described by `title` for those who do not see it."""
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    # Names that matplotlib gives to groups are the same in every figure of a page, and nothing refers to them.
    text = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|xtick|ytick|legend|matplotlib\.axis|[A-Z]\w*Collection)_?\d+"', "", text
    )
    text = text.replace(_INK, "currentColor").replace(_FAINT, "var(--faint)")
    head, rest = text.split(">", 1)
    head = re.sub(r' (?:width|height)="[\d.]+pt"', "", head) if not stand_alone else head
    label = f"<title>{_escaped(title)}</title>"
    return f'{head} role="img">{label}{_STAND_ALONE if stand_alone else ""}{rest}'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour a name, by its place."""
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
