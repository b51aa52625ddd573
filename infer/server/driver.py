"""The engine's own thread. Handlers of the event loop talk to it through an inbox, and it answers through their queues."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from drafters.errors import UserError

if TYPE_CHECKING:
    from infer.engine import Engine
    from infer.request import FinishReason, SamplingParams

log = logging.getLogger(__name__)
REST = 1.0  # seconds between two looks of an idle engine at its draft process


class EngineGone(Exception):
    """The engine has ended, by a failure or because the server stops."""


class Tokens(NamedTuple):
    """What a round gave one request."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class TokenStream:
    """One request's tokens, as the event loop reads them."""

    request_id: str
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    items: asyncio.Queue[Tokens | Exception] = field(default_factory=asyncio.Queue)
    accepted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def put(self, item: Tokens | Exception) -> None:
        """From the engine's thread."""
        self._call(self.items.put_nowait, item)

    def accept(self) -> None:
        """From the engine's thread: the request is queued."""
        self._call(self._resolve, None)

    def refuse(self, error: Exception) -> None:
        """From the engine's thread: the request is not queued, or nothing more will come."""
        self._call(self._resolve, error)
        self.put(error)

    def _resolve(self, error: Exception | None) -> None:
        if self.accepted.done():
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)

    def _call(self, function: Callable[..., None], argument: object) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, argument)

    async def read(self) -> AsyncGenerator[Tokens, None]:
        """Tokens round by round, the last ones with a finish reason. Raises `EngineGone` where the engine ends before."""
        while True:
            item = await self.items.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.finish_reason is not None:
                return


class EngineThread:
    """Owns an engine: launches it, steps it while there is work, closes it. Every call of the engine is made in its thread."""

    def __init__(self, launch: Callable[[], Engine]) -> None:
        self._launch = launch
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, TokenStream] = {}
        self._lock = threading.Lock()
        self._open = True
        self._ready: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> Engine:
        """Launch the engine; returns it, to read its settings and target only. Raises what the launch raised."""
        self._thread.start()
        return self._ready.result()

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        return self._open and self._thread.is_alive()

    async def submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> TokenStream:
        """Queue a request. Raises `UserError` where the engine refuses it, `EngineGone` where there is no engine."""
        stream = TokenStream(request_id)

        def on_engine(engine: Engine) -> None:
            try:
                engine.submit(prompt_ids, params, request_id)
            except UserError as error:
                self._forget(request_id)
                stream.refuse(error)
            else:
                stream.accept()

        with self._lock:
            if not self._open:
                raise EngineGone("the engine has ended")
            self._streams[request_id] = stream
            self._inbox.put(on_engine)
        try:
            await stream.accepted
        except asyncio.CancelledError:
            self.cancel(request_id)
            raise
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request that nobody reads any more; one that has ended is ignored."""
        if self._forget(request_id):
            self._inbox.put(lambda engine: engine.cancel(request_id))

    def close(self) -> None:
        """Close the engine; requests that still run get `EngineGone`."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            engine = self._launch()
        except BaseException as error:  # whoever called `start` gets it
            self._open = False
            self._ready.set_exception(error)
            return
        self._ready.set_result(engine)
        try:
            with engine:
                self._serve(engine)
        except Exception:  # the end of this thread: those who wait have to be told, whatever it was
            log.exception("the engine failed; the server answers 503 from now on")
        finally:
            with self._lock:
                self._open = False
                for stream in self._streams.values():
                    stream.refuse(EngineGone("the engine has ended"))
                self._streams.clear()

    def _serve(self, engine: Engine) -> None:
        while True:
            while not engine.has_work or not self._inbox.empty():
                try:
                    command = self._inbox.get(timeout=REST)
                except queue.Empty:
                    engine.rest()
                    continue
                if command is None:
                    return
                command(engine)
            for output in engine.step():
                self._deliver(output.request_id, Tokens(output.new_token_ids, output.finish_reason))

    def _deliver(self, request_id: str, tokens: Tokens) -> None:
        stream = self._streams.get(request_id) if tokens.finish_reason is None else self._forget(request_id)
        if stream is not None:
            stream.put(tokens)

    def _forget(self, request_id: str) -> TokenStream | None:
        with self._lock:
            return self._streams.pop(request_id, None)
