"""A corpus of short documents, written from wherever the last writer came to."""

from pathlib import Path

import numpy as np

from smallmind import InputError
from smallmind.corpus.shard_writer import ShardWriter
from tests.corpus.files import llm_c

VOCAB_SIZE, SHARD_TOKENS = 300, 150
DOCUMENTS = 36


def document(number):
    """The ids of a document, and whether it is held out. Some span several shards, some none."""
    random = np.random.default_rng(number)
    size = 450 if number == 22 else int(random.integers(0, 40))
    return random.integers(0, VOCAB_SIZE, size), number % 4 == 1


def part(held_out):
    """All ids of a part."""
    documents = [document(number) for number in range(DOCUMENTS)]
    return np.concatenate([ids for ids, is_held_out in documents if is_held_out == held_out])


def writer(directory, **changed):
    arguments = {"vocab_size": VOCAB_SIZE, "tokenizer_digest": "a tokenizer", **changed}
    return ShardWriter(directory, **{"shard_tokens": SHARD_TOKENS, **arguments})


def prepare(directory, until=DOCUMENTS):
    """Writes the documents, each in two pieces, and commits now and then."""
    try:
        shards = writer(directory)
    except InputError as error:
        if "is complete" in str(error):
            return
        raise
    shards.state["documents"] = DOCUMENTS
    with shards:
        for number in range((shards.position or {"next": 0})["next"], DOCUMENTS):
            if number == until:
                raise EOFError
            ids, held_out = document(number)
            shards.append(ids[:9], held_out=held_out)
            shards.append(ids[9:], {"next": number + 1}, held_out)
            if number % 10 == 9:
                shards.commit()


def contents(directory):
    """The names and bytes of files, without the lock, which a killed process leaves behind."""
    files = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    files.pop(".lock", None)
    return files


def expected(directory):
    """Name -> bytes of the shards, as the format says."""
    shards = {}
    for name, held_out in ("train", False), ("held_out", True):
        ids = part(held_out)
        for number, start in enumerate(range(0, len(ids), SHARD_TOKENS)):
            path = llm_c(Path(directory) / "scratch.bin", ids[start : start + SHARD_TOKENS])
            shards[f"{name}_{number:06}.bin"] = path.read_bytes()
            path.unlink()
    return shards
