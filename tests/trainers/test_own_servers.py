"""vLLM and SGLang read the partitions that are exported for them.

They do not import without a GPU's packages: the function that decides is run alone.
"""

import os
import types

import pytest

from partopt import export_plan
from tests.trainers.own_code import defined, installed
from tests.trainers.plans import BLOCKS, planned

FILES = {"vllm": "vllm/distributed/utils.py", "sglang": "sglang/srt/distributed/utils.py"}
PLANS = {
    "4-3-3-2": planned,
    "two stages": lambda: planned([3]),
    "one stage": lambda: planned([]),
    "large": lambda: planned([3, 4, 5, 6, 7, 8, 9, 10, 11]),
}


@pytest.fixture(params=FILES)
def ranges(request, monkeypatch):
    """The blocks of each of so many stages, as the server finds them for an exported text."""
    name = request.param
    if not installed(name):
        pytest.skip(f"{name} not installed (`make test-exporters`)")
    variable = f"{name.upper()}_PP_LAYER_PARTITION"

    def read(text, stages):
        monkeypatch.setenv(variable, text.strip().removeprefix(f"export {variable}="))
        envs = types.SimpleNamespace(**{variable: os.environ[variable]})
        find = defined(name, FILES[name], "get_pp_indices", envs=envs)
        return [find(BLOCKS, rank, stages) for rank in range(stages)]

    read.to = name
    return read


@pytest.mark.parametrize("case", PLANS)
def test_every_stage_has_the_blocks_of_the_plan(case, ranges):
    plan = PLANS[case]()
    found = ranges(export_plan(plan, ranges.to).main, len(plan.stages))
    for stage, (first, last) in zip(plan.stages, found, strict=True):
        own = [name for name in stage.modules if name.startswith("h.")]
        assert own == [f"h.{block}" for block in range(first, last)]


@pytest.mark.parametrize("wrong", ["4,3,3,1", "4,3,5", "4,3,3,2,0", "4,3,3,x", "4 3 3 2"])
def test_a_wrong_partition_is_refused(wrong, ranges):
    text = export_plan(planned(), ranges.to).main
    with pytest.raises(ValueError, match=r"partition"):
        ranges(text.replace("4,3,3,2", wrong), 4)
