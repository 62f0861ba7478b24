"""The job that a configuration states: what options say goes before it, 0 and False too."""

import pytest

from partopt.documents.engine import Layout
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search.jobs import read_job
from partopt.search.judging import plan_layout
from partopt.trainers import export_plan

DGX = Topology.load("dgx-h100", 1)


@pytest.fixture(scope="module")
def script():
    """Arguments of Megatron for a plan of 64 samples of 2,048 tokens, tp 2."""
    layout = Layout(tp=2, microbatch=2)
    options = {"trainer": "megatron", "global_batch": 64, "sequence": 2048, "layout": layout}
    return export_plan(plan_layout(Job(load_transformer("llama3-8b"), DGX, **options)), "megatron")


@pytest.mark.parametrize(
    "option", ["global_batch", "sequence", "microbatch_size", "chunks", "recompute"]
)
def test_an_option_of_0_is_not_left_out(script, option):
    asked, _ = read_job("megatron", script.main, DGX)
    assert (asked.global_batch, asked.sequence, asked.layout.microbatch) == (64, 2048, 2)
    with pytest.raises(PartoptError) as error:
        read_job("megatron", script.main, DGX, **{option: 0})
    assert error.value.code != "missing-option"


def test_an_option_that_is_none_is_what_the_text_says(script):
    asked, _ = read_job("megatron", script.main, DGX)
    names = ("global_batch", "sequence", "dtype", "layout", "facts")
    assert read_job("megatron", script.main, DGX, **dict.fromkeys(names))[0] == asked
    assert read_job("megatron", script.main, DGX, global_batch=32)[0].global_batch == 32
