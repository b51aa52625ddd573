"""Draft vocabulary: the subset of the target's ids that the drafter can propose, as ids, offsets and membership.

Shapes: V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.base.errors import UserError
from drafters.base.files import atomic_write


class VocabMap:
    """Translates between draft ids 0..Vd-1 and target ids. Draft id i stands for target id `draft_to_target[i]`."""

    def __init__(self, draft_to_target: Tensor, vocab_size: int) -> None:
        """`draft_to_target` int64 [Vd], strictly increasing, inside 0..vocab_size-1; anything else is refused."""
        ids = draft_to_target.to(torch.int64)
        if ids.dim() != 1 or not len(ids):
            raise UserError(
                f"the draft vocabulary has shape {tuple(ids.shape)}; it has to be a list of at least one target id"
            )
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            raise UserError(
                f"the draft vocabulary has to be strictly increasing ids below {vocab_size}; "
                f"it runs from {int(ids[0])} to {int(ids[-1])}: "
                "the map is damaged, or an index was stored where an offset belongs"
            )
        self.draft_to_target = ids
        self.vocab_size = vocab_size
        self._target_to_draft = torch.full((vocab_size,), -1, dtype=torch.int64, device=ids.device)
        self._target_to_draft[ids] = torch.arange(len(ids), device=ids.device)

    @classmethod
    def by_frequency(cls, counts_V: Tensor, size: int) -> VocabMap:
        """The `size` most frequent target ids; ties go to the smaller id."""
        if size > len(counts_V):
            raise UserError(
                f"draft_vocab_size = {size} is larger than the target's vocabulary of {len(counts_V)}; "
                "take at most that"
            )
        most_frequent = torch.sort(counts_V, descending=True, stable=True).indices[:size]
        return cls(most_frequent.sort().values, len(counts_V))

    def coverage(self, counts_V: Tensor) -> float:
        """The share of the counted tokens that the draft vocabulary holds."""
        return int(counts_V[self.draft_to_target.to(counts_V.device)].sum()) / int(counts_V.sum())

    @classmethod
    def from_offsets(cls, d2t: Tensor, vocab_size: int) -> VocabMap:
        """From a checkpoint's `d2t`, where target id = draft id + d2t[draft id]."""
        return cls(torch.arange(len(d2t), dtype=torch.int64) + d2t.to(torch.int64), vocab_size)

    def __len__(self) -> int:
        return len(self.draft_to_target)

    def d2t(self) -> Tensor:
        """int64 [Vd] offsets, the checkpoint's form."""
        return self.draft_to_target - torch.arange(len(self), device=self.draft_to_target.device)

    def t2d(self) -> Tensor:
        """bool [V], true where a target id is in the draft vocabulary."""
        return self._target_to_draft >= 0

    @property
    def target_to_draft(self) -> Tensor:
        """int64 [V]: the draft id of each target id, -1 where it has none."""
        return self._target_to_draft

    def contains(self, target_ids: Tensor) -> Tensor:
        """bool, shape of `target_ids`: is the drafter able to propose it?"""
        return self._target_to_draft[target_ids] >= 0

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft ids of target ids that are all in the draft vocabulary (ask `contains` first)."""
        draft_ids = self._target_to_draft[target_ids]
        outside = target_ids[draft_ids < 0]
        assert not len(outside), f"outside the draft vocabulary: {outside[:8].tolist()}"
        return draft_ids

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return self.draft_to_target[draft_ids]

    def to(self, device: torch.device | str) -> VocabMap:
        """The same map on another device."""
        return VocabMap(self.draft_to_target.to(device), self.vocab_size)


def cached_vocabulary(counts_V: Tensor, size: int, tokenizer_hash: str, directory: Path) -> VocabMap:
    """`VocabMap.by_frequency`, cached in `directory` by tokenizer, token counts and size."""
    content = f"{tokenizer_hash}:{size}:".encode() + counts_V.to("cpu", torch.int64).numpy().tobytes()
    file = directory / f"draft-vocabulary-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    if file.is_file():
        return VocabMap.from_offsets(load_file(file)["d2t"], len(counts_V))
    vocab = VocabMap.by_frequency(counts_V, size)
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write(file, lambda temporary: save_file({"d2t": vocab.d2t().contiguous()}, temporary))
    return vocab
