"""Wan 2.1 among the networks: settings, sizes, and the tables that parameters, FLOPs and memory are computed from."""

from dfm_nb.config.networks import SINUSOID_DIM, Linear, Network, size_row, two_layers


class WanNetwork(Network):
    sizes = {
        "Wan-tiny": size_row(2, 64, 4, None, 160),  # ours, for unit tests
        "Wan-1.3B": size_row(30, 1536, 12, None, 8960),
        "Wan-14B": size_row(40, 5120, 40, None, 13824),
    }
    settings = {
        "patch_spatial": 2,
        "patch_temporal": 1,
        "adaln_lora_dim": None,  # the modulation is a table
        "qk_layernorm": True,
        "pooled_text": False,
        "rope": True,
        "layernorm_epsilon": 1e-6,
        "text_padding": 512,
        "objective": "flow",
        "sigma_data": 1.0,
        "P_mean": 0.0,
        "P_std": 1.0,
    }
    centred = False
    encodes_empty_caption = True
    transformer = "dfm_nb.integrations.wan.transformer:Wan"
    importer = "dfm_nb.integrations.wan.folder:read"
    hub_files = ("transformer/*", "scheduler/*", "vae/config.json", "model_index.json")
    adapters = "dfm_nb.integrations.wan.folder:updates_in"
    exporters = {"diffusers": "dfm_nb.integrations.wan.folder:write"}
    cross_norms = True
    vectors_per_layer = 6
    residual_tensors = 10  # cross attention has neither scale nor gate, and keeps the first and the third
    text_tensors = 3  # both sides of the text embedder's activation

    def layer_linears(self) -> tuple[Linear, ...]:
        # instead of adaLN a table, and a projection that all layers share
        return tuple(x for x in super().layer_linears() if not x.name.startswith("adaln."))

    def outer_linears(self) -> tuple[Linear, ...]:
        h = self.model.hidden_size
        text = self.model.text_dim
        assert text is not None
        modulations = Linear("sigma_embedder.proj", h, 6 * h, "sample")
        sigma = (*two_layers("sigma_embedder", SINUSOID_DIM, h, "sample"), modulations)
        return (*sigma, *two_layers("text_embedder", text, h, "text"), *self.ends())

    def layer_vectors(self, tp: int) -> int:
        # four norms over all heads, which tp splits; the norm before cross attention, and the table
        return 4 * self.model.hidden_size // tp + (2 + 6) * self.model.hidden_size

    def outer_vectors(self, last: bool) -> int:
        return 2 * self.model.hidden_size * last  # the output's table

    def norm_bytes(self, tp: int) -> int:
        # one scale for all heads; with TP a trained norm keeps its input too
        width = self.model.hidden_size // tp
        return 4 * (width * (2 if tp > 1 and not self.model.lora.rank else 1) + 1)
