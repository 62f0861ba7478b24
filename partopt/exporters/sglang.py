"""SGLang: `SGLANG_PP_LAYER_PARTITION`. Embedding and head stay with the first and last stage."""

from partopt.exporters.inference import partition_target

TARGET = partition_target(
    name="sglang",
    title="SGLang",
    variable="SGLANG_PP_LAYER_PARTITION",
    flags=("--pp-size", "--tp-size"),
    tried="SGLang 0.5.23",
)
