"""Work in threads."""

import os
import threading
import time

import pytest

from support.threads import in_threads, prefetch


def test_at_most_8_pictures_are_decoded_at_once(monkeypatch):
    """The host of a container may have many CPUs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    def work(item):
        time.sleep(0.001)
        return item, threading.get_ident()

    items, threads = zip(*in_threads(work, range(3000)), strict=True)
    assert items == tuple(range(3000))
    assert 2 <= len(set(threads)) <= 8


def test_prefetch_passes_items_and_errors():
    assert list(prefetch(iter(range(20)))) == list(range(20))

    def broken():
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(prefetch(broken()))
    early = prefetch(iter(range(1000)))
    assert next(early) == 0
    early.close()  # must not hang
