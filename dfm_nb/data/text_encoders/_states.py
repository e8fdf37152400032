"""How the text encoders turn captions into the states of their tokens."""

from typing import Any

import torch


class Words:
    """What the text encoders share.

    tokenizer, model : of transformers. max_tokens : longer captions are cut. rows : captions of a batch.
    """

    tokenizer: Any
    model: Any
    max_tokens: int
    rows: int

    def clean(self, caption: str) -> str:
        """What is read of a caption."""
        return caption

    def lost(self, caption: str) -> dict[str, str]:
        """What the states of a caption lack, as a sentence by reason."""
        tokens = self.tokenizer(self.clean(caption), verbose=False)["input_ids"]
        lost = {}
        own = len(tokens) - self.tokenizer.num_special_tokens_to_add()
        unknown = tokens.count(self.tokenizer.unk_token_id)
        if len(tokens) > self.max_tokens:
            lost["text_cut"] = f"its text of {len(tokens)} tokens is cut at {self.max_tokens}; shorten it"
        if unknown:
            said = f"{unknown} of {own} tokens of its text are unknown to the text encoder; choose another"
            lost["unknown_text" if 2 * unknown > own else "unknown_tokens"] = said
        return lost

    @torch.no_grad()
    def encode(self, captions: list[str]) -> list[torch.Tensor]:
        """Last hidden states of each caption's own tokens, bfloat16 [L, D] on the CPU, in the order given.

        Equal captions are encoded once. Those with about equally many tokens share a batch, so little of it is padding.
        Padding is masked: a caption's states do not depend on its batch (to rounding).
        """
        captions = [self.clean(caption) for caption in captions]
        cut: dict[str, Any] = {"truncation": True, "max_length": self.max_tokens}
        distinct = sorted(set(captions), key=lambda c: (len(self.tokenizer(c, **cut)["input_ids"]), c))
        states: dict[str, torch.Tensor] = {}
        for start in range(0, len(distinct), self.rows):
            batch = distinct[start : start + self.rows]
            tokens = self.tokenizer(batch, padding=True, return_tensors="pt", **cut).to(self.model.device)
            hidden_BLD = self.model(**tokens).last_hidden_state
            for caption, hidden_LD, mask_L in zip(batch, hidden_BLD, tokens["attention_mask"]):
                states[caption] = hidden_LD[mask_L.bool()].bfloat16().cpu()
        return [states[c] for c in captions]
