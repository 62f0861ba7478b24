"""Figures of papers that `partopt schedule` prints. Papers count from 1, partopt from 0."""

import shlex

import pytest

PAPERS = [
    ("GPipe, figure 2 (c)", "gpipe --microbatches 4 --backward 1", "42.9%"),
    ("PipeDream, figure 2", "naive", "75.0%"),
    ("Megatron-LM, figure 4, bottom", "interleaved --chunks 2", "4.50 s, 15.8%"),
    ("Zero bubble, figure 3, top", "zb-h1", "27.00 s"),
    ("DeepSeek-V3, table 2, 1F1B", "1f1b --stages 8 --microbatches 20", "21.00 s, 25.9%"),
    ("DeepSeek-V3, table 2, ZB1P", "zb-h1 --stages 8 --microbatches 20", "7.00 s, 10.4%"),
    ("DeepSeek-V3, table 2, DualPipe", "dualpipe --stages 8 --microbatches 20", "6.00 s, 9.1%"),
    ("DualPipeV's page", "dualpipev --stages 4 --microbatches 10", "3.00 s, 9.1%"),
    ("Zhuang et al., section 4", "1f1b-eager --transfer 0.25", "34.50 s"),
]


@pytest.mark.parametrize(("paper", "arguments", "printed"), PAPERS)
def test_the_command_prints_the_figure_of_the_paper(partopt, paper, arguments, printed):
    done = partopt("schedule", *shlex.split(arguments))
    assert done.code == 0, done.err
    assert printed in done.out, paper
