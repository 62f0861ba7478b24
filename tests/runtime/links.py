"""Measures the links of two ranks on one host: `python -m tests.runtime.links`.

It prints a line of JSON of what was measured. `python -m tests.runtime.links wait` measures until
it is stopped.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from partopt.runtime.link_measurement import prepare_links


def tell(what: str) -> None:
    """Print what is measured next."""
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    repetitions = 10**7 if "wait" in sys.argv else 5
    run = prepare_links([4096, 65536], ranks=2, backend="gloo", repetitions=repetitions)
    print(json.dumps(dataclasses.asdict(run.measure(tell))))
