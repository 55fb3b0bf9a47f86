"""Against PEFT itself, where it is installed: its adapters here, and ours there."""

import numpy as np
import pytest

import smallmind
from smallmind import TransformerModel
from smallmind.exchange.format import export_adapter
from smallmind.exchange.peft import PeftDirectory
from smallmind.optim.adamw import AdamW
from tests.exchange.adapters import adapted, saved
from tests.exchange.models import MODELS, ids_for, model_of, tokenizer_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
TARGETS = {
    "GPT-2": ["attn.c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "GPT-NeoX": ["query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h"],
}
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS, RATE = 20, 2e-4  # Adam divides a gradient by itself: roundings count by the rate


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()


def base_of(tmp_path, name, tied):
    """A model, and the same one of transformers."""
    tokenizer = tokenizer_of("char")
    model = model_of(name, tokenizer, tied)
    smallmind.export(model, tokenizer, tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    return model, theirs


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(torch.tensor(ids.astype(np.int64))).logits.float().numpy()


@pytest.mark.parametrize("on", [("attention", "mlp"), ("attention",), ("mlp", "head")], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_peft_runs_our_adapters(tmp_path, recwarn, name, on):
    base, theirs = base_of(tmp_path, name, tied=False)
    model = adapted(base, on)
    export_adapter(saved(model), tmp_path / "adapter")
    found = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    ids = ids_for(model)
    np.testing.assert_allclose(logits_of(found, ids), model.forward(ids), rtol=0, atol=2e-4)
    assert [str(w.message) for w in recwarn if "adapter" in str(w.message)] == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_peft_learns_the_same(tmp_path, name, tied):
    """Loss and gradients of A and B in 20 steps of AdamW, and the adapter that it saves."""
    base, theirs = base_of(tmp_path, name, tied)
    torch.manual_seed(1)
    targets = TARGETS.get(name.split(" with")[0], LLAMA_TARGETS)
    settings = peft.LoraConfig(
        r=3, lora_alpha=5.0, target_modules=targets, task_type="CAUSAL_LM",
        fan_in_fan_out=name.startswith("GPT-2"),
    )  # fmt: skip
    theirs = peft.get_peft_model(theirs, settings).train()
    theirs.save_pretrained(tmp_path / "adapter")
    start = PeftDirectory(tmp_path / "adapter").read(base.config)
    model = TransformerModel(base.config, backend="numba", adapter=start.adapter)
    model.flat.write(base.parameters)
    model.flat.write(start.tensors)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.1)
    ours = AdamW(model, RATE, (0.9, 0.999), weight_decay=0.1)
    ids = ids_for(model)
    inputs, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = theirs(torch.tensor(inputs.astype(np.int64))).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), torch.tensor(targets.astype(np.int64)).reshape(-1)
        )
        loss.backward()
        optimizer.step()
        model.zero_gradients()
        found = model.loss_and_gradients(inputs, targets)
        assert float(found) == pytest.approx(loss.item(), abs=2e-5)
        ours.step()
    theirs.save_pretrained(tmp_path / "after")
    after = PeftDirectory(tmp_path / "after").read(base.config)
    for name, values in after.tensors.items():
        np.testing.assert_allclose(model.parameters[name], values, rtol=0, atol=1e-5)
