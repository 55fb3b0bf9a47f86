"""The transformer, layer by layer: each backward pass is written below its forward pass."""
