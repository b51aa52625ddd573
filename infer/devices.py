"""Device names (`cpu`, `cpu:CORE`, `cuda:N`): the torch device behind them, and pinning to cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from drafters.base.errors import UserError

log = logging.getLogger(__name__)


def device_of(names: Sequence[str]) -> torch.device:
    """The torch device behind `cpu:CORE`, `cpu` or `cuda:N`. Raises `UserError` for several that are not CPU cores."""
    kinds = {name.partition(":")[0] for name in names}
    if kinds == {"cpu"}:
        return torch.device("cpu")
    if kinds == {"cuda"} and len(names) == 1:
        if not torch.cuda.is_available():
            raise UserError(f"device {names[0]!r}: no CUDA device is usable here; use cpu:0")
        return torch.device(names[0])
    if kinds == {"cuda"}:
        raise UserError(f"devices {', '.join(names)}: a target on several GPUs is not supported yet; give one")
    raise UserError(f"devices {', '.join(names)}: give cpu:CORE (several cores are possible) or cuda:N")


@contextmanager
def pinned_to_cores(names: Sequence[str]) -> Iterator[None]:
    """`pin_to_cores` inside the context: processes that are started there begin on those cores."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        pin_to_cores(names)
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)


def pin_to_cores(names: Sequence[str]) -> None:
    """Bind this thread, and those it starts, to the cores named `cpu:CORE`. Cores that do not exist are left out, with
    a warning.
    """
    wanted = {int(core) for name in names if (core := name.partition(":")[2]).isdigit() and name.startswith("cpu")}
    if not wanted or not hasattr(os, "sched_setaffinity"):
        return
    there = wanted & set(range(os.cpu_count() or 1))
    if there != wanted:
        log.warning("cores %s do not exist here: not pinned to them", sorted(wanted - there))
    if there:
        os.sched_setaffinity(0, there)
