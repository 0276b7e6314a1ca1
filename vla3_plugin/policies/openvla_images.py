"""Pixels as the published OpenVLA code prepares them, on whatever device they lie: Pillow's bicubic resize, bit by bit,
and TensorFlow's centre crop."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_BITS = 22  # Pillow's fixed-point weights: with 8-bit pixels every sum is an integer that float64 holds exactly
_CUBIC = -0.5
_SUPPORT = 2.0


def _cubic(x: float) -> float:
    x = abs(x)
    if x < 1.0:
        return ((_CUBIC + 2.0) * x - (_CUBIC + 3.0)) * x * x + 1.0
    if x < 2.0:
        return (((x - 5.0) * x + 8.0) * x - 4.0) * _CUBIC
    return 0.0


@lru_cache(maxsize=32)
def _weights(length: int, target: int) -> Tensor:
    """Fixed-point weights float64 [target, length] of Pillow's antialiased bicubic filter along one axis."""
    scale = length / target
    stretch = max(scale, 1.0)
    matrix = torch.zeros(target, length, dtype=torch.float64)
    for i in range(target):
        centre = (i + 0.5) * scale
        low = max(int(centre - _SUPPORT * stretch + 0.5), 0)
        high = min(int(centre + _SUPPORT * stretch + 0.5), length)
        row = [_cubic((j - centre + 0.5) / stretch) for j in range(low, high)]
        total = sum(row)
        fixed = [value / total * (1 << _BITS) for value in row]
        matrix[i, low:high] = torch.tensor([math.trunc(v + math.copysign(0.5, v)) for v in fixed], dtype=torch.float64)
    return matrix


def resize_bicubic(pixels: Tensor, size: tuple[int, int], rows_first: bool = False) -> Tensor:
    """uint8 [N, H, W, 3] to uint8 [N, *size, 3], equal to ``PIL.Image.resize(..., BICUBIC)``; aspect not kept.

    Pillow rounds to 8 bits in between, so the order shows. Every version up to 12 begins with the columns, and so does
    this whatever Pillow is installed; from 13 on Pillow begins with the rows for some sizes (``pillow_13_rows_first``).
    """
    x = pixels
    for axis in (1, 2) if rows_first else (2, 1):
        length, target = x.shape[axis], size[axis - 1]
        if length != target:
            weights = _weights(length, target).to(x.device)
            x = _rounded(torch.einsum("oh,nhwc->nowc" if axis == 1 else "ow,nhwc->nhoc", weights, x.double()))
    return x


def pillow_13_rows_first(given: tuple[int, int], size: tuple[int, int]) -> bool:
    """Whether Pillow 13 resizes the rows before the columns: the height shrinks by over twice what the width does."""
    (height, width), (rows, columns) = given, size
    return height > rows and height - rows > 2 * (width - columns)


def _rounded(x: Tensor) -> Tensor:
    return torch.floor((x + (1 << (_BITS - 1))) / (1 << _BITS)).clamp(0, 255).to(torch.uint8)


def centre_crop(pixels: Tensor, side: float) -> Tensor:
    """uint8 [N, H, W, 3]: the middle ``side`` of each side, stretched back bilinearly over corner-aligned points and
    truncated to 8 bits, as ``tf.image.crop_and_resize`` and ``convert_image_dtype`` do."""
    x = _stretched(_stretched(pixels.double() / 255.0, 1, side), 2, side)
    return torch.floor(x.clamp(0.0, 1.0) * 255.5).clamp(max=255).to(torch.uint8)


def _stretched(x: Tensor, axis: int, side: float) -> Tensor:
    """Linear interpolation of ``x`` [N, H, W, 3] at as many points of the middle ``side`` along ``axis``."""
    length = x.shape[axis]
    place = torch.arange(length, dtype=torch.float64, device=x.device) / max(length - 1, 1)
    place = ((1.0 - side) / 2 + side * place) * (length - 1)
    low = place.floor().clamp(0, length - 1).long()
    high = (low + 1).clamp(max=length - 1)
    shape = [1, 1, 1, 1]
    shape[axis] = length
    share = (place - low).reshape(shape)
    return x.index_select(axis, low) * (1.0 - share) + x.index_select(axis, high) * share
