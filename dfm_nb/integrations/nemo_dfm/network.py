"""NeMo DFM's DiT among the networks: settings, and the tables that parameters, FLOPs and memory are computed from."""

from collections.abc import Iterator

from dfm_nb.config.networks import SINUSOID_DIM, Linear, Network, two_layers


class NeMoNetwork(Network):
    settings = {
        "adaln_lora_dim": 256,
        "layernorm_epsilon": 1e-5,  # its 1e-6 is not a field of the dataclass, so megatron-core's default applies
        "qk_layernorm": True,
        "pooled_text": False,
        "rope": False,
        "patch_temporal": 1,
        "text_padding": 512,
    }
    suggested = Network.suggested | {"adaln_lora_dim"}
    centred = False
    standardised = False
    transformer = "dfm_nb.integrations.nemo_dfm.transformer:NeMoDiT"
    importer = "dfm_nb.integrations.nemo_dfm.weights:read"
    bias = False
    embedded_text = False
    cross_norms = True

    def broken(self) -> Iterator[tuple[str, str, str]]:
        yield from super().broken()
        if self.model.adaln_lora_dim is None:
            yield "adaln_lora_dim", "must be a rank", "for example 256"
        width = self.model.hidden_size
        if width % 16 or width < 256:
            yield "hidden_size", "must be a multiple of 16, 256 or more,", "for example 384"

    def outer_linears(self) -> tuple[Linear, ...]:
        h = self.model.hidden_size
        fps = two_layers("fps_embedder", SINUSOID_DIM, SINUSOID_DIM, "sample")
        return (*two_layers("sigma_embedder", h, h, "sample"), *fps, *self.ends())

    def outer_vectors(self, last: bool) -> int:
        return 0
