"""The memory of a step has no term in vocabulary times length times depth: measured at two of each, in processes of
their own.
"""

from __future__ import annotations

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import prod
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from data.chat.pack import PackedRow
from drafters.eagle3_ssd.config import DrafterConfig
from train.config import LossSettings, Stage
from train.measure_speed import one_step, random_features, random_objective

ROWS, UNSUPERVISED = 2, 64
VOCABULARIES, LENGTHS, DEPTHS = (2048, 32768), (256, 512), (4, 12)


def two_steps(vocab: int, length: int, depth: int) -> int:
    """Two optimizer steps: by how many bytes they raised this process's largest resident set."""
    config = DrafterConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=2,
        rope_theta=1e4,
        max_position_embeddings=1024,
        vocab_size=max(VOCABULARIES),
        draft_vocab_size=vocab,
        target_hidden_size=64,
        tap_hidden_states_ids=(1, 2, 3),
    )
    turns = np.concatenate((np.zeros(UNSUPERVISED, np.int32), np.ones(length - UNSUPERVISED, np.int32)))
    row = PackedRow(np.ones(length, np.int64), turns, np.ones(length, np.int32), np.arange(length))
    objective = random_objective(config, LossSettings(), torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        features = random_features([row] * ROWS, config, torch.bfloat16, torch.device("cpu"))
        one_step(objective, optimizer, features, Stage(steps=1, depth=depth))
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def send_peak(pipe: Connection, sizes: tuple[int, int, int]) -> None:
    pipe.send(two_steps(*sizes))


def peak(sizes: tuple[int, int, int]) -> int:
    """Bytes, from a forked process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=send_peak, args=(there, sizes))
    process.start()
    there.close()  # so that a process that fails ends the wait
    size: int = here.recv()
    process.join()
    return size


def peaks() -> dict[tuple[int, int, int], int]:
    """Of all sizes. To be called in a fresh process: memory that earlier work of a process left free is used again,
    unseen.
    """
    two_steps(2048, 256, 4)  # kernels are compiled before the processes part
    return {sizes: peak(sizes) for sizes in product(VOCABULARIES, LENGTHS, DEPTHS)}


@pytest.mark.long
def test_memory_has_no_term_in_vocabulary_times_length_times_depth() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        found = fresh.submit(peaks).result()
    smaller = (VOCABULARIES[0], LENGTHS[0], DEPTHS[0])
    together = sum(size * (-1) ** sum(map(int.__eq__, sizes, smaller)) for sizes, size in found.items())
    kept_logits = 2 * ROWS * prod(b - a for a, b in (VOCABULARIES, LENGTHS, DEPTHS))
    assert abs(together) < 0.25 * kept_logits, (
        found,
        together,
        kept_logits,
    )  # the allocator's own ups and downs are a tenth of it
    for vocab, length in product(VOCABULARIES, LENGTHS):  # each deeper step keeps less than a row of logits
        more = (found[vocab, length, DEPTHS[1]] - found[vocab, length, DEPTHS[0]]) / (DEPTHS[1] - DEPTHS[0])
        assert more < 0.5 * 2 * ROWS * length * max(VOCABULARIES), (vocab, length, more)
