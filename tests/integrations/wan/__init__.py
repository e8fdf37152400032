"""Wan among the networks that tests of the core are repeated with (`tests.networks`)."""

from dfm_nb.planner.layouts import GpuLayout

_SMALL = ["model.variant=wan", "model.ffn_hidden_size=160"]
TINY = {"wan": ["model.variant=wan", "model.adaln_lora_dim=null", "model.text_padding=14"]}
PARALLEL = {
    "wan": (TINY["wan"], 99, ["TP2+SP", "PP2 virtual", "CP2", "recompute selective"]),
    "wan lora": (["model.lora.rank=3", "model.lora.alpha=6", *TINY["wan"]], 0, ["TP2+SP"]),
}
MEMORY = {"wan": ("bf16", _SMALL), "wan lora": ("fp32", [*_SMALL, "model.lora.rank=4"])}
PLANNED = {"wan": [GpuLayout(cp=2)], "wan lora": [GpuLayout(tp=2, sp=True), GpuLayout(pp=2)]}
COUNTED = {"wan": ["model.variant=wan", "model.ffn_hidden_size=96"]}
REFUSED = {"wan": ("model.variant=wan model.pooled_text=true", "model.pooled_text")}
