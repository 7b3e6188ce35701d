"""Values between processes: how what a student's process has computed leaves it.

A value becomes numbers, texts, dtypes, tensors, and tuples, lists and dictionaries of such. A
dataclass or named tuple becomes an ordered dictionary of its fields; whatever else there is, its
repr. PyTorch's `weights_only` reads them, which builds nothing else: no class, no `==` and no
__repr__ of the sender's comes with them, as they would with pickle.
"""

import dataclasses
import io
import numbers
from collections import OrderedDict

# Doesn't import torch: see lab/classroom/checks.py.


class Unreadable(ValueError):
    """Bytes that no `pack` has written."""


def pack(value):
    """The bytes of a value."""
    import torch

    file = io.BytesIO()
    torch.save(simplified(value), file)
    return file.getvalue()


def unpack(data):
    """The value; raises Unreadable."""
    import torch

    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:                          # a student's process may hand in anything
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def simplified(value):
    """The value, of types that can be read without the sender's code."""
    import torch

    if value is None or isinstance(value, (bool, torch.dtype)):
        return value
    if isinstance(value, str):
        return str(value)                               # of a class of the student's, say
    if isinstance(value, torch.Tensor):
        return torch.clone(value.detach().cpu(), memory_format=torch.contiguous_format)
    if isinstance(value, numbers.Integral):             # also NumPy's, which are no int
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, dict):
        return {simplified(key): simplified(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return OrderedDict((name, simplified(part)) for name, part in fields)
    if hasattr(value, "_asdict"):
        return OrderedDict((name, simplified(part)) for name, part in value._asdict().items())
    if isinstance(value, tuple):
        return tuple(map(simplified, value))
    if isinstance(value, (list, range)):
        return list(map(simplified, value))
    return repr(value)[:200]
