"""A network is one object: the settings it fixes, its linear layers and norms, and what its packs and files differ in.

`Network` is the DiT (`model.variant=dit`). Another network is a subclass, found by its name as tokenizers are:

    [project.entry-points."dfm_nb.networks"]
    wan = "dfm_nb.integrations.wan.network:WanNetwork"

Its module is imported with the settings, so it must not import torch: `transformer` and the like name what is imported
when it is needed. `config.counts` computes parameters, FLOPs and widths from the tables here; tests compare them with
the built network: each product by its name, shape, bias and tensor-parallel split, and FLOPs by FlopCounterMode.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dfm_nb.base import plugins
from dfm_nb.config import notation

if TYPE_CHECKING:
    from dfm_nb.config.schema import ModelConfig

SINUSOID_DIM = 256
"""Width of the sinusoidal embedding of c_noise and of the frame rate (DiT, Peebles & Xie 2023)."""


@dataclass(frozen=True)
class Linear:
    """One product y = W x + b. The name is the module's in the network; for a layer's module, relative to the layer.

    applied_to : "video" or "text", once per token of it, or "sample", once per sample (noise level, frame rate, adaLN).
    split : what tensor parallelism divides: "column" the outputs, "row" the inputs (not the bias), None nothing.
    """

    name: str
    fan_in: int
    fan_out: int
    applied_to: str
    split: str | None = None
    bias: bool = True

    def sides(self, tp: int = 1) -> tuple[int, int]:
        """Inputs and outputs on one of `tp` ranks."""
        if self.split == "row":
            return self.fan_in // tp, self.fan_out
        if self.split == "column":
            return self.fan_in, self.fan_out // tp
        return self.fan_in, self.fan_out

    def parameters(self, tp: int = 1) -> int:
        """Weights and biases on one of `tp` ranks."""
        fan_in, fan_out = self.sides(tp)
        return fan_in * fan_out + (fan_out if self.bias else 0)


def two_layers(name: str, fan_in: int, width: int, applied_to: str) -> tuple[Linear, Linear]:
    return Linear(f"{name}.fc1", fan_in, width, applied_to), Linear(f"{name}.fc2", width, width, applied_to)


SIZE = ("num_layers", "hidden_size", "num_attention_heads", "adaln_lora_dim", "ffn_hidden_size")


def size_row(*values: int | None) -> dict[str, Any]:
    """The keys of `model` that a size sets, in this order; a null `ffn_hidden_size` means four times the width."""
    return dict(itertools.zip_longest(SIZE, values))


@dataclass(frozen=True)
class Network:
    """The network of a resolved `model` group (with the data set's `in_channels` and `text_dim`)."""

    model: "ModelConfig"

    # ---- settings and sizes
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    settings: ClassVar[Mapping[str, Any]] = {}
    """Keys of `model` that the network sets ..."""
    suggested: ClassVar[frozenset[str]] = frozenset(
        "layernorm_epsilon text_padding objective sigma_data P_mean P_std".split()
    )
    """... and those of them that may be overridden."""

    # ---- packs, latents and captions
    centred = True
    """Positions are measured from the picture's centre, not from its corner."""
    standardised = True
    """Each latent channel is scaled to mean 0 and standard deviation sigma_data; False: only multiplied by that."""
    encodes_empty_caption = False
    """Weights without a stored empty caption were trained with the text encoder's, not with zeros."""

    # ---- code that needs torch, as module:name
    transformer = "dfm_nb.model.dit:DiT"
    importer: ClassVar[str | None] = None
    """`read(path)`: the `checkpoints.consolidated.Foreign` of a path that it recognises, else None."""
    hub_files: ClassVar[tuple[str, ...]] = ()
    """Patterns of the files of a hub repository that `importer` reads."""
    adapters: ClassVar[str | None] = None
    """`read(file, model)`: the rank, and LoRA adapters by our names."""
    exporters: ClassVar[Mapping[str, str]] = {}
    """By `dfm export --format`: `write(output, tensors, config, dtype)`; LoRA is merged, or `model.lora.rank` set."""

    # ---- products, vectors and memory
    bias = True  # of the products of layers
    # keys and values are computed from text of the hidden size
    embedded_text = True
    cross_norms = False  # cross attention norms queries and keys too
    # shift, scale and gate for self attention, cross attention and MLP
    vectors_per_layer = 9
    # [tokens, h] that a layer keeps for backward around its branches: for each of the three its norm's
    # input, the norm's result (for the gradient of the scale), the shifted and scaled result (the
    # product's input), and its own result (for the gradient of the gate)
    residual_tensors = 12
    # [text, h] that the text embedder keeps: its result, and the input of its norm
    text_tensors = 2

    def broken(self) -> Iterator[tuple[str, str, str]]:
        """(setting, what must hold, the fix) for each setting that the network cannot have."""
        for key, value in self.settings.items():
            if key not in self.suggested and getattr(self.model, key) != value:
                yield key, f"must be {notation.write_value(value)}", "leave it out"

    @property
    def patch_dim(self) -> int:
        """Values per token of the latent: in_channels * patch_temporal * patch_spatial^2."""
        m = self.model
        assert m.in_channels is not None
        return m.in_channels * m.patch_temporal * m.patch_spatial**2

    def layer_linears(self) -> tuple[Linear, ...]:
        """The products of each layer, in the order of the forward."""
        m = self.model
        bias = self.bias
        h = m.hidden_size
        f = m.ffn_hidden_size
        text = h if self.embedded_text else m.text_dim
        assert f is not None and text is not None
        rank = m.adaln_lora_dim
        down = [Linear("adaln.down", h, rank, "sample", bias=False)] if rank else []
        return (
            *down,
            Linear("adaln.up", rank or h, self.vectors_per_layer * h, "sample", bias=bias),
            Linear("self_attention.linear_qkv", h, 3 * h, "video", "column", bias),
            Linear("self_attention.linear_proj", h, h, "video", "row", bias),
            Linear("cross_attention.linear_q", h, h, "video", "column", bias),
            Linear("cross_attention.linear_kv", text, 2 * h, "text", "column", bias),
            Linear("cross_attention.linear_proj", h, h, "video", "row", bias),
            Linear("mlp.linear_fc1", h, f, "video", "column", bias),
            Linear("mlp.linear_fc2", f, h, "video", "row", bias),
        )

    def ends(self) -> tuple[Linear, Linear]:
        """The products of the first and of the last pipeline stage."""
        h = self.model.hidden_size
        p = self.patch_dim
        return Linear("x_embedder", p, h, "video"), Linear("final", h, p, "video")

    def outer_linears(self) -> tuple[Linear, ...]:
        """All other products: `x_embedder` of the first stage, `final*` of the last, others of all pipeline stages."""
        h = self.model.hidden_size
        text = self.model.text_dim
        assert text is not None
        pool = [Linear("text_pool", h, h, "sample")] if self.model.pooled_text else []
        return (
            *two_layers("sigma_embedder", SINUSOID_DIM, h, "sample"),
            *two_layers("fps_embedder", SINUSOID_DIM, h, "sample"),
            Linear("text_embedder", text, h, "text"),
            *pool,
            Linear("final_adaln.up", h, 2 * h, "sample"),  # shift and scale
            *self.ends(),
        )

    def layer_vectors(self, tp: int) -> int:
        """Parameters of a layer on one of `tp` ranks that are no part of a product: norms of queries and keys."""
        norms = 4 if self.cross_norms else 2
        return norms * self.model.qk_layernorm * self.model.hidden_size // self.model.num_attention_heads

    def outer_vectors(self, last: bool) -> int:
        """The same outside of the layers, on the last pipeline stage or another: the norm of the text."""
        return self.model.hidden_size

    def norm_bytes(self, tp: int) -> int:
        """Bytes per token that a norm of queries or keys keeps: unit vectors and their scales, in float32."""
        return 4 * (self.model.hidden_size + self.model.num_attention_heads) // tp


@functools.cache
def find(name: str) -> type[Network]:
    """The network of that `model.variant`."""
    return plugins.find("networks", name)


def names() -> tuple[str, ...]:
    """The values of `model.variant`."""
    return tuple(plugins.names("networks"))
