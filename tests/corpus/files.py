"""Token files made by hand, as their formats say."""

import json

import numpy as np

from smallmind.corpus.token_files import MappedTokens, TokenFile

GPT2, LLAMA3, EVALUATION = (20240520, 1), (20240801, 7), (20240522, 1)
IDS = np.arange(1000, dtype=np.int32) * 7 % 50257


def header(tokens, magic=GPT2):
    return np.array([*magic, tokens, *[0] * 253], "<i4").tobytes()


def llm_c(path, ids, magic=GPT2):
    dtype = "<u4" if magic == LLAMA3 else "<u2"
    path.write_bytes(header(len(ids), magic) + np.asarray(ids, dtype).tobytes())
    return path


def plain(path, ids, dtype="uint16"):
    path.write_bytes(np.asarray(ids, dtype).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    path.with_name("meta.json").write_text(json.dumps({"dtype": dtype, "vocab_size": 50257}))
    return path


def tokens_of(*paths):
    return MappedTokens(map(TokenFile, paths))
