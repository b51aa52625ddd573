"""A simulated target and drafter for the real engine: KV slots hold texts, not keys, so that every read is checked.

A slot holds the text it stands for (all tokens up to its own), as a number. A forward checks that a row sees exactly
the prefixes of its own text, each once, in slots that were written for them. An error of the scheduler, the block pool
or a cache is found where the wrong slot is read. The next token is a fixed function of the text, and the drafter
predicts it with errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from drafters.eagle3_ssd.card import DrafterCard
from drafters.eagle3_ssd.vocab import VocabMap
from infer.config import EngineSettings, Mode
from infer.draft.settings import DraftSettings
from infer.draft.worker import DraftWorker
from infer.engine.draft_client import DraftClient
from infer.engine.engine import Engine
from infer.engine.target import Rows, TargetOutput
from infer.ipc.channel import LocalChannel, PeerGone
from infer.ipc.messages import FromDraft, Ready, ToDraft
from infer.kernels.attention.block_pool import BlockPool
from infer.kernels.attention.paged import PagedRequest

VOCAB, END = 11, 10
Text = tuple[int, ...]


def next_token(text: Text) -> int:
    """What the target says after `text`; now and then the end token."""
    return hash((text[-3:], len(text) % 7)) % VOCAB


def drafted_token(text: Text) -> int:
    """What the drafter thinks it says: right three times in four."""
    return next_token(text) if hash((5, text[-4:])) % 4 else (next_token(text) + 1) % (VOCAB - 1)


def answer(prompt: Sequence[int], most: int, stops: frozenset[int] = frozenset({END})) -> list[int]:
    """The tokens that have to come after `prompt`: up to a stop token, at most `most`."""
    text = tuple(prompt)
    while len(text) < len(prompt) + most:
        text += (next_token(text),)
        if text[-1] in stops:
            break
    return list(text[len(prompt) :])


class Texts:
    """Texts as numbers, which fit into tensors."""

    def __init__(self) -> None:
        self._numbers: dict[Text, int] = {}
        self._texts: list[Text] = []

    def number(self, text: Text) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]

    def text(self, number: float) -> Text:
        return self._texts[int(number)]


class Slots:
    """What a pool's slots hold, and the checks of a read and a write."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.content: dict[int, Text] = {}

    def slot(self, blocks: Sequence[int], position: int) -> int:
        size = self.pool.block_size
        return blocks[position // size] * size + position % size

    def write(self, blocks: Sequence[int], position: int, text: Text) -> None:
        block = blocks[position // self.pool.block_size]
        assert self.pool._refs[block] == 1, f"block {block} is written while {self.pool._refs[block]} hold it"
        assert block not in self.pool._keys, f"block {block} is written after it was published"
        self.content[self.slot(blocks, position)] = text

    def texts(self, blocks: Sequence[int], positions: Sequence[int]) -> list[Text | None]:
        return [self.content.get(self.slot(blocks, position)) for position in positions]


class PlainTarget:
    """Stands for `TargetRunner`."""

    def __init__(self, num_blocks: int, block_size: int, texts: Texts) -> None:
        self.blocks = BlockPool(num_blocks, block_size)
        self.slots, self.texts = Slots(self.blocks), texts
        self.features: dict[int, int] = {}
        self.target = SimpleNamespace(facts=SimpleNamespace(end_token_ids=(END,), vocab_size=VOCAB))

    def forward(self, rows: Sequence[Rows]) -> TargetOutput:
        """Writes all rows, then reads as the rows would."""
        owners: dict[int, int] = {}
        for number, r in enumerate(rows):
            start = r.num_keys - len(r.tokens)
            text = self.slots.texts(r.blocks, [start - 1])[0] if start else ()
            assert text is not None, f"no key at {start - 1}"
            for position, token in enumerate(r.tokens, start):
                text = (*text, token)
                self.slots.write(r.blocks, position, text)
                slot = self.slots.slot(r.blocks, position)
                assert owners.setdefault(slot, number) == number, "two requests write one slot"
                self.features[slot] = self.texts.number(text)
        logits, features = [], []
        for r in rows:
            keys = self.slots.texts(r.blocks, range(r.num_keys))
            whole = keys[-1]
            assert whole is not None and keys == [whole[: p + 1] for p in range(r.num_keys)], f"stale keys: {keys}"
            assert list(whole[-len(r.tokens) :]) == list(r.tokens)
            first = r.num_keys - len(r.tokens)
            features += [self.texts.number(whole[: p + 1]) for p in range(first, r.num_keys)]
            logits += [next_token(whole[: p + 1]) for p in range(r.num_keys - r.num_logits, r.num_keys)]
        logits_LV = torch.nn.functional.one_hot(torch.tensor(logits, dtype=torch.int64), VOCAB).double()
        return TargetOutput(logits_LV, torch.tensor(features, dtype=torch.float64)[:, None])

    def features_of(self, blocks: Sequence[int], stop: int) -> Tensor:
        slots = [self.slots.slot(blocks, position) for position in range(stop)]
        return torch.tensor([self.features[slot] for slot in slots], dtype=torch.float64)[:, None]


class PlainDrafter:
    """Stands for `DraftModel`. A feature names the text up to its position, whoever computed it; slot j embeds token j
    + 1.
    """

    def __init__(self, num_blocks: int, block_size: int, texts: Texts) -> None:
        self.blocks = BlockPool(num_blocks, block_size)
        self.slots, self.texts = Slots(self.blocks), texts
        self.vocab = VocabMap(torch.arange(VOCAB), VOCAB)
        self.config, self.embeddings = SimpleNamespace(hidden_size=1), torch.zeros(1, dtype=torch.float64)
        self.card: Any = DrafterCard.model_construct(law=None, measured_fresh=None, measured_lagged=None)

    def forward(
        self, tokens: Sequence[int], features_RH: Tensor, positions: Sequence[int], requests: Sequence[PagedRequest]
    ) -> Tensor:
        """Each row's slot then stands for its feature's text and its token, and must see all beginnings of that, each
        once.
        """
        texts = [(*self.texts.text(f), t) for f, t in zip(features_RH[:, 0].tolist(), tokens, strict=True)]
        assert [len(text) - 2 for text in texts] == list(positions), (
            "a feature beside the token that does not follow it"
        )
        start = 0
        for r in requests:
            for i in range(r.num_rows):
                self.slots.write(r.blocks, r.num_keys - r.num_rows + i, texts[start + i])
            start += r.num_rows
        assert start == len(texts)
        start = 0
        for r in requests:
            for i in range(r.num_rows):
                own = r.num_keys - r.num_rows + i
                seen = range(own + 1) if r.mask_QL is None else r.mask_QL[i].nonzero()[:, 0].tolist()
                text = texts[start + i]
                keys = self.slots.texts(r.blocks, seen)
                assert keys == [text[: n + 2] for n in range(len(text) - 1)], f"row for {text} sees {keys}"
            start += r.num_rows
        return torch.tensor([self.texts.number(text) for text in texts], dtype=torch.float64)[:, None]

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """The drafter's guess first, the truth second."""
        logits = torch.zeros(len(hidden_RH), VOCAB)
        for row, number in enumerate(hidden_RH[:, 0].tolist()):
            text = self.texts.text(number)
            logits[row, next_token(text)] = 1.0
            logits[row, drafted_token(text)] = 2.0
        return logits


class FaultyChannel(LocalChannel):
    """A worker in this process that can be made silent, and can die."""

    dead = silent = False

    def ready(self) -> Ready:
        self._check()
        return super().ready()

    def send(self, message: ToDraft) -> None:
        self._check()
        if not message.is_answered and self.silent:
            self._messages.append(message)
        else:
            super().send(message)

    def receive(self, timeout: float) -> FromDraft | None:
        self._check()
        return None if self.silent else super().receive(timeout)

    def _check(self) -> None:
        if self.dead:
            raise PeerGone("dead")


class Simulation:
    """An engine over the two, with everything real but the tensors."""

    def __init__(self, mode: Mode = Mode.SSD, target_blocks: int = 12, block_size: int = 4, **settings: Any) -> None:
        base = {
            "lookahead": 3,
            "budget": 6,
            "policy": "uniform",
            "batch_size": 3,
            "max_model_len": 32,
            "prefill_tokens": 7,
        }
        self.settings = EngineSettings(target="", **{**base, **settings})
        self.texts = Texts()
        self.runner: Any = PlainTarget(target_blocks, block_size, self.texts)
        self.draft_settings = DraftSettings.of(self.settings, mode)
        each = -(-self.draft_settings.region_tokens // block_size)
        self.draft_blocks = (
            self.settings.batch_size - 1
        ) * each + 2  # not quite enough for a full batch of the longest
        self.block_size = block_size
        self.channel: FaultyChannel
        self.draft_client = DraftClient(None if mode is Mode.AR else self._connect)
        if mode is not Mode.AR:
            self.draft_client.start()
        self.engine = Engine(self.settings, mode, self.runner, self.draft_client)

    @property
    def worker(self) -> DraftWorker:
        """The drafter's side."""
        worker = self.channel.worker
        assert isinstance(worker, DraftWorker)
        return worker

    def _connect(self) -> FaultyChannel:
        model: Any = PlainDrafter(self.draft_blocks, self.block_size, self.texts)
        self.channel = FaultyChannel(DraftWorker(model, self.draft_settings))
        return self.channel

    def check(self) -> None:
        """Both sides' books."""
        self.engine.check()
        if self.draft_client.state.value not in ("none", "gone"):
            self.worker.check()
