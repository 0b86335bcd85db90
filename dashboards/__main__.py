"""`python -m dashboards`: write every board as JSON to where the chart ships it from."""

from __future__ import annotations

from pathlib import Path

from dashboards import overview, program, router, scheduler, tools
from dashboards.boards import to_json

WRITTEN_TO = Path(__file__).parents[1] / "helm" / "continuum" / "files" / "dashboards"
BOARDS = (overview.BOARD, scheduler.BOARD, tools.BOARD, router.BOARD, program.BOARD)


def main() -> None:
    """Write them."""
    for board in BOARDS:
        (WRITTEN_TO / f"{board.name}.json").write_text(to_json(board))


if __name__ == "__main__":
    main()
