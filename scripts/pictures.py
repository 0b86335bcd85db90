"""Pictures of the documents, drawn as SVG that is read on white and on black."""

from __future__ import annotations

from dataclasses import dataclass

_STYLE = (
    "<style>svg{font:13px sans-serif}text{fill:#1f2328}.axis{stroke:#8b949e}.lane{fill:#8b949e}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}</style>"
)
_COLOURS = {
    "queue": "#8b949e",
    "prefill": "#d4526e",
    "decode": "#3b82d9",
    "tool": "#2f9e6e",
    "KV kept": "#e08a1e",
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stretch of a lane."""

    kind: str
    start: float
    length: float


def lease_picture() -> str:
    """What a lease changes between two turns of a program."""
    without = [
        Bar(kind="prefill", start=0, length=3),
        Bar(kind="decode", start=3, length=3),
        Bar(kind="tool", start=6, length=4),
        Bar(kind="queue", start=10, length=4),
        Bar(kind="prefill", start=14, length=4),
        Bar(kind="decode", start=18, length=3),
    ]
    kept = [
        Bar(kind="prefill", start=0, length=3),
        Bar(kind="decode", start=3, length=3),
        Bar(kind="tool", start=6, length=4),
        Bar(kind="prefill", start=10, length=0.6),
        Bar(kind="decode", start=10.6, length=3),
    ]
    lease = [Bar(kind="KV kept", start=6, length=4)]
    title = "Two turns of a program and the tool call between them, without a lease and with one"
    return _drawn(title, {"without a lease": without, "with a lease": kept, "": lease})


def _drawn(title: str, lanes: dict[str, list[Bar]]) -> str:
    left, unit, height, gap = 120, 24, 26, 12
    width = left + unit * 22
    parts = [f"<title>{title}</title>", _STYLE]
    top = gap
    for name, bars in lanes.items():
        parts.append(f'<text x="8" y="{top + 18}">{name}</text>')
        for bar in bars:
            x, wide = left + unit * bar.start, unit * bar.length
            colour = _COLOURS[bar.kind]
            parts.append(f'<rect x="{x:g}" y="{top}" width="{wide:g}" height="{height}" rx="3" fill="{colour}"/>')
        top += height + gap
    parts.append(f'<line class="axis" x1="{left}" y1="{top}" x2="{width - gap}" y2="{top}"/>')
    parts.append(f'<text x="{width - 48}" y="{top + 18}">time</text>')
    x = left
    for kind, colour in _COLOURS.items():
        parts.append(f'<rect x="{x}" y="{top + 8}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{top + 19}">{kind}</text>')
        x += 84
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 32}" role="img">\n{body}\n</svg>\n'
