"""`--profile DIR`: torch's profiler on the target's process, exported as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "target.json.gz"  # Perfetto and chrome://tracing read it packed


@contextmanager
def profiling(directory: Path | None) -> Iterator[None]:
    """Profile the operators of this process inside, on CPU and CUDA; writes `DIR/target.json.gz` at the end.

    None profiles nothing.
    """
    if directory is None:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    profiler = profile(activities=activities)
    profiler.start()
    try:
        yield
    finally:
        profiler.stop()
        profiler.export_chrome_trace(str(directory / FILE))
