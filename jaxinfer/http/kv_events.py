"""Publishes which blocks of tokens the prefix cache has, so that a router can send a request where its prefix is.

Messages are vLLM's: a ZeroMQ PUB socket sends three frames, which are the topic, a sequence number (8 bytes,
big-endian) and a batch in msgpack, `[time, events, data_parallel_rank]`. A block is a full page. Its hash depends only
on the model's name, the adapter and all tokens up to its end, so servers of the same model agree on it.

The engine's thread only puts changes into a queue. A thread of its own makes events of them, and never waits for a
subscriber: ZeroMQ drops what a slow one does not take.
"""

import collections
import hashlib
import itertools
import logging
import os
import queue
import re
import struct
import threading
import time
from typing import Any, Literal, NamedTuple, Self

import msgspec
import zmq

from jaxinfer.generation.api.async_llm import AsyncLLM
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.page_pool import Node, PagePool
from jaxinfer.http.config import KVEventsConfig

BATCH_SECONDS = 0.01
"""How long changes are collected for one batch: a thread that woke for each would interrupt the engine's."""
REPLAY_SECONDS = 0.05
"""How often requests for missed batches are looked for."""
LAST_MILLISECONDS = 500
"""How long the end of a server waits for subscribers to take the last batches."""
END = b"\xff" * 8
"""The sequence number that ends a replay: -1."""

_CHECKED = re.compile(r"@[0-9a-f]{32,}$")
"""The digest in the name of an adapter that a client loaded (`AdapterCache.register_checked`)."""

log = logging.getLogger(__name__)
Change = Literal["stored", "removed", "cleared"]
Event = dict[str, Any]


class CachedBlock(NamedTuple):
    """A published block.

    Attributes:
      digest: names the model, the adapter and all tokens up to the end of the block.
      hash: its first 64 bits, which subscribers see.
      lora_name: the adapter, by the name that clients know.
    """

    digest: bytes
    hash: int
    lora_name: str | None


class _Lane:
    """Listens to a pool.

    Attributes:
      pool: the pool.
      blocks: the block of each of its nodes; only the publishing thread knows them.
    """

    def __init__(self, pool: PagePool, changes: "queue.SimpleQueue[tuple[_Lane, Change, Node | None] | None]"):
        self.pool, self._changes = pool, changes
        self.blocks: dict[Node, CachedBlock] = {}

    def stored(self, node: Node) -> None:
        self._changes.put((self, "stored", node))

    def removed(self, node: Node) -> None:
        self._changes.put((self, "removed", node))

    def cleared(self) -> None:
        self._changes.put((self, "cleared", None))


