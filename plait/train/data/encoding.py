"""Texts to token ids, ahead of who writes them: reading, encoding and writing go on at the same time.

``tokenizers`` encodes a list of texts on all cores and lets go of Python meanwhile. So a thread that reads
the next list while two others wait for theirs keeps every core busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from plait.train.data.documents import Text
from plait.train.data.tokenizer import Tokenizer

AHEAD = 4 << 20
"""Bytes of text that are encoded at the same time, at most, unless one text is longer: 120 bytes of memory
each."""
THREADS = 3

Encoded = tuple[list[Text], list[np.ndarray]]


def encode_ahead(groups: Iterator[list[Text]], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Each group with the ids of its texts, int64 [tokens] each, in order."""
    waiting, size = deque[tuple[list[Text], int, Future[list[np.ndarray]]]](), 0
    pool = ThreadPoolExecutor(THREADS, "encode")
    try:
        for group in groups:
            length = sum(len(text.text) for text in group)
            while waiting and (size + length > AHEAD or len(waiting) >= THREADS):
                texts, done, future = waiting.popleft()
                yield texts, future.result()
                size -= done
            waiting.append((group, length, pool.submit(tokenizer.encode_many, [text.text for text in group])))
            size += length
        for texts, _, future in waiting:
            yield texts, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
