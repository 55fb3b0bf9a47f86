"""Generating text: continuing, sampling, invalid settings."""

import numpy as np
import pytest

from smallmind import GenerationConfig, InputError, Tokenizer, Training, TransformerModel, generate
from smallmind.generation import Writer, generate_samples, stream
from smallmind.sampling import choose

TEXT = "abcdefgh" * 200


@pytest.fixture(scope="module")
def trained():
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 12, 32, 1, 2)
    Training(model, tokenizer, TEXT, batch_size=8).train(
        steps=150, learning_rate=5e-3, warmup_steps=10, val_every=0
    )
    return model, tokenizer


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
    with pytest.raises(InputError, match=message):
        generate(*trained, **{"prompt": "a", **settings})


LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def frequencies(n=1200, **settings):
    """The shares of the tokens that n evenly spaced numbers draw: exact to 1 / n."""
    config = GenerationConfig(**{"temperature": 1.0, **settings})
    drawn = [choose(LOGITS, config, uniform=(i + 0.5) / n) for i in range(n)]
    return np.bincount(drawn, minlength=4) / n


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 1e6}, [0.25] * 4),
        ({"temperature": 1e-6}, [0, 1, 0, 0]),
        ({"temperature": 1e-310}, [0, 1, 0, 0]),
        ({"top_k": 99, "top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(settings, shares):
    np.testing.assert_allclose(frequencies(**settings), shares, atol=1e-3)


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(InputError, match="logits are not finite"):
        choose(np.array([0, np.nan], np.float32), GenerationConfig(), uniform=0.5)


def test_the_default_prompt_is_the_tokenizers_opening(trained):
    assert generate(*trained, max_tokens=3, temperature=0) == "abcd"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.45, 0.6, 0.8, 0.95])
def test_top_p_is_a_share_of_what_top_k_leaves(temperature, top_k, top_p):
    def normalised(p):
        return p / p.sum()

    # Token by token: temperature, then top_k, then top_p, each followed by normalisation.
    p = normalised(np.exp(LOGITS / np.float64(temperature)))
    most_likely = np.argsort(-p)
    p[most_likely[top_k:] if top_k else []] = 0
    p = normalised(p)
    before = np.cumsum(p[most_likely]) - p[most_likely]
    p[most_likely[before >= (top_p or 1)]] = 0
    drawn = frequencies(temperature=temperature, top_k=top_k, top_p=top_p)
    np.testing.assert_allclose(drawn, normalised(p), atol=1e-3)


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
    with pytest.raises(InputError, match="n=0 must be at least 1"):
        generate_samples(*trained, "ab", n=0)


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
    tokenizer = Tokenizer(text, "bpe", vocab_size=257)
    model = TransformerModel(tokenizer.vocab_size, 8, 32, 1, 2)
    Training(model, tokenizer, text, batch_size=8).train(
        steps=150, learning_rate=5e-3, warmup_steps=10, val_every=0
    )
    [sample] = generate_samples(model, tokenizer, "a", max_tokens=20, temperature=0)
    assert (sample.text, sample.tokens, sample.ended) == ("bc", 3, "end")


def test_half_a_character_is_never_handed_out(trained):
    text = "äöü" * 300
    tokenizer = Tokenizer(text, "byte")
    model = TransformerModel(256, 12, 32, 1, 2)
    Training(model, tokenizer, text, batch_size=8).train(
        steps=200, learning_rate=5e-3, warmup_steps=10, val_every=0
    )
    writer = Writer(model, tokenizer, "ä", GenerationConfig(max_tokens=9, temperature=0), 1)
    pieces = [piece for (piece,) in writer.pieces()]
    assert "".join(pieces).startswith("öüäö") and writer.counts == [9]
    assert all(piece in ("", "ä", "ö", "ü") for piece in pieces[:-1])
