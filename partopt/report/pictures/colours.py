"""The colours of stages and of memory: neighbours differ in grey, too."""

from __future__ import annotations

# Okabe and Ito's colours or shades of them, light and dark in turn
_STAGES = (
    "#9FD8F5",
    "#0072B2",
    "#F0E442",
    "#B04A00",
    "#A8E6CF",
    "#00704F",
    "#F3C6DF",
    "#8A4B78",
)
# from the bottom of a bar; what lives as long as a microbatch is hatched
MEMORY = {
    "parameters": ("#0072B2", ""),
    "gradients": ("#56B4E9", ""),
    "optimizer": ("#CCE5F5", ""),
    "activations": ("#C45A00", "////"),
    "buffers": ("#E69F00", "////"),
    "transient": ("#F0E442", "////"),
}


def stage_colour(stage: int) -> str:
    """The colour of a stage; far apart from that of the next one, and repeated after eight."""
    return _STAGES[stage % len(_STAGES)]


def ink(colour: str) -> str:
    """Black or white, whichever can be read on `colour`."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 128 else "white"
