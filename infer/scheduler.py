"""Who runs: requests wait in order, and join when a place and their KV blocks are free. Blocks are taken for the whole request."""

from __future__ import annotations

from collections import deque

from drafters.errors import UserError
from infer.blocks import BlockPool
from infer.request import Request


class Scheduler:
    """Admits waiting requests between rounds, first come first served, and takes back what ended ones held."""

    def __init__(self, blocks: BlockPool, batch_size: int) -> None:
        self.pool, self.batch_size = blocks, batch_size
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.blocks: dict[str, tuple[int, ...]] = {}

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never fit is refused at once."""
        needed = self.pool.blocks_for(request.max_tokens)
        if needed > self.pool.num_blocks:
            holds = self.pool.num_blocks * self.pool.block_size
            raise UserError(
                f"request {request.id} may grow to {request.max_tokens} tokens, the KV pool holds {holds}: "
                "lower max_new_tokens or raise kv_tokens"
            )
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests to the running ones, as far as places and blocks go."""
        admitted = []
        while self.waiting and len(self.running) < self.batch_size:
            blocks = self.pool.allocate(self.pool.blocks_for(self.waiting[0].max_tokens))
            if blocks is None:
                break
            request = self.waiting.popleft()
            self.running[request.id], self.blocks[request.id] = request, blocks
            admitted.append(request)
        return admitted

    def release(self, request_id: str) -> None:
        """Forget an ended request and free its blocks."""
        del self.running[request_id]
        self.pool.free(self.blocks.pop(request_id))

    def drop_waiting(self, request_id: str) -> Request | None:
        """Take a request out of the queue, if it waits there."""
        found = next((r for r in self.waiting if r.id == request_id), None)
        if found:
            self.waiting.remove(found)
        return found
