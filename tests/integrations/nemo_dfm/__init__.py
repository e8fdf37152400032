"""NeMo DFM's DiT among the networks that tests of the core are repeated with (`tests.networks`)."""

_SMALL = ["model.variant=dfm", "model.hidden_size=256"]
PARALLEL = {"dfm": ([*_SMALL, "model.rope=false", "model.num_attention_heads=4"], 64, ["TP2+SP", "PP2 virtual", "CP2"])}
MEMORY = {"dfm": ("bf16", _SMALL)}
COUNTED = {"dfm": _SMALL}
REFUSED = {"dfm": ("model.variant=dfm model.hidden_size=192", "model.hidden_size")}
