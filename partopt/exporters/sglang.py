"""SGLang: `SGLANG_PP_LAYER_PARTITION`. Embedding and head stay with the first and last stage."""

from partopt.exporters.inference import partition_target

TARGET = partition_target(
    "sglang", "SGLang", "SGLANG_PP_LAYER_PARTITION", "--pp-size", "SGLang 0.5.23"
)
