"""Write the pictures of all schedules, and their part of docs/schedules.md, from the registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partopt import SCHEDULES, Uniform, try_schedule

DOCS = Path(__file__).parents[1]
FROM, TO = "<!-- python docs/.site/schedules.py writes what follows -->\n", "<!-- up to here -->\n"


def parts() -> Iterator[str]:
    """A heading, a picture and a line of facts for each schedule."""
    for name, entry in SCHEDULES.items():
        where = f" where `{entry.bubble.condition}`" if entry.bubble.condition else ""
        facts = [f"Waits `{entry.bubble.text}`{where}"]
        facts += ["never flushes"] if entry.asynchronous else []
        facts += ["stages may have unequal replicas"] if entry.uneven else []
        yield f"\n### {name}\n\n![{entry.summary}](pictures/schedule-{name}.svg)\n"
        yield f"\n{'; '.join(facts)}.\n"


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
