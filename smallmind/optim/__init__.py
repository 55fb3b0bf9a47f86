"""What turns gradients into better weights."""
