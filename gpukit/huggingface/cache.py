"""A cache of keys and values for transformers' generate() that appends in place.

    model.generate(ids, past_key_values=GrowingCache(), max_new_tokens=64)

transformers' own DynamicCache concatenates: each new token copies all keys and values of all tokens before it, twice the
bytes that attention reads. Here the tokens of a layer lie in a tensor with room for more, one after the other, [B, room,
H_kv, D] as in gpukit's KVCache, so that a new token writes one row. When the room is used up, a larger tensor takes over.
What transformers does to a cache besides (beams, cropping, choosing sequences) is inherited: it replaces `keys` and `values`
by tensors of its own, and the next token moves them into a tensor with room again.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

ROOM = 256  # tokens: a layer's room is the next multiple of it


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, [B, H_kv, T, D], as views of what has room for more tokens."""

    _k: Tensor  # [B, room, H_kv, D], of which `keys` shows the first T tokens
    _v: Tensor
    _shown: Tensor | None = None  # `keys` as this class left it

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append key_states and value_states [B, H_kv, T, D]; all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        total = held + key_states.shape[2]
        if self.keys is not self._shown or total > self._k.shape[1]:
            self._k, self._v = (
                self._with_room(old, new, held, total)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            )
        self._k[:, held:total] = key_states.transpose(1, 2)
        self._v[:, held:total] = value_states.transpose(1, 2)
        self.keys, self.values = self._k[:, :total].transpose(1, 2), self._v[:, :total].transpose(1, 2)
        self._shown = self.keys
        return self.keys, self.values

    @staticmethod
    def _with_room(old: Tensor, new: Tensor, held: int, total: int) -> Tensor:
        B, H, _, D = new.shape
        larger = new.new_empty(B, (total // ROOM + 1) * ROOM, H, D)
        if held:
            larger[:, :held] = old.transpose(1, 2)
        return larger


class GrowingCache(Cache):
    """For `past_key_values` of generate() or of a model's forward, patched or not. One text at a time: `reset()`, or make
    another, before the next prompt."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)
