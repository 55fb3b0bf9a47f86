"""The transformer, layer by layer: each backward stands below its forward."""
