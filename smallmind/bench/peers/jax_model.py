"""The step in JAX: one jitted function from weights and a batch to new weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smallmind.bench.peers import job
from smallmind.bench.peers.job import Job, Step

Tree = dict[str, Any]


def build(work: Job) -> Step:
    sizes = work.sizes
    C, H, T = sizes.n_embd, sizes.n_head, sizes.T
    seen = jnp.tril(jnp.ones((T, T), bool))

    def norm(w: Tree, name: str, x: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(w: Tree, name: str, x: Any) -> Any:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def loss(w: Tree, ids: Any, targets: Any) -> Any:
        B = ids.shape[0]
        x = w["token_embedding.weight"][ids] + w["position_embedding.weight"]
        for i in range(sizes.n_layer):
            block = f"blocks.{i}"
            qkv = linear(w, f"{block}.attention.qkv", norm(w, f"{block}.attention_norm", x))
            q, k, v = (
                y.reshape(B, T, H, C // H).transpose(0, 2, 1, 3) for y in jnp.split(qkv, 3, -1)
            )
            scores = jnp.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(C // H), -1e9)
            heads = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
            x = x + linear(w, f"{block}.attention.projection", heads)
            hidden = linear(w, f"{block}.mlp.expansion", norm(w, f"{block}.mlp_norm", x))
            x = x + linear(w, f"{block}.mlp.projection", jax.nn.gelu(hidden))
        logits = norm(w, "final_norm", x) @ w["token_embedding.weight"].T
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        return -chosen.mean()

    beta1, beta2 = job.BETAS

    def update(w: Tree, m: Tree, v: Tree, count: Any, ids: Any, targets: Any) -> Any:
        value, g = jax.value_and_grad(loss)(w, ids, targets)
        length = jnp.sqrt(sum((x**2).sum() for x in g.values()))
        scale = jnp.minimum(1.0, job.MAX_GRAD_NORM / (length + 1e-6))
        g = {name: x * scale for name, x in g.items()}
        m = {name: beta1 * m[name] + (1 - beta1) * x for name, x in g.items()}
        v = {name: beta2 * v[name] + (1 - beta2) * x**2 for name, x in g.items()}

        def updated(name: str) -> Any:
            x = w[name]
            if x.ndim == 2:
                x = x * (1 - job.LEARNING_RATE * job.WEIGHT_DECAY)
            corrected = v[name] / (1 - beta2**count)
            direction = m[name] / (1 - beta1**count) / (jnp.sqrt(corrected) + job.EPSILON)
            return x - job.LEARNING_RATE * direction

        return {name: updated(name) for name in w}, m, v, value

    jitted = jax.jit(update, donate_argnums=(0, 1, 2))
    w = {name: jnp.asarray(value) for name, value in work.weights.items()}
    state = [w, jax.tree.map(jnp.zeros_like, w), jax.tree.map(jnp.zeros_like, w)]
    done = 0

    def step(index: int) -> float:
        nonlocal done
        done += 1
        ids, targets = work.batch(index)
        *state[:], value = jitted(*state, jnp.float32(done), ids, targets)
        return float(value)

    return step
