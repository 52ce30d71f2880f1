"""Clients that ask a server for a long time, and samples of it meanwhile."""

import asyncio
import time


async def sampled(client, count, seconds, sample):
    """Have clients ask for so long; returns (seconds since the start, sample) now and then.

    client: what each does until a time, by `time.monotonic`.
    """
    start, samples = time.monotonic(), []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(client(start + seconds))
        while (passed := time.monotonic() - start) < seconds:
            samples.append((passed, await asyncio.to_thread(sample)))
            await asyncio.sleep(min(2, seconds / 100))
    return samples


def mean(samples, first, last):
    values = [value for at, value in samples if first <= at <= last]
    return [sum(column) / len(values) for column in zip(*values, strict=True)]
