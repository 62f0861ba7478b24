"""Options and functions as the command line writes them."""

import pytest

from partopt.cli.words import as_flags


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("`microbatches=64`", "--microbatches 64"),
        ("needs `microbatches` or `global_batch`", "needs --microbatches or --global-batch"),
        ("`microbatch_sizes=[1]`", "--microbatch 1"),
        ("`microbatch_sizes=[1, 2, 4]`: too many", "--microbatch 1,2,4: too many"),
        ("`microbatch_sizes=[1, 'x']`: no", "--microbatch 1,x: no"),
        ("`microbatch_sizes=[]`: no", "--microbatch: no"),
        ("`cuts=(5,)`", "--cuts 5"),
        ("add depth=... to `arguments`", "add depth=... to --set"),
        ("`units=h.*` or `granularity=block`", "--unit h.* or --granularity block"),
        ("`memory=40 GB`", '--memory "40 GB"'),
        ("`force=True`", "--force"),
        ("run `solve`, then `verify`", "run partopt plan, then partopt show --verify"),
        ("`measure` it again", "partopt profile it again"),
        ("`colour=blue` and `hue`", "`colour=blue` and `hue`"),
        ("steps and `no end", "steps and `no end"),
    ],
)
def test_options_are_flags_and_functions_are_verbs(text, typed):
    assert as_flags(text) == typed
