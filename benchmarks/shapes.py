"""How many configurations of models are read: `benchmarks/shapes.py FOLDER`.

Under the folder every file whose name ends in `config.json` and that says a model_type is one, as
in `model_configs` of ai-dynamo/aiconfigurator. Printed are how many are read, and why the others
are not; with -v the parameters of those, in billions.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from partopt.errors import PartoptError
from partopt.importers.hugging_face import read_transformer


def main(folder: Path, verbose: bool) -> None:
    """Read every configuration under a folder."""
    read, why = 0, collections.Counter[str]()
    paths = [
        path for path in sorted(folder.rglob("*config.json")) if "model_type" in path.read_text()
    ]
    for path in paths:
        try:
            model = read_transformer(path.read_bytes(), path.name, path.stem)
        except PartoptError as error:
            why[error.parts[0].message.removeprefix(f"{path.name}: ")] += 1
            continue
        read += 1
        if verbose:
            print(f"{model.parameters / 1e9:8.2f}  {path.name}")
    print(f"{read} of {len(paths)} are read")
    for reason, many in why.most_common():
        print(f"{many:4}  {reason}")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), "-v" in sys.argv)
