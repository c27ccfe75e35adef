"""Work in threads, while a network or the disk is busy. Licence: MIT."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor


def in_threads(function: Callable, items: list) -> Iterator:
    """map(function, items) for work on pictures. A decoded photograph takes 200 MB, and
    os.cpu_count() counts the CPUs of a container's host, so there are at most 8 threads."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), 1024):  # each item that waits takes memory, too
            yield from pool.map(function, items[start : start + 1024])


def prefetch(items: Iterator) -> Iterator:
    """Yields items, while a thread makes the next one. None marks the end, so it is no item."""
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(next, items, None)
        while True:
            item = upcoming.result()
            if item is None:
                return
            upcoming = pool.submit(next, items, None)
            yield item
