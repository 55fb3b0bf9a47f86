"""Solutions of "Export and import"."""

import json

import numpy as np


# %% Exercise 1
def write_safetensors(path, tensors):
    header, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    encoded = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(tensor.tobytes())  # row by row, also of a view such as x.T


# %% Exercise 2
def as_neighbours(rows, H):
    halves = rows.reshape(H, 2, -1, rows.shape[-1])  # head, half, i, C
    return halves.swapaxes(1, 2).reshape(rows.shape)  # head, i, half, C


# %% Exercise 3
def read_q8_0(data):
    block = np.dtype([("d", "<f2"), ("n", "i1", 32)])
    blocks = np.frombuffer(data, block)
    return blocks["d"].astype(np.float32)[:, None] * blocks["n"].astype(np.float32)
