"""Values as plain bytes: how what a student's process has computed leaves it.

Numbers, texts, tensors, dtypes, slices, and tuples, lists, dictionaries and dataclasses of such.
Whatever else there is becomes its name and its repr. To read them runs no code but this: no class,
no `==` and no __repr__ of the sender's comes with them, as they would with pickle.
"""

import dataclasses
import json
import math
import numbers
from typing import NamedTuple

# Doesn't import torch: see lab/classroom/checks.py.


class Unreadable(ValueError):
    """Bytes that no `pack` has written."""


class Other(NamedTuple):
    """A value that is none of these, by what it says of itself."""
    kind: str
    words: str

    def __repr__(self):
        return self.words


def pack(value):
    """The bytes of a value: how long its JSON is, that JSON, and the numbers of its tensors."""
    import torch

    tensors = []

    def plain(value):
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, torch.Tensor):
            x = value.detach().cpu().contiguous()
            tensors.append(x.flatten().view(torch.uint8).numpy().tobytes())
            return ["tensor", str(x.dtype).removeprefix("torch."), list(x.shape)]
        if isinstance(value, numbers.Real):             # also NumPy's, which are no int
            return int(value) if isinstance(value, numbers.Integral) else float(value)
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, slice):
            return ["slice", *map(plain, (value.start, value.stop, value.step))]
        if isinstance(value, dict):
            return ["dict", *([plain(key), plain(part)] for key, part in value.items())]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)
                     } | {"": type(value).__name__}
        elif hasattr(value, "_asdict"):
            value = value._asdict() | {"": type(value).__name__}
        elif isinstance(value, (tuple, list, range)):
            return ["tuple" if isinstance(value, tuple) else "list", *map(plain, value)]
        else:
            return ["other", type(value).__name__, repr(value)[:200]]
        return ["record", value.pop(""), *([name, plain(part)] for name, part in value.items())]

    text = json.dumps(plain(value)).encode()
    return b"".join([len(text).to_bytes(8, "big"), text, *tensors])


def unpack(data):
    """The value; raises Unreadable."""
    try:
        return read(memoryview(data))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
            RuntimeError) as error:                     # the last: also of what is nested too deep
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def read(data):
    import torch

    length = int.from_bytes(data[:8], "big")
    plain, left = json.loads(bytes(data[8 : 8 + length])), data[8 + length :]

    def dtype(name):
        found = getattr(torch, name)
        if not isinstance(found, torch.dtype):
            raise TypeError(f"torch.{name} is no dtype")
        return found

    def tensor(name, shape):
        nonlocal left
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"a tensor of shape {shape}")
        size = math.prod(shape) * dtype(name).itemsize
        mine, left = bytearray(left[:size]), left[size:]
        if len(mine) != size:
            raise ValueError(f"{len(mine)} bytes of a tensor of {size}")
        if not mine:
            return torch.empty(shape, dtype=dtype(name))
        return torch.frombuffer(mine, dtype=dtype(name)).view(shape)

    def value(plain):
        if not isinstance(plain, list):
            return plain
        kind, *parts = plain
        if kind in ("tuple", "list"):
            return (tuple if kind == "tuple" else list)(map(value, parts))
        if kind == "dict":
            return {value(key): value(part) for key, part in parts}
        if kind == "record":
            name, *fields = parts
            names, found = tuple(field for field, _ in fields), [value(part) for _, part in fields]
            return type(name, (tuple,), {"_fields": names})(found)
        return {"tensor": tensor, "dtype": dtype, "slice": slice, "other": Other}[kind](*parts)

    return value(plain)
