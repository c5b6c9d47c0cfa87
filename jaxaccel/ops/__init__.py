"""Operations that any network can use."""

from jaxaccel.ops._maxk import SparseRows, maxk, maxk_rows

__all__ = ("SparseRows", "maxk", "maxk_rows")
