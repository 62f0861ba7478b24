"""Write the rooms of docs/extending.md, from the rule of their imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.test_architecture import MAY_IMPORT

PAGE = Path(__file__).parents[1] / "extending.md"
FROM, TO = "<!-- python docs/.site/rooms.py writes what follows -->\n", "<!-- up to here -->\n"
_BASE = {"units", "errors", "printable", "registry"}  # any room may import them
_LAST = {"__init__", "__main__", "cli"}  # these import every room


def nearest(may: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What each room may import that nothing else it imports may."""
    return {
        room: {name for name in known if not any(name in may[other] for other in known)} - _BASE
        for room, known in may.items()
    }


def rows() -> Iterator[str]:
    """A row for each room, what it imports above it."""
    arrows, left = nearest(MAY_IMPORT), [room for room in MAY_IMPORT if room not in _BASE | _LAST]
    while left:
        room = next(one for one in left if not MAY_IMPORT[one] & {*left})
        left.remove(room)
        imports = ", ".join(f"`{name}`" for name in sorted(arrows[room])) or "-"
        yield f"| `{room}` | {imports} |\n"


def page() -> str:
    """docs/extending.md as it should be."""
    head, _, rest = PAGE.read_text().partition(FROM)
    table = "| room | imports |\n|---|---|\n" + "".join(rows())
    return head + FROM + "\n" + table + "\n" + TO + rest.partition(TO)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
