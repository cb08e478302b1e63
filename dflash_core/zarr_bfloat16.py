"""bfloat16 and float8_e4m3fn as data types of zarr-python, backed by ml_dtypes.

zarr finds them through entry points, so installing this project is enough to open a store of ours. Names and
bytes are those of tensorstore's own types.

zarr 3.1, the last for Python 3.11, lists the entry points of data types and never loads them. The one for
buffers, which it loads when a group is read, imports this module there: `zarr.open_group(...)["hidden"]`
works, while `zarr.open_array` and `zarr.create_array(dtype="bfloat16")` need `import dflash_core.zarr_bfloat16`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.core.buffer.cpu import Buffer
from zarr.core.dtype import ZDType, data_type_registry
from zarr.core.dtype.common import DataTypeValidationError, HasEndianness, HasItemSize

__all__ = ["BFloat16", "Buffer", "Float8E4M3"]


class _Float(ZDType[Any, Any]):
    """What the types share; Zarr v2 is not supported."""

    _native: ClassVar[np.dtype]

    @property
    def item_size(self) -> int:
        return self._native.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> Any:
        return self._native

    @classmethod
    def _check_json_v2(cls, data: Any) -> Any:
        return False

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"{cls._zarr_v3_name} needs Zarr v3")

    @classmethod
    def _check_json_v3(cls, data: Any) -> Any:
        return data == cls._zarr_v3_name

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if not cls._check_json_v3(data):
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")
        return cls()

    def to_json(self, zarr_format: int) -> Any:
        if zarr_format == 2:
            raise ValueError(f"{self._zarr_v3_name} needs Zarr v3")
        return self._zarr_v3_name

    def _check_scalar(self, data: Any) -> Any:
        return isinstance(data, (int, float, self._native.type, np.floating, np.integer))

    def cast_scalar(self, data: Any) -> Any:
        return self._native.type(data)

    def default_scalar(self) -> Any:
        return self._native.type(0)

    def to_json_scalar(self, data: Any, *, zarr_format: int) -> float | str:
        """Zarr v3 writes what JSON cannot as the words NaN, Infinity and -Infinity."""
        value = float(data)
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        if isinstance(data, str) and data.startswith("0x"):  # the exact bits, big end first
            return np.array(int(data, 16), f"u{self.item_size}").view(self._native)[()]
        return self._native.type(float(data))


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Float, HasEndianness, HasItemSize):
    """The Zarr v3 data type `bfloat16`.

    `HasEndianness` matters: without it the `bytes` codec is written without its endianness, which
    tensorstore refuses.
    """

    _zarr_v3_name = "bfloat16"
    _native = np.dtype(ml_dtypes.bfloat16)
    dtype_cls = type(_native)


@dataclass(frozen=True, kw_only=True)
class Float8E4M3(_Float, HasItemSize):
    """The Zarr v3 data type `float8_e4m3fn`: one byte, so there is no order of bytes."""

    _zarr_v3_name = "float8_e4m3fn"
    _native = np.dtype(ml_dtypes.float8_e4m3fn)
    dtype_cls = type(_native)


for _type in (BFloat16, Float8E4M3):
    data_type_registry.register(_type._zarr_v3_name, _type)
