"""Option types that the data commands share (torch-free)."""

from __future__ import annotations

import argparse


def parse_bool(text: str) -> bool:
    """The value of a BOOL option: `true` or `false`, in any case."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"
