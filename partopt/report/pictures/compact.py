"""SVG in fewer bytes: what every text repeats is said once."""

from __future__ import annotations

import re

# a group around each text, with a number of its own
_GROUP = re.compile(rb'<g id="text_[0-9]+">\s*(<text [^>]*>[^<]*</text>)\s*</g>')
_UNTURNED = re.compile(rb' transform="rotate\(-0 [^"]*\)"')
_FAMILY = re.compile(rb"font-family: ([^;\"]*);? ?")
_INDENT = re.compile(rb"\n +")
_PLACE = re.compile(rb' (?:d|x|y)="[^"]*"')
# a box by its corners, once more its first one or not
_BOX = re.compile(rb"M (\S+) (\S+) \nL (\S+) \2 \nL \3 (\S+) \nL \1 \4 \n(?:L \1 \2 \n)?z\n")
_DIGITS = re.compile(rb"(\.[0-9]{2})[0-9]+")


def compact(svg: bytes) -> bytes:
    """The SVG that matplotlib wrote, its texts without what they share: it looks the same.

    Places are in hundredths of a point, and boxes are said by their sides.
    """
    families = set(_FAMILY.findall(svg))
    if len(families) == 1:
        svg = _FAMILY.sub(b"", svg)
        svg = svg.replace(b"<svg ", b'<svg font-family="%s" ' % families.pop(), 1)
    svg = _PLACE.sub(lambda place: _DIGITS.sub(rb"\1", place[0]), _UNTURNED.sub(b"", svg))
    svg = _BOX.sub(rb"M\1 \2H\3V\4H\1z", svg)
    return _INDENT.sub(b"\n", _GROUP.sub(rb"\1", svg))
