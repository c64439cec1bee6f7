"""The shipped model through a Streamer with one worker, as a share of calling it directly.

Both get the same batches of 64 different sentences of the model's own text. Directly means
``predict`` in a process that does nothing else, with the CPU threads that a lone worker gets.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bert_model import ManagedBertModel, SentenceEncoder
from service_streamer import Streamer

TEXT = Path(__file__).parent.parent / "example" / "data" / "text_infilling.txt"
BATCHES, ROUNDS = 40, 9


def batches() -> list[list[str]]:
    encoder = SentenceEncoder()
    sentences = []
    for line in TEXT.read_text().splitlines():
        words = line.split()
        if words and words[0] != "#":
            words[len(words) // 2] = "[MASK]"
            sentence = " ".join(words)
            if len(encoder.tokenizer.encode(sentence).ids) <= encoder.max_sent_len:
                sentences.append(sentence)
    return [[sentences[(64 * i + j) % len(sentences)] for j in range(64)] for i in range(BATCHES)]


def serve_directly(connection: Connection) -> None:
    model = ManagedBertModel()
    model.init_model()
    work = batches()
    model.predict(work[0])
    while connection.recv():
        started = time.perf_counter()
        for batch in work:
            model.predict(batch)
        connection.send(time.perf_counter() - started)


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    direct = multiprocessing.get_context("spawn").Process(target=serve_directly, args=(theirs,))
    direct.start()
    work = batches()
    shares = []
    with Streamer(ManagedBertModel) as streamer:
        streamer.predict(work[0])
        for _ in range(ROUNDS):
            ours.send(True)
            alone = ours.recv()
            started = time.perf_counter()
            for future in [streamer.submit(batch) for batch in work]:
                future.result()
            shares.append(alone / (time.perf_counter() - started))
    ours.send(False)
    direct.join()
    print(statistics.median(shares))


if __name__ == "__main__":
    main()
