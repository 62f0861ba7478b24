"""vLLM: `VLLM_PP_LAYER_PARTITION`. Embedding and head stay with the first and the last stage."""

from partopt.exporters.inference import partition_target

TARGET = partition_target(
    name="vllm",
    title="vLLM",
    variable="VLLM_PP_LAYER_PARTITION",
    flags=("--pipeline-parallel-size", "--tensor-parallel-size"),
    tried="vLLM 0.33.0",
)
