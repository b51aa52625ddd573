"""Serve over HTTP with OpenAI's API: `python -m infer.serve --recipe R [--host H] [--port P]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from drafters.base.errors import run_command
from infer.config import Mode
from infer.console import Parser, loading, note
from infer.recipe import load_engine_settings
from infer.server.http import listen, run_server, url_of

DESCRIPTION = """\
Serve a language model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models,
with streaming, and /health. Ctrl-C stops the server."""
EXAMPLES = """\
  python -m infer.serve --recipe recipes/smollm2-135m/serve.yaml --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}'"""


def main(argv: list[str]) -> int:
    """The command."""
    options = parse(argv)
    settings = load_engine_settings(options.recipe, Mode(options.mode), options.overrides)
    listener = listen(options.host, options.port)
    from infer.launch import launch
    from infer.server.app import create_app
    from infer.server.engine_thread import EngineThread

    thread = EngineThread(lambda: launch(settings, Mode(options.mode)))
    try:
        with loading(f"loading {settings.target}, mode {options.mode} ..."):
            engine = thread.start()
        name = options.model_name or settings.target
        note(engine.memory)
        note(f"serving {name!r} at {url_of(listener)}/v1 (mode {options.mode}; Ctrl-C stops)")
        run_server(create_app(thread, engine, name), listener)
    finally:
        thread.close()
        listener.close()
    note("stopped")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; `overrides` are the `key=value` settings."""
    parser = Parser("python -m infer.serve", DESCRIPTION, EXAMPLES)
    parser.add_recipe()
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; 0.0.0.0 is every network)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000; 0 takes a free one)")
    parser.add_argument(
        "--mode", choices=[mode.value for mode in Mode], default="ssd", help="how tokens are made (default: ssd)"
    )
    parser.add_argument("--model-name", metavar="NAME", help="what clients give as model (default: the target's name)")
    return parser.read(argv)


if __name__ == "__main__":
    sys.exit(run_command(main))
