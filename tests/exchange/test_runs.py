"""Runs and the command line: out of a run, into a run, and on from there."""

import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import InputError, Run, Tokenizer
from smallmind.files import durable
from tests.exchange.full import Full
from tests.exchange.models import TEXT, model_of, tokenizer_of
from tests.programs import edited, finished, refuses
from tests.runs.small import FIELDS
from tests.text import published

LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "qk_norm": True}
LLAMA["n_kv_head"] = 1
TUNED = {name: x for name, x in FIELDS.items() if not name.startswith(("n_", "block"))}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A finished run, and its model in both formats."""
    root = tmp_path_factory.mktemp("root")
    run = Run.create(text=TEXT, out=root / "run", **{**FIELDS, **LLAMA, "tokenizer": "bpe"})
    run.train()
    run.export(root / "hf")
    run.export(root / "model.gguf", "gguf")
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    return root


def weights(path):
    return smallmind.load(path, "numpy")[0].flat.data


@pytest.mark.parametrize("source", ["hf", "model.gguf"])
def test_an_imported_model_is_a_run_with_the_same_weights(root, tmp_path, source, cli):
    path = tmp_path / "imported"
    printed = cli("import", root / source, "--out", path).out
    assert "Qwen3" in printed and f"--init-from {path}" in printed.replace("\\\n", "")
    np.testing.assert_array_equal(weights(path), weights(root / "run"))
    run = Run.open(path)
    assert repr(run) == f"<Run {path}: imported from {source}>" and run.is_finished
    assert run.load(backend="numpy")[1].state() == run.directory.load_tokenizer().state()
    assert 0 < run.evaluate(root / "text.txt").loss < 6


@pytest.mark.parametrize("type", ["f32", "bf16", "q8_0", "q4_0"])
def test_a_file_that_is_imported_stays_as_it_is(root, tmp_path, type, cli):
    file, path = tmp_path / f"{type}.gguf", tmp_path / "imported"
    Run.open(root / "run").export(file, "gguf", type)
    content, expected = file.read_bytes(), weights(file)
    run = Run.import_model(file, path)
    file.unlink()
    assert (path / "model.gguf").read_bytes() == content and run.is_finished
    assert not list(path.glob("*.safetensors"))
    np.testing.assert_array_equal(weights(path), expected)
    assert "imported" in cli("runs", tmp_path).out
    assert "cat" in cli("generate", path, "--prompt cat --max-tokens 3 --precision q8_0").out
    student = Run.create(text=TEXT, out=tmp_path / "b", **{**FIELDS, **LLAMA, **taught_by(path)})
    assert student.train(progress=False)


def taught_by(path):
    return {"teacher": str(path), "tokenizer": "bpe"}


def test_a_file_has_a_shorter_context_in_its_run(root, tmp_path):
    run = Run.import_model(root / "model.gguf", tmp_path / "short", block_size=5)
    assert run.load(backend="numpy")[0].config.block_size == 5
    assert smallmind.load(root / "model.gguf", "numpy")[0].config.block_size == 8


def test_a_damaged_file_is_not_imported(root, tmp_path):
    content = bytearray((root / "model.gguf").read_bytes())
    content[-4:] = np.float32("nan").tobytes()
    (tmp_path / "nan.gguf").write_bytes(content)
    refuses("finite", Run.import_model, tmp_path / "nan.gguf", tmp_path / "run")
    run = Run.import_model(root / "model.gguf", tmp_path / "run")
    (run.path / "model.gguf").write_text("no model")
    refuses("model.gguf: it was changed, or belongs to another run; restore it", run.load)
    with edited(run.path / "config.json") as config:
        del config["sha256"]  # as in earlier versions
    refuses("is not a valid GGUF file", run.load)


def test_commands_take_models_of_other_programs_as_they_are(root, cli):
    paths = root / "run", root / "hf", root / "model.gguf"
    assert len({cli("generate", path, "--max-tokens 9 --prompt The").out for path in paths}) == 1
    assert "the Qwen3 in" in cli("evaluate", root / "hf", root / "text.txt").out
    assert "name the text to evaluate" in cli("evaluate", root / "hf", ends=2).err


@pytest.mark.parametrize("source", ["hf", "model.gguf", "imported"])
def test_training_goes_on_from_it(root, tmp_path, source):
    path = root / source
    if source == "imported":
        path = Run.import_model(root / "hf", tmp_path / "imported").path
    run = Run.create(text=TEXT, out=tmp_path / "tuned", init_from=str(path), **TUNED)
    assert run.settings.model == Run.open(root / "run").settings.model
    losses = [record.loss for record in run.train() if hasattr(record, "lr")]
    assert losses[0] < 5.6
    again = Run.create(text=TEXT, out=tmp_path / "ours", init_from=str(root / "run"), **TUNED)
    assert [record.loss for record in again.train() if hasattr(record, "lr")] == losses
    tuned = Run.open(tmp_path / "tuned")
    tuned.export(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"| started from | {path.name} |" in card and "| length | 6 steps" in card
    assert str(tmp_path) not in card


def test_characters_that_a_published_tokenizer_lacks_are_named(tmp_path):
    tokenizer = Tokenizer.from_json(published.file_of("SmolLM"))
    smallmind.export(model_of("Llama", tokenizer), tokenizer, tmp_path / "hf")
    fields = {"init_from": str(tmp_path / "hf"), "batch_size": 2, "block_size": 8, "steps": 1}
    reason = r"the text has 1 character that .*hf does not know: '\\U000f0000'; train the base"
    refuses(reason, Run.create, text=published.TEXT + "\U000f0000", out=tmp_path / "run", **fields)
    assert Run.create(text=published.TEXT, out=tmp_path / "run", **fields)


@pytest.mark.parametrize("name", published.PUBLISHED)
def test_texts_are_prepared_with_published_tokenizers(tmp_path, name, cli):
    (tmp_path / "tokenizer.json").write_text(json.dumps(published.file_of(name)))
    (tmp_path / "text.txt").write_text(published.TEXT, encoding="utf-8")
    flags = "--tokenizer", tmp_path / "tokenizer.json", "--out", tmp_path / "data"
    cli("prepare", tmp_path / "text.txt", *flags)
    run = Run.create(text=str(tmp_path / "data"), out=tmp_path / "run", **FIELDS)
    tokenizer = Tokenizer.from_json(published.file_of(name))
    assert run.training.tokenizer.state() == tokenizer.state()
    assert Run.open(run.path).settings.run.bpe_split == tokenizer.split


def test_a_context_can_be_shorter_where_positions_are_rotations(root, tmp_path):
    run = Run.import_model(root / "hf", tmp_path / "short", block_size=4)
    assert run.settings.model.block_size == run.load(backend="numpy")[0].config.block_size == 4
    fields = {name: x for name, x in FIELDS.items() if not name.startswith("n_")}
    fields |= {"block_size": 6, "init_from": str(root / "hf")}
    assert Run.create(text=TEXT, out=tmp_path / "a", **fields).settings.model.block_size == 6
    fields["block_size"] = 16
    refuses("block_size=16 contradicts", Run.create, text=TEXT, out=tmp_path / "b", **fields)
    for size, reason in ((9, "must be at most 8"), (0, "at least 1"), (True, "must be a number")):
        refuses(reason, Run.import_model, root / "hf", tmp_path / "c", block_size=size)
    tokenizer = tokenizer_of("char")
    smallmind.export(model_of("GPT-2", tokenizer), tokenizer, tmp_path / "gpt2")
    with pytest.raises(InputError, match="has 64 learned positions"):
        Run.import_model(tmp_path / "gpt2", tmp_path / "c", block_size=8)
    assert not (tmp_path / "c").exists()


def test_norms_keep_the_epsilon_of_the_file(root, tmp_path):
    path = Path(shutil.copytree(root / "hf", tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    assert Run.import_model(path, tmp_path / "run").settings.model.norm_epsilon == 1e-6
    np.testing.assert_array_equal(weights(tmp_path / "run"), weights(root / "run"))
    run = Run.create(text=TEXT, out=tmp_path / "tuned", init_from=str(path), **TUNED)
    assert run.settings.model.norm_epsilon == 1e-6


def test_an_imported_run_has_no_text(root, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Run.import_model(root / "hf").path
    assert path.parent.name == "runs" and path.name.endswith("-hf")
    for command in ("evaluate", "train --resume"):
        cli.refuses("was imported and has no text of its own: give one", command, path)
    cli.refuses("no unfinished run", "train --resume auto")
    refuses("was imported and has no text", Run.open(path).train)


def test_an_imported_run_goes_out_again(root, tmp_path):
    run = Run.import_model(root / "hf", tmp_path / "imported")
    run.export(tmp_path / "again.gguf", "gguf")
    np.testing.assert_array_equal(weights(tmp_path / "again.gguf"), weights(root / "run"))
    run.export(tmp_path / "again")
    assert "| imported from | hf |" in (tmp_path / "again" / "README.md").read_text("utf-8")


def test_a_model_goes_from_one_format_to_the_other(root, tmp_path, cli):
    file = tmp_path / "model.gguf"
    assert "as Qwen3 to" in cli("export", root / "hf", "--to gguf", file, "--type f16").flat
    wanted = weights(root / "run").astype(np.float16)
    matrix = smallmind.load(file, "numpy")[0].parameters["blocks.0.mlp.expansion.weight"]
    assert np.isin(matrix.ravel(), wanted.astype(np.float32)).all()


@pytest.mark.parametrize(("type", "name"), [("q4_k", "q4_K"), ("Q4_K_M", "q4_K"), ("q6_K", "q6_K")])
def test_types_with_blocks_of_256_are_not_written(root, tmp_path, cli, type, name):
    message = (
        f"type='{type}' must be one of f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 with 'gguf'; "
        f"{name} can only be read, as rows of small models are rarely multiples of 256"
    )
    cli.refuses(message, "export", root / "hf", "--to gguf", tmp_path / "x.gguf", "--type", type)
    refuses("IQ4_NL.*; iq4_nl can only be", Run.open(root / "run").export, tmp_path / "x.gguf",
            "gguf", "IQ4_NL")  # fmt: skip
    refuses("'q4' must be one of f32, f16, bf16 with 'hf'$", Run.open(root / "run").export,
            tmp_path / "x", "hf", "q4")  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_can_be_exported(root, tmp_path, cli):
    printed = cli("export", root / "run", "--to hf", tmp_path / "three", "--checkpoint 3").flat
    assert "the checkpoint, step 3, of" in printed
    wanted = smallmind.load(root / "run", "numpy", checkpoint=3)[0].flat.data
    np.testing.assert_array_equal(weights(tmp_path / "three"), wanted)
    found = json.loads((tmp_path / "three" / "config.json").read_text())
    assert found["eos_token_id"] == smallmind.load(root / "run")[1].special["<|endoftext|>"]


def test_what_cannot_be_exported_is_refused_at_once(root, cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for words, reason in [
        ("--to onnx x", "format 'onnx' must be one of hf, gguf"),
        (f"--to hf {root}/run", "is not an empty directory; choose another"),
        ("--to gguf x.bin", "x.bin must end in .gguf"),
        ("--to hf x --type q8_0", "type='q8_0' must be one of f32, f16, bf16 with 'hf'"),
        ("--to hf x --checkpoint 7", "has no checkpoint 7"),
    ]:
        cli.refuses(reason, "export", root / "run", words)
    refuses("type='q4' must be one of", Run.open(root / "run").export, "x", type="q4")
    assert not list(tmp_path.iterdir())


def test_a_run_of_no_published_architecture_hears_the_setting(tmp_path, cli):
    fields = {**FIELDS, **LLAMA, "x0_scalars": True}
    Run.create(text=TEXT, out=tmp_path / "run", **fields).train()
    error = cli("export", tmp_path / "run", "--to hf", tmp_path / "x", ends=2).err
    assert "no published architecture has x0_scalars=True" in error
    assert error.endswith("train with x0_scalars=False\n") and not (tmp_path / "x").exists()


def test_what_is_no_model_of_others_is_refused(root, tmp_path, cli):
    neither = "is neither a Hugging Face model folder"
    missing = "missing not found; give a Hugging Face model folder or a .gguf file"
    for source, reason in (("missing", missing), ("text.txt", neither), ("run", neither)):
        cli.refuses(reason, "import", root / source, "--out", tmp_path / "x")
        assert not (tmp_path / "x").exists()


def test_a_directory_in_use_is_not_imported_to(root):
    def contents(path):
        return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}

    for out in ("run", "hf"):
        before = contents(root / out)
        refuses("already holds a run", Run.import_model, root / "hf", root / out)
        assert contents(root / out) == before
    assert Run.open(root / "run").is_finished


def test_a_published_model_that_is_not_there_says_how_it_is_fetched(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, (owner, short) in (("A/b-1B", ("A", "b-1B")), ("b-1B", ("OWNER", "NAME"))):
        fetch = f"hf download {owner}/{short} --local-dir {short} and smallmind import {short}"
        cli.refuses(f"pip install huggingface_hub, then {fetch}", "import", name)


def test_an_export_to_a_full_disk_says_what_to_do(root, tmp_path, cli, monkeypatch):
    for to, place in (("hf", "out"), ("gguf", "a.gguf"), ("html", "a.html")):
        monkeypatch.setattr(durable, "files", Full(3000))
        error = cli("export", root / "run", "--to", to, tmp_path / place, ends=1).err
        assert error.startswith(f"smallmind: {tmp_path / place}") and error.count("\n") == 1
        assert "No space left on device; make room, or write to another disk" in error
        assert "Errno" not in error and not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="the system has no such limit")
def test_an_export_beyond_the_limit_of_files_says_so(root, tmp_path):
    program = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); "
    program += "import sys; from smallmind.cli import main; sys.exit(main())"
    out = tmp_path / "a.gguf"
    words = [sys.executable, "-c", program, "export", str(root / "run"), "--to", "gguf", str(out)]
    result = finished(words, PYTHONDONTWRITEBYTECODE="1")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"smallmind: {out}: File too large; the disk or `ulimit -f`")
    assert not list(tmp_path.iterdir())
