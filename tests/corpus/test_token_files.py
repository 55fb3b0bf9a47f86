"""The formats of token files: what is read, and what is refused."""

import os
import pickle

import numpy as np
import pytest

from smallmind import InputError
from smallmind.console import activity
from smallmind.corpus.token_files import (
    TokenFile,
    check_vocabulary,
    dtype_for,
    encode_header,
)
from tests.corpus.files import EVALUATION, GPT2, IDS, LLAMA3, header, llm_c, plain, tokens_of
from tests.programs import refusal, refuses


@pytest.mark.parametrize("magic", [GPT2, LLAMA3])
def test_files_of_llm_c_are_read(tmp_path, magic):
    tokens = tokens_of(llm_c(tmp_path / "fineweb_train_000001.bin", IDS, magic))
    assert tokens[:].dtype == np.int32
    np.testing.assert_array_equal(tokens[:], IDS)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_without_a_header_have_the_type_in_meta_json(tmp_path, dtype):
    ids = [65535, 1, 2] if dtype == "uint16" else [100_000, 128_255, 0]
    assert tokens_of(plain(tmp_path / "tokens.bin", ids, dtype))[:].tolist() == ids


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_files_of_nanogpt_are_read_without_their_pickle(tmp_path, name):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "opened"),)

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    (tmp_path / name).write_bytes(IDS.astype("<u2").tobytes())
    np.testing.assert_array_equal(tokens_of(tmp_path / name)[:], IDS)
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize(
    ("vocab_size", "magic"), [(2, GPT2), (2**16, GPT2), (2**16 + 1, LLAMA3), (2**31, LLAMA3)]
)
def test_headers_are_those_of_llm_c(vocab_size, magic):
    assert encode_header(dtype_for(vocab_size), 1234) == header(1234, magic)


WHOLE = header(3) + b"abcdef"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (WHOLE[:-1], "announces 3 tokens, which take 1,030 bytes; it has 1,029: copy it again"),
        (WHOLE + b"gh", "announces 3 tokens, which take 1,030 bytes; it has 1,032"),
        (WHOLE[:1024], "it has 1,024"),
        (WHOLE[:500], "ends within its header: 500 of 1,024 bytes"),
        (header(3, LLAMA3) + b"abcdef", "which take 1,036 bytes"),
        (header(0), "announces 0 tokens"),
        (header(-3), "announces -3 tokens"),
        (header(3, EVALUATION) + b"abcdef", "20240522, is that of llm.c's evaluation sets"),
        (header(3, (20240520, 2)) + b"abcdef", "it has version 2; version 1 is read"),
        (header(3, (20240801, 1)) + b"abcdefabcdef", "it has version 1; version 7 is read"),
        (b"abc", "3 bytes are not a whole number of uint16 ids"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "train.bin").write_bytes(content)
    said = refusal(TokenFile, tmp_path / "train.bin")
    assert message in said and said.startswith(str(tmp_path / "train.bin"))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{", "is not a valid JSON file"),
        ("[]", "dtype=None must be uint16 or uint32"),
        ('{"vocab_size": 3}', "dtype=None must be"),
        ('{"dtype": "int64"}', "dtype='int64' must be"),
        ('{"dtype": {}}', "must be uint16 or uint32"),
    ],
)
def test_a_damaged_meta_json_is_refused(tmp_path, meta, message):
    (tmp_path / "train.bin").write_bytes(b"abcd")
    (tmp_path / "meta.json").write_text(meta)
    said = refusal(TokenFile, tmp_path / "train.bin")
    assert message in said and "meta.json" in said


def test_a_file_of_unknown_type_is_refused_until_it_is_named(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"abcd")
    said = refusal(TokenFile, tmp_path / "tokens.bin").split("put their type into")[1]
    advice = said.split("beside it: ")[1].split(" or ")[0]
    (tmp_path / "meta.json").write_text(advice)
    assert len(TokenFile(tmp_path / "tokens.bin")) == 2


def test_what_is_not_a_regular_file_is_refused(tmp_path):
    refuses("is a directory; give the token files in it", TokenFile, tmp_path)
    refuses("does not exist", TokenFile, tmp_path / "none.bin")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "train.bin")
    refuses("not a regular file", TokenFile, tmp_path / "train.bin")
    os.mkfifo(tmp_path / "meta.json")
    (tmp_path / "val.bin").write_bytes(b"abcd")
    refuses(r"meta\.json", TokenFile, tmp_path / "val.bin")


@pytest.mark.parametrize(
    ("ids", "dtype", "words"),
    [
        (np.arange(5, 30_000), "<u4", "seems to hold ids of 32 bits: every second half-word is 0"),
        (np.arange(0, 128_000, 7), "<u4", "seems to hold ids of 32 bits"),
        (np.arange(5, 30_000), "<i8", "seems to hold ids of 64 bits: three of every four"),
    ],
)
@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_wider_ids_without_a_type_are_refused(tmp_path, name, ids, dtype, words):
    path = tmp_path / name
    path.write_bytes(ids.astype(dtype).tobytes())
    refuses(words, TokenFile, path)
    if dtype == "<u4":  # the advice is followed
        (tmp_path / "meta.json").write_text('{"dtype": "uint32"}')
        np.testing.assert_array_equal(tokens_of(path)[:], ids)


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(4000) * 31 % 65,  # of characters
        np.arange(4000) * 31 % 50257,
        np.zeros(4000),
        np.tile([0, 1], 2000),
        [5, 6, 7],
    ],
)
def test_ids_of_16_bits_are_known(tmp_path, ids):
    (tmp_path / "train.bin").write_bytes(np.asarray(ids).astype("<u2").tobytes())
    np.testing.assert_array_equal(tokens_of(tmp_path / "train.bin")[:], ids)


def test_pointers_are_no_tokens(tmp_path):
    for name in ("train.bin", "a.bin"):
        path = tmp_path / name
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abcd\nsize 5\n")
        refuses(f"{name} is a Git LFS pointer; fetch it", TokenFile, path)


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path):
    tokens = tokens_of(llm_c(tmp_path / "a.bin", IDS))
    os.truncate(tmp_path / "a.bin", 1500)
    assert tokens[0] == IDS[0]
    with pytest.raises(InputError, match=r"a\.bin was truncated while it was read"):
        tokens[200:300]


def test_the_first_id_outside_the_vocabulary_is_named(tmp_path):
    first = llm_c(tmp_path / "first.bin", IDS)
    ids = IDS.astype("<u4")
    ids[[123, 700]] = 2**32 - 1, 60_000
    tokens = tokens_of(first, llm_c(tmp_path / "second.bin", ids, LLAMA3))
    check_vocabulary(tokens.part(0, 1123), int(IDS.max()) + 1)
    assert refusal(check_vocabulary, tokens, 50257).startswith(
        f"{tmp_path / 'second.bin'}: token 123 is 4294967295, outside the vocabulary of 50,257"
    )
    refuses("token 700 is 60000", check_vocabulary, tokens.part(1124), 50257)
    refuses(r"first\.bin: token 1 is 7, outside the vocabulary of 7", check_vocabulary, tokens, 7)


def test_the_check_of_a_vocabulary_says_what_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(activity, "LARGE", 10)
    shown = []
    with activity.showing_on(lambda phrase, _: shown.append(phrase)):
        check_vocabulary(tokens_of(llm_c(tmp_path / "a.bin", IDS)), 50257)
    assert shown[0] == "Checking that all tokens are in the vocabulary"
