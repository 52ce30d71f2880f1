"""Runs the requests of a load: each when it is due (open loop), or so many at a time (closed loop)."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

from jaxinfer.evaluation.serving.client import CompletionClient, LoadRequest, RequestRecord


async def run_open(
    client: CompletionClient, requests: Sequence[LoadRequest], ended: Callable[[], None] = lambda: None
) -> list[RequestRecord]:
    """Send each request at its arrival, however many run: a slow server does not slow arrivals down.

    ended: called at the end of each request.
    """
    start = time.perf_counter()

    async def run(request: LoadRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + request.arrival - time.perf_counter()))
        record = await client.complete(request, start)
        ended()
        return record

    return await asyncio.gather(*map(run, requests))


async def run_closed(
    client: CompletionClient,
    requests: Sequence[LoadRequest],
    concurrency: int,
    ended: Callable[[], None] = lambda: None,
) -> list[RequestRecord]:
    """Run so many requests at a time, the next one when one has ended: it arrives then. ended: as in `run_open`."""
    start, waiting = time.perf_counter(), iter(requests)
    records: list[RequestRecord] = []

    async def run() -> None:
        for request in waiting:
            arrived = dataclasses.replace(request, arrival=time.perf_counter() - start)
            records.append(await client.complete(arrived, start))
            ended()

    await asyncio.gather(*(run() for _ in range(concurrency)))
    return records
