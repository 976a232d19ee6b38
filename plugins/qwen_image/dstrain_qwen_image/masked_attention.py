"""The attention of diffusers' transformer, with a mask for every pair of tokens."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    apply_rotary_emb_qwen,
)
from torch import Tensor


class MaskedAttention(QwenDoubleStreamAttnProcessor2_0):  # type: ignore[misc]  # of diffusers, untyped
    """The attention of diffusers' transformer, with a mask for every pair of tokens, which
    it does not take.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the image's tokens and of the texts'."""
        if attention_mask is None:
            made: tuple[Tensor, Tensor] = super().__call__(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                image_rotary_emb=image_rotary_emb,
            )
            return made
        image_positions, text_positions = image_rotary_emb
        text = (
            self._heads(attn, attn.add_q_proj(encoder_hidden_states)),
            self._heads(attn, attn.add_k_proj(encoder_hidden_states)),
            self._heads(attn, attn.add_v_proj(encoder_hidden_states)),
        )
        image = (
            self._heads(attn, attn.to_q(hidden_states)),
            self._heads(attn, attn.to_k(hidden_states)),
            self._heads(attn, attn.to_v(hidden_states)),
        )
        query = torch.cat(
            [
                self._rotated(attn.norm_added_q(text[0]), text_positions),
                self._rotated(attn.norm_q(image[0]), image_positions),
            ],
            dim=1,
        )
        key = torch.cat(
            [
                self._rotated(attn.norm_added_k(text[1]), text_positions),
                self._rotated(attn.norm_k(image[1]), image_positions),
            ],
            dim=1,
        )
        value = torch.cat([text[2], image[2]], dim=1)
        joint = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        joint = joint.flatten(2, 3).to(query.dtype)
        length = encoder_hidden_states.shape[1]
        (out, dropout) = attn.to_out
        return dropout(out(joint[:, length:])), attn.to_add_out(joint[:, :length])

    def _heads(self, attn: Any, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (-1, attn.inner_dim // attn.heads))

    def _rotated(self, tokens: Tensor, positions: Tensor) -> Tensor:
        rotated: Tensor = apply_rotary_emb_qwen(tokens, positions, use_real=False)
        return rotated


def use_masked_attention(dit: Any) -> None:
    """Let the attention of a denoiser take masks; without one, it is as it was.

    It stays so: a block that is recomputed later asks for it, too.
    """
    for block in dit.transformer_blocks:
        before = block.attn.processor
        if not isinstance(before, MaskedAttention):
            masked = MaskedAttention()
            masked._attention_backend = before._attention_backend
            masked._parallel_config = before._parallel_config
            block.attn.processor = masked
