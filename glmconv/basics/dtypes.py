"""Element types, under the names that safetensors headers use."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """``value`` = (safetensors name, bytes an element, torch attribute name)."""

    BOOL = ("BOOL", 1, "bool")
    U8 = ("U8", 1, "uint8")
    I8 = ("I8", 1, "int8")
    F8_E4M3 = ("F8_E4M3", 1, "float8_e4m3fn")
    F8_E5M2 = ("F8_E5M2", 1, "float8_e5m2")
    F8_E8M0 = ("F8_E8M0", 1, "float8_e8m0fnu")
    I16 = ("I16", 2, "int16")
    U16 = ("U16", 2, "uint16")
    F16 = ("F16", 2, "float16")
    BF16 = ("BF16", 2, "bfloat16")
    I32 = ("I32", 4, "int32")
    U32 = ("U32", 4, "uint32")
    F32 = ("F32", 4, "float32")
    F64 = ("F64", 8, "float64")
    I64 = ("I64", 8, "int64")
    U64 = ("U64", 8, "uint64")

    def __init__(self, label: str, itemsize: int, torch_name: str) -> None:
        self.label = label
        """Name in safetensors headers (``BF16``)."""
        self.itemsize = itemsize
        """Bytes an element."""
        self.torch_name = torch_name
        """Attribute of ``torch`` (``bfloat16``)."""

    @property
    def is_plain_float(self) -> bool:
        """Whether a cast to or from it keeps its meaning (no scales beside it)."""
        return self in (DType.F16, DType.BF16, DType.F32, DType.F64)


BY_LABEL = {dtype.label: dtype for dtype in DType}
BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in DType}
