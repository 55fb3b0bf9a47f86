"""Generating text: continuing, sampling, invalid settings."""

import pytest

from smallmind import GenerationConfig, Tokenizer, Training, TransformerModel, generate
from smallmind.writing.generation import Writer, generate_samples, stream
from tests.programs import refuses

TEXT = "abcdefgh" * 200


def learned(text, tokenizer, block_size=12, steps=150):
    """A model that knows this text -> it, and its tokenizer."""
    model = TransformerModel(tokenizer.vocab_size, block_size, 32, 1, 2)
    training = Training(model, tokenizer, text, batch_size=8)
    training.train(steps=steps, learning_rate=5e-3, warmup_steps=10, val_every=0)
    return model, tokenizer


@pytest.fixture(scope="module")
def trained():
    return learned(TEXT, Tokenizer(TEXT))


def test_greedy_sampling_continues_the_text_past_the_block_size(trained):
    text = generate(*trained, prompt="cde", max_tokens=40, temperature=0)
    assert text == ("abcdefgh" * 6)[2 : 2 + 43]


def test_a_prompt_may_be_longer_than_the_block_size(trained):
    prompt = "abcdefgh" * 4 + "abc"
    assert generate(*trained, prompt=prompt, max_tokens=3, temperature=0) == prompt + "def"


def test_the_same_seed_gives_the_same_text(trained):
    def text(seed):
        return generate(*trained, prompt="a", max_tokens=50, temperature=3.0, seed=seed)

    assert text(1) == text(1) != text(2)


def test_top_k_of_one_is_greedy(trained):
    text = generate(*trained, prompt="a", max_tokens=30, temperature=5.0, top_k=1)
    assert text == generate(*trained, prompt="a", max_tokens=30, temperature=0)


def test_stream_yields_text_piece_by_piece(trained):
    pieces = list(stream(*trained, "ab", GenerationConfig(max_tokens=5, temperature=0)))
    assert pieces == list("cdefg")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "abX"}, "never seen the character 'X'"),
        ({"max_tokens": -1}, "max_tokens=-1 must be at least 0"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must be finite and at least 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
    ],
)
def test_invalid_settings_are_refused(trained, settings, message):
    refuses(message, generate, *trained, **{"prompt": "a", **settings})


def test_the_default_prompt_is_the_tokenizers_opening(trained):
    assert generate(*trained, max_tokens=3, temperature=0) == "abcd"


def test_only_tokens_that_the_tokenizer_knows_are_sampled():
    text = generate(TransformerModel(50, 8, 8, 1, 1), Tokenizer("abc"), "a", max_tokens=50)
    assert set(text) <= set("abc")


def test_several_texts_are_those_of_their_seeds(trained):
    settings = {"max_tokens": 30, "temperature": 1.5}
    samples = generate_samples(*trained, "ab", n=3, seed=5, **settings)
    assert [sample.seed for sample in samples] == [5, 6, 7]
    for sample in samples:
        assert "ab" + sample.text == generate(*trained, "ab", seed=sample.seed, **settings)
        assert sample.tokens == 30 and sample.ended == "length"
    assert len({sample.text for sample in samples}) == 3
    assert generate_samples(*trained, "ab", n=2, max_tokens=0)[1].text == ""
    refuses("n=0 must be at least 1", generate_samples, *trained, "ab", n=0)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("f", "cde"),
        ("ef", "cd"),
        (("h", "fg"), "cde"),
        (("gh", "ghab", "cdX"), "cdef"),
        ("habcd", "cdefg"),
        ("cc", "cdefghabcdef"),
    ],
)
def test_a_text_ends_before_a_stop_string(trained, stop, expected):
    config = GenerationConfig(max_tokens=12, temperature=0, stop=stop)
    pieces = list(stream(*trained, "ab", config))
    assert "".join(pieces) == expected and "" not in pieces
    [sample] = generate_samples(*trained, "ab", max_tokens=12, temperature=0, stop=stop)
    assert sample.text == expected
    assert sample.ended == ("length" if stop == "cc" else "stop")


def test_a_text_ends_where_the_model_says_so():
    text = "abc<|endoftext|>" * 300
    known = learned(text, Tokenizer(text, "bpe", vocab_size=257), block_size=8)
    [sample] = generate_samples(*known, "a", max_tokens=20, temperature=0)
    assert (sample.text, sample.tokens, sample.ended) == ("bc", 3, "end")


def test_half_a_character_is_never_handed_out():
    text = "äöü" * 300
    known = learned(text, Tokenizer(text, "byte"), steps=200)
    writer = Writer(*known, "ä", GenerationConfig(max_tokens=9, temperature=0), 1)
    pieces = [piece for (piece,) in writer.pieces()]
    assert "".join(pieces).startswith("öüäö") and writer.counts == [9]
    assert all(piece in ("", "ä", "ö", "ü") for piece in pieces[:-1])
