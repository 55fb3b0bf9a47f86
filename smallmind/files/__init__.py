"""Files that survive a crash or a full disk: writing, locking, and the safetensors format."""