class KVEvents:
    """Publishes the events of a model's prefix cache until it is closed.

    Args:
      config: the addresses, the topic and the format.
      model: the name by which clients ask for the model.
      host: the server's host.
      port: the server's port.

    Raises ValueError for an address that cannot be used.
    """

    def __init__(self, config: KVEventsConfig, model: str, *, host: str, port: int):
        self._config, self._model = config, model
        self.topic = (config.topic or f"kv@{_address(host, port)}@{model}").encode()
        self._changes: queue.SimpleQueue[tuple[_Lane, Change, Node | None] | None] = queue.SimpleQueue()
        self._lanes: list[_Lane] = []
        self._medium = "GPU"
        self._pages_of: collections.Counter[int] = collections.Counter()  # by hash: more than one may hold a block
        self._sequence, self._sent = (
            itertools.count(),
            collections.deque[tuple[bytes, bytes]](maxlen=config.buffer_steps),
        )
        self._context = zmq.Context()
        try:
            self._publisher = self._open(zmq.PUB, "endpoint", bind=_is_ours(config.endpoint))
            self._replays = None if config.replay_endpoint is None else self._open(zmq.ROUTER, "replay_endpoint")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="jaxinfer-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, name: str, *, bind: bool = True) -> zmq.Socket[bytes]:
        """Open the socket of an address. Raises ValueError."""
        address, socket = getattr(self._config, name), self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0 if kind == zmq.ROUTER else 100_000)  # a replay must be complete
        try:
            (socket.bind if bind else socket.connect)(address)
        except zmq.ZMQError as error:
            raise ValueError(f"kv_events.{name} {address}: {error.strerror}; choose another address.") from error
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, llm: AsyncLLM) -> None:
        """Publish the events of a model that takes no requests yet. The one before, if there was one, is closed.

        Raises ValueError if it has no prefix cache.
        """
        config = llm.engine.config
        if not isinstance(config, EngineConfig) or not config.prefix_caching:
            raise ValueError("kv_events needs a model that generates, with prefix_caching; leave kv_events out.")
        self._medium = "CPU" if llm.model.platform == "cpu" else "GPU"
        self._lanes = [_Lane(pool, self._changes) for pool in llm.engine.scheduler.pools]
        for lane in self._lanes:
            lane.pool.listener = lane

    def close(self) -> None:
        """Publish what is left, and end."""
        self._changes.put(None)
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            while (changes := self._take()) is not None:
                if events := self._events(changes):
                    self._publish(events)
                self._answer()
        except Exception:
            log.exception("No more KV events are published.")
        finally:
            for lane in self._lanes:  # or the queue would grow
                lane.pool.listener = None
            self._context.destroy(linger=LAST_MILLISECONDS)

    def _take(self) -> list[tuple[_Lane, Change, Node | None]] | None:
        """Wait for changes and return them, in their order; None at the end."""
        changes = []
        try:
            change = self._changes.get(timeout=None if self._replays is None else REPLAY_SECONDS)
            if change is not None:
                time.sleep(BATCH_SECONDS)
            while change is not None:
                changes.append(change)
                change = self._changes.get_nowait()
        except queue.Empty:
            return changes
        if changes:
            self._changes.put(None)  # the end, after these
            return changes
        return None

    def _events(self, changes: list[tuple[_Lane, Change, Node | None]]) -> list[Event]:
        """Make events of changes; those of neighbouring blocks are one."""
        events: list[Event] = []
        for lane, change, node in changes:
            if node is None:
                for known in list(lane.blocks):
                    self._remove(lane, known, events)
                if not self._pages_of:
                    events.append({"type": "AllBlocksCleared"})
            elif change == "stored":
                self._store(lane, node, events)
            else:
                self._remove(lane, node, events)
        return events

    def _store(self, lane: _Lane, node: Node, events: list[Event]) -> None:
        before = lane.blocks.get(node.parent) if isinstance(node.parent, Node) else self._root(node.parent)
        if before is None:
            return  # its parent has left the tree, so no request can find it
        parent = before.hash if isinstance(node.parent, Node) else None
        block = lane.blocks[node] = _block(before, node.tokens)
        self._pages_of[block.hash] += 1
        if self._pages_of[block.hash] > 1:
            return
        if events and events[-1]["type"] == "BlockStored" and events[-1]["block_hashes"][-1] == parent:
            events[-1]["block_hashes"].append(block.hash)
            events[-1]["token_ids"].extend(node.tokens)
            return
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": [block.hash],
                "parent_block_hash": parent,
                "token_ids": list(node.tokens),
                "block_size": len(node.tokens),
                "lora_id": None,
                "medium": self._medium,
                "lora_name": block.lora_name,
            }
        )

    def _remove(self, lane: _Lane, node: Node, events: list[Event]) -> None:
        if (block := lane.blocks.pop(node, None)) is None:
            return
        self._pages_of[block.hash] -= 1
        if self._pages_of[block.hash]:
            return
        del self._pages_of[block.hash]
        if events and events[-1]["type"] == "BlockRemoved":
            events[-1]["block_hashes"].append(block.hash)
        else:
            events.append({"type": "BlockRemoved", "block_hashes": [block.hash], "medium": self._medium})

    def _root(self, root: Any) -> CachedBlock:
        """The block before the first one of prompts with an adapter."""
        adapter = root[-1]
        digest = hashlib.sha256(f"{self._model}\0{adapter or ''}".encode()).digest()
        return CachedBlock(digest, 0, None if adapter is None else _CHECKED.sub("", adapter))

    def _publish(self, events: list[Event]) -> None:
        written = events if self._config.format == "map" else [list(event.values()) for event in events]
        batch = msgspec.msgpack.encode([time.time(), written, 0])
        number = next(self._sequence).to_bytes(8, "big")
        self._publisher.send_multipart((self.topic, number, batch))
        self._sent.append((number, batch))

    def _answer(self) -> None:
        """Send missed batches to those who ask for them by the first number."""
        while self._replays is not None and self._replays.poll(0):
            *sender, first = self._replays.recv_multipart()
            for number, batch in self._sent:
                if number >= first:
                    self._replays.send_multipart((*sender, number, batch))
            self._replays.send_multipart((*sender, END, b""))


def _block(before: CachedBlock, tokens: tuple[int, ...]) -> CachedBlock:
    """The block of tokens that follow another block."""
    digest = hashlib.sha256(before.digest + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
    return CachedBlock(digest, int.from_bytes(digest[:8]), before.lora_name)


def _address(host: str, port: int) -> str:
    """The address by which a router knows this server."""
    host = os.environ.get("POD_IP") or host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_ours(address: str) -> bool:
    """Return whether to listen on an address, rather than connect to it; the rule is vLLM's."""
    return "*" in address or "::" in address or address.startswith("ipc://")
