"""A tiny drafter that really drafts: trained for seconds on what a tiny target writes, so that tests see hits and
acceptance.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from drafters.eagle3_ssd.checkpoint import load_drafter, save_drafter
from drafters.targets.taps import tap_features
from drafters.targets.target import Target, load_target
from infer.config import EngineSettings, Mode
from infer.engine.engine import Engine
from infer.engine.request import Request, SamplingParams
from infer.launch import launch
from tests.tiny import save_tiny_drafter, save_tiny_target
from train.objective.unroll import Rows, unroll

STEPS, DEPTH, LENGTH = 120, 4, 64


def run(
    engine_settings: EngineSettings, mode: Mode, target: Target, prompts: list[list[int]], params: SamplingParams
) -> list[Request]:
    """Answer `prompts` and return their requests, in order. The drafter runs in this process."""
    with launch(engine_settings, mode, target, in_process=True) as engine:
        names = [engine.submit(prompt, params) for prompt in prompts]
        ended = drain(engine)
        assert engine.runner.blocks.num_free == engine.runner.blocks.num_blocks
    return [ended[name] for name in names]


def drain(engine: Engine) -> dict[str, Request]:
    """Step until nothing is left to do: the ended requests by id."""
    ended: dict[str, Request] = {}
    while engine.has_work:
        ended |= {output.request_id: output.request for output in engine.step() if output.finish_reason}
    return ended


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Distinct prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count, length), generator=generator).tolist()


def trained_pair(directory: Path, layers: int = 1) -> tuple[Target, Path]:
    """A tiny target and a drafter trained on its greedy answers to 48 random prompts."""
    target = load_target(str(save_tiny_target(directory / "target")), "float32")
    drafter_path = save_tiny_drafter(directory / "tiny-eagle3", target, layers, draft_vocab_size=256)
    settings = EngineSettings(target="", dtype="float32", batch_size=16, max_model_len=LENGTH, target_devices=("cpu",))
    prompts = random_prompts(48, 4, target.facts.vocab_size, seed=5)
    written = run(settings, Mode.AR, target, prompts, SamplingParams(max_new_tokens=LENGTH, ignore_eos=True))
    _train(target, drafter_path, torch.tensor([request.tokens for request in written]))
    return target, drafter_path


def _train(target: Target, path: Path, tokens_BT: torch.Tensor) -> None:
    loaded = load_drafter(path, target.facts, target.embed_weight, torch.float32)
    model = loaded.model
    places = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    rows = Rows(tokens_BT, places, torch.ones_like(tokens_BT))
    taps = tap_features(target, tokens_BT, places, rows.document_ids, loaded.config.tap_hidden_states_ids).taps_BTC
    anchors = places[:, : tokens_BT.shape[1] - DEPTH - 2]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(STEPS):
        loss = torch.zeros(())
        for d, hidden in enumerate(unroll(model, rows, model.fuse(taps), anchors, DEPTH)):
            wanted = tokens_BT.gather(1, anchors + d + 2)
            known = loaded.vocab.contains(wanted)
            logits = model.logits(hidden[:, : anchors.shape[1]])
            loss = loss + F.cross_entropy(logits[known], loaded.vocab.to_draft(wanted[known]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_drafter(path, model, loaded.vocab, loaded.card)
