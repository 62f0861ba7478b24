"""Operations and scores: as papers and reports count them."""

import pytest
from msgspec.structs import replace

from partopt.documents.transformer import Kind
from partopt.importers.hugging_face import load_transformer
from partopt.transformer.operations import active_parameters, model_flops, scores, taken_parameters
from tests.transformer.helpers import EXPERTS, GPT

# billions of parameters that a token takes, as their authors count them: with the head, without the
# embedding
ACTIVE = {
    "deepseek-v3": 36.6,
    "kimi-k2": 31.7,  # 32 with the embedding, 1.2
    "gpt-oss-20b": 3.61,
    "gpt-oss-120b": 5.13,
    "qwen3-235b-a22b": 21.6,
    "glm-4.5": 32.0,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_takes_as_many_parameters_as_their_authors_say(name):
    assert active_parameters(load_transformer(name)) / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)


def test_operations_of_a_token_are_six_a_parameter_and_attention():
    s = 2048
    block = 4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024
    whole = 4 * block + 32_000 * 1024
    assert active_parameters(GPT) == whole
    assert model_flops(GPT, s) == 6 * whole * s + 6 * s * s * 1024 * 4
    both_ways = replace(GPT, causal=False)
    assert model_flops(both_ways, s) == 6 * whole * s + 12 * s * s * 1024 * 4
    taken = 2 * 3 * 1024 * 512
    beside = EXPERTS.dense_parameters(EXPERTS.kinds()[0])
    assert active_parameters(EXPERTS) == 4 * (beside + taken) + 32_000 * 1024


def test_scores_are_half_of_the_square_or_those_in_the_window():
    full, windowed = Kind("attention", "dense"), Kind("windowed", "dense")
    assert scores(GPT, 2048, full) == 2048**2 / 2
    assert scores(replace(GPT, causal=False), 2048, full) == 2048**2
    few = replace(GPT, window=512)
    assert scores(few, 2048, windowed) == 512 * 2048 - 512**2 / 2
    assert scores(few, 2048, full) == scores(GPT, 2048, full)
    assert scores(replace(few, chunked=True), 2048, windowed) == 4 * 512**2 / 2
    assert scores(replace(GPT, window=4096), 2048, windowed) == scores(GPT, 2048, full)


def test_operations_of_further_tokens_are_a_block_and_a_head_each():
    made = load_transformer("deepseek-v3")
    one = replace(made, further=0)
    block = made.dense_parameters(made.kinds()[-1]) + taken_parameters(made)
    more = 6 * 4096 * (block + 2 * 7168**2 + made.end_parameters)
    more += 3 * 4096**2 * 128 * (192 + 128)
    assert model_flops(made, 4096) - model_flops(one, 4096) == pytest.approx(more)
    # as the reports of Megatron count DeepSeek-V3: 260.6 G a token, causal half counted
    assert model_flops(made, 4096) / 4096 / 1e9 == pytest.approx(260.6, rel=0.01)
