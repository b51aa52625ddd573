"""The thread that owns the engine. HTTP handlers put commands into its inbox; it puts tokens into their queues."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from drafters.base.errors import UserError
from infer.evaluation.figures import tokens_per_second

if TYPE_CHECKING:
    from infer.engine.engine import Engine
    from infer.engine.request import FinishReason, RequestOutput, SamplingParams
    from infer.kernels.sampling.verdict import TokenLogprob

log = logging.getLogger(__name__)
REST = 1.0  # seconds between the checks that an idle engine makes of its draft process


class EngineGone(Exception):
    """The engine has ended, by a failure or because the server stops."""


class NewRequest(NamedTuple):
    """The arguments of `Engine.submit`."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams


class RoundTokens(NamedTuple):
    """The tokens that one round committed for request number `choice` of a stream, and their log-probabilities."""

    choice: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class TokenStream:
    """The tokens of requests that are answered together, as the event loop reads them."""

    request_ids: tuple[str, ...]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    items: asyncio.Queue[RoundTokens | Exception] = field(default_factory=asyncio.Queue)
    accepted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def put(self, item: RoundTokens | Exception) -> None:
        """From the engine's thread."""
        self._call(self.items.put_nowait, item)

    def accept(self) -> None:
        """From the engine's thread: the requests are queued."""
        self._call(self._resolve, None)

    def refuse(self, error: Exception) -> None:
        """From the engine's thread: the requests are not queued, or the engine has ended."""
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

    async def read(self) -> AsyncGenerator[RoundTokens, None]:
        """RoundTokens round by round, the last ones of each request with a finish reason. Raises `EngineGone` where
        the engine ends before.
        """
        running = len(self.request_ids)
        while running:
            item = await self.items.get()
            if isinstance(item, Exception):
                raise item
            yield item
            running -= item.finish_reason is not None


@dataclass
class Listener:
    """The stream that gets the tokens of one request, and how many it got so far."""

    stream: TokenStream
    choice: int
    delivered: int = 0

    def deliver(self, output: RequestOutput) -> None:
        """From the engine's thread, between two steps."""
        start = self.delivered
        self.delivered += len(output.new_token_ids)
        logprobs = tuple(output.request.logprobs[start : self.delivered])
        self.stream.put(RoundTokens(self.choice, output.new_token_ids, output.finish_reason, logprobs))


class EngineThread:
    """Launches an engine, steps it while it has work, and closes it. Only this thread calls the engine."""

    def __init__(self, launch: Callable[[], Engine]) -> None:
        self._launch = launch
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._lock = threading.Lock()
        self._open = True
        self._ready: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> Engine:
        """Launch the engine and return it; callers may only read its settings and target. Raises what the launch
        raised.
        """
        self._thread.start()
        return self._ready.result()

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        return self._open and self._thread.is_alive()

    async def submit(self, asks: Sequence[NewRequest]) -> TokenStream:
        """Queue requests, all or none. Raises `UserError` where the engine refuses one, `EngineGone` where there is no
        engine.
        """
        stream = TokenStream(tuple(ask.request_id for ask in asks))

        def on_engine(engine: Engine) -> None:
            queued = []
            try:
                for ask in asks:
                    queued.append(engine.submit(ask.prompt_ids, ask.params, ask.request_id))
            except UserError as error:
                for request_id in stream.request_ids:
                    self._forget(request_id)
                for request_id in queued:
                    engine.cancel(request_id)
                stream.refuse(error)
            else:
                stream.accept()

        with self._lock:
            if not self._open:
                raise EngineGone("the engine has ended")
            self._listeners.update(
                {request_id: Listener(stream, choice) for choice, request_id in enumerate(stream.request_ids)}
            )
            self._inbox.put(on_engine)
        try:
            await stream.accepted
        except asyncio.CancelledError:
            self.cancel(stream)
            raise
        return stream

    def cancel(self, stream: TokenStream) -> None:
        """End requests whose stream is no longer read; finished ones are ignored."""
        for request_id in stream.request_ids:
            if self._forget(request_id):
                self._inbox.put(lambda engine, request_id=request_id: engine.cancel(request_id))

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
        except Exception:  # the thread ends here: waiting handlers have to be told, whatever the error was
            log.exception("the engine failed; the server answers 503 from now on")
        finally:
            with self._lock:
                self._open = False
                for stream in {id(listener.stream): listener.stream for listener in self._listeners.values()}.values():
                    stream.refuse(EngineGone("the engine has ended"))
                self._listeners.clear()

    def _serve(self, engine: Engine) -> None:
        while True:
            while not engine.has_work or not self._inbox.empty():
                try:
                    command = self._inbox.get(timeout=REST)
                except queue.Empty:
                    engine.check_idle()
                    continue
                if command is None:
                    return
                command(engine)
            for output in engine.step():
                ended = output.finish_reason is not None
                listener = self._forget(output.request_id) if ended else self._listeners.get(output.request_id)
                if listener is not None:
                    listener.deliver(output)
                if ended and log.isEnabledFor(logging.INFO):
                    _log_end(output)

    def _forget(self, request_id: str) -> Listener | None:
        with self._lock:
            return self._listeners.pop(request_id, None)


def _log_end(output: RequestOutput) -> None:
    request, speed = output.request, tokens_per_second([output.request])
    counts = f"{len(request.prompt_ids)} prompt tokens, {len(request.new_tokens)} new tokens"
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    log.info("%s ended (%s): %s%s", output.request_id, output.finish_reason, counts, rate)
