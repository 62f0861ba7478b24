"""Write the pictures of all schedules, and their part of docs/schedules.md, from the registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partopt import SCHEDULES, Uniform, try_schedule

DOCS = Path(__file__).parents[1]
FROM, TO = "<!-- python docs/.site/schedules.py writes what follows -->\n", "<!-- up to here -->\n"


def parts() -> Iterator[str]:
    """What some have in common; a heading and a picture of each."""
    uneven = ", ".join(f"`{name}`" for name, entry in SCHEDULES.items() if entry.uneven)
    yield f"\nStages may have unequal replicas under\n{uneven}.\n"
    for name, entry in SCHEDULES.items():
        yield f"\n### {name}\n\n![{entry.summary}](pictures/schedule-{name}.svg)\n"


def page() -> str:
    """docs/schedules.md as it should be."""
    text = (DOCS / "schedules.md").read_text()
    head, _, rest = text.partition(FROM)
    return head + FROM + "".join(parts()) + "\n" + TO + rest.partition(TO)[2]


def write(folder: Path) -> None:
    """Write the pictures into `folder`: four devices and eight microbatches."""
    for name in SCHEDULES:
        trial = try_schedule(name, Uniform(stages=4, microbatches=8))
        trial.save(str(folder / f"schedule-{name}.svg"), force=True)


if __name__ == "__main__":
    write(DOCS / "pictures")
    (DOCS / "schedules.md").write_text(page())
