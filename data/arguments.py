"""What the options of data commands share (torch-free)."""

from __future__ import annotations

import argparse


def truth(text: str) -> bool:
    """The value of a BOOL option."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"
