"""vLLM: `VLLM_PP_LAYER_PARTITION`. Embedding and head stay with the first and the last stage."""

from partopt.exporters.inference import partition_target

TARGET = partition_target(
    "vllm", "vLLM", "VLLM_PP_LAYER_PARTITION", "--pipeline-parallel-size", "not tried"
)
