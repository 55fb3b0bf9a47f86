"""Runs with --mask-documents: which token begins a document, and where that is kept."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from smallmind import Run, Tokenizer, TransformerModel
from smallmind.files import safetensors
from smallmind.losses.distillation import model_digest
from smallmind.settings.sources import read_settings
from smallmind.text.bpe_tokenizer import BPETokenizer
from tests.programs import refusal, refuses
from tests.runs.small import FIELDS, TEXT, create, left

DOCUMENTS = ["the cat sat.", "a dog saw the cat on the mat.", "no cat. the dog ate the hat."] * 30
FLAGS = "--n-layer 1 --n-embd 8 --n-head 2 --block-size 16 --steps 6"
BPE = "--tokenizer bpe --vocab-size 270 --save-every 3 --warmup-steps 0"


def token_of(run):
    """The token that begins a document, as the settings and as the saved model have it."""
    config = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    assert config["model"]["document_token"] == run.settings.model.document_token
    assert config["run"]["mask_documents"] == run.settings.run.mask_documents
    return run.settings.model.document_token


def weights(run):
    return run.load(backend="numpy")[0].flat.data


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    run = create(tmp_path_factory.mktemp("masked") / "run", mask_documents=True, sampling="random")
    run.train()
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = create(tmp_path_factory.mktemp("whole") / "run", sampling="random")
    run.train()
    return run


@pytest.fixture
def texts(tmp_path):
    """A file of documents."""
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("arch", ["gpt2", "llama", "modern"])
def test_the_command_line_trains_saves_and_resumes_bit_for_bit(texts, tmp_path, cli, arch):
    flags = FLAGS, BPE, "--dropout 0.1 --mask-documents --arch", arch
    printed = cli("train", texts, *flags, "--out", tmp_path / "unbroken").flat
    assert "documents masked" in printed
    unbroken = Run.open(tmp_path / "unbroken")
    _, tokenizer = unbroken.load(backend="numpy")
    assert token_of(unbroken) == tokenizer.special["<|endoftext|>"] == tokenizer.vocab_size - 1
    assert unbroken.load(backend="numpy")[0].config == unbroken.settings.model

    broken = left(Run.create(unbroken.settings, out=tmp_path / "broken"), step=4)
    cli("train --resume", broken.path, "--threads 1")
    np.testing.assert_array_equal(weights(Run.open(broken.path)), weights(unbroken))
    cli("verify", broken.path)
    cli("evaluate", broken.path)
    cli("generate", broken.path, "--max-tokens 5")


def test_the_checks_and_the_estimate_take_the_flag(texts, cli):
    printed = cli("check", texts, FLAGS, BPE, "--steps 100 --mask-documents").out
    assert "All 6 checks passed" in printed
    cli("estimate", texts, FLAGS, BPE, "--mask-documents")
    cli("estimate", FLAGS, "--vocab-size 70 --mask-documents")


SMALL = {"n_layer": 1, "n_embd": 8, "n_head": 2, "block_size": 16, "steps": 2}
LEARNED = {"tokenizer": "bpe", "bpe_vocab_size": 270}


@pytest.mark.parametrize(
    ("fields", "is_masked"),
    [
        (LEARNED, True),
        (LEARNED | {"mask_documents": False}, False),
        (LEARNED | {"recipe": "gpt2"}, False),
        (LEARNED | {"text_separator": "\f"}, False),
        ({"tokenizer": "char"}, False),
        ({"tokenizer": "byte"}, False),
    ],
    ids=str,
)
def test_the_recipe_masks_documents_where_a_learned_token_ends_them(
    texts, tmp_path, fields, is_masked
):
    run = Run.create(text=texts, out=tmp_path / "run", **SMALL, **fields)
    assert (token_of(run) is not None) == run.settings.run.mask_documents == is_masked


def test_a_text_of_one_document_is_not_masked(tmp_path):
    (tmp_path / "book.txt").write_text(" ".join(DOCUMENTS), encoding="utf-8")
    run = Run.create(text=str(tmp_path / "book.txt"), out=tmp_path / "run", **SMALL, **LEARNED)
    assert token_of(run) is None


def test_masked_documents_are_learned_otherwise(masked, whole):
    assert token_of(masked) == 0 and masked.load()[1].decode([0]) == "\n"
    assert token_of(whole) is None
    assert (weights(masked) != weights(whole)).any()


def test_a_line_break_begins_a_document_of_bytes(tmp_path):
    assert token_of(create(tmp_path / "run", mask_documents=True, tokenizer="byte")) == 10


def test_a_text_without_line_breaks_is_refused(tmp_path):
    fields = {**FIELDS, "text": "the cat sat. " * 90, "mask_documents": True}
    message = refusal(Run.create, out=tmp_path / "run", **fields)
    assert "mask_documents=True needs a token between documents" in message
    assert "choose --tokenizer bpe" in message
    assert not (tmp_path / "run").exists()
    # The advice works.
    fields |= {"tokenizer": "bpe", "bpe_vocab_size": 260}
    assert token_of(Run.create(out=tmp_path / "run", **fields)) is not None


def test_the_token_of_each_tokenizer():
    assert Tokenizer("a\nb").separator_token == 0
    assert Tokenizer("ab").separator_token is None
    assert Tokenizer("", "byte").separator_token == 10
    bpe = Tokenizer("abab", "bpe", vocab_size=258)
    assert bpe.separator_token == 257
    other = BPETokenizer.from_state({**bpe.state(), "special": {}})
    assert other.separator == "\n" and other.separator_token is None


def test_a_run_from_the_weights_of_another_masks_documents_as_that_one_did(masked, whole, tmp_path):
    fields = {"text": TEXT + "\nthe dog.", "backend": "numpy", "steps": 2}
    for name, said in (("silent", {}), ("said", {"mask_documents": True})):
        tuned = Run.create(init_from=masked.path, out=tmp_path / name, **fields, **said)
        assert token_of(tuned) == 0 and tuned.settings.run.mask_documents
    fields |= {"text": TEXT, "init_from": str(whole.path)}
    assert token_of(Run.create(out=tmp_path / "whole", **fields)) is None
    message = r"mask_documents=True contradicts .*run, whose weights have mask_documents=False"
    refuses(message, Run.create, out=tmp_path / "new", mask_documents=True, **fields)


def test_the_settings_of_a_run_find_the_token_of_another_text(masked, tmp_path):
    settings = read_settings(masked.path / "config.json")
    assert settings["mask_documents"] is True and "document_token" not in settings
    del settings["text"]
    run = Run.create(text=TEXT, out=tmp_path / "run", **{**settings, "tokenizer": "byte"})
    assert token_of(run) == 10


def test_the_token_is_not_chosen(tmp_path, cli):
    file = tmp_path / "run.toml"
    file.write_text("[model]\ndocument_token = 4", encoding="utf-8")
    refuses("document_token=4 follows from the text; leave it out", read_settings, file)
    assert "unknown flag --document-token" in cli("train --document-token 4", ends=2).err


def test_files_without_the_setting_have_no_documents(tmp_path, whole):
    model = TransformerModel(11, 8, 8, 1, 2)
    model.save(tmp_path / "model.safetensors")
    metadata = safetensors.read_metadata(tmp_path / "model.safetensors")
    config = json.loads(metadata["config"])
    assert config.pop("document_token", 0) is None
    older = {**metadata, "config": json.dumps(config)}
    safetensors.write(tmp_path / "older.safetensors", model.parameters, older)
    assert TransformerModel.load(tmp_path / "older.safetensors").config == model.config


def test_a_teacher_without_documents_keeps_the_digest_that_it_had():
    model = TransformerModel(11, 8, 8, 1, 2)
    config = dataclasses.asdict(model.config)
    del config["document_token"], config["bigram_vocab"], config["part_settings"]
    digest = hashlib.sha256(safetensors.to_json(config).encode())
    for value in model.parameters.values():
        digest.update(np.ascontiguousarray(value).data)
    assert model_digest(model) == digest.hexdigest()
    masked = TransformerModel(11, 8, 8, 1, 2, document_token=0)
    assert model_digest(masked) != model_digest(model)
