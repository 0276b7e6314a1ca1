"""The device that a simulator draws on, said to its process through its environment.

Three numberings meet here. CUDA counts the devices of ``CUDA_VISIBLE_DEVICES`` from 0. EGL counts every device of the
machine, in an order of its own, software devices among them, and ignores that variable; only ``EGL_CUDA_DEVICE_NV``
ties the two, and it speaks of visible devices by their CUDA number. Vulkan counts as EGL does, but SAPIEN asks it for a
CUDA device. So a simulator sees one CUDA device, and is told the EGL index of that one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

ASSIGNED = "VLA3_RENDERING"  # in an env worker that was placed: cuda, none; absent where nobody chose a device
_MUJOCO_DEVICES = 10  # mujoco's and robosuite's lists of EGL devices end there
_EGL_VARIABLES = ("MUJOCO_EGL_DEVICE_ID", "EGL_DEVICE_ID")  # the second is for pyrender and its kin
_EGL_CUDA_DEVICE_NV, _EGL_EXTENSIONS = 0x323A, 0x3055
_MOST = 64


class RenderingError(RuntimeError):
    """The device that was chosen for a simulator cannot draw for it."""


@dataclass(frozen=True)
class EglDevice:
    cuda: int | None  # number among the visible CUDA devices
    software: bool


def child_environment(
    environ: Mapping[str, str], draws_with_egl: bool, devices: Sequence[EglDevice] | None = None
) -> dict[str, str]:
    """Variables for the simulators of an env worker whose own environment is ``environ``; none where nobody chose.

    Args:
        draws_with_egl: the simulator is known to draw with MuJoCo: a device that EGL cannot give it is an error.
        devices: EGL's, in its order; by default asked of the library.

    Raises:
        RenderingError: with the device and what to change.
    """
    assigned = environ.get(ASSIGNED)
    if assigned is None:
        return {}
    devices = egl_devices() if devices is None else devices
    if assigned == "none":
        # An empty list hides every GPU from CUDA; EGL would still take the first device it finds.
        software = [i for i, device in enumerate(devices) if device.software]
        return {"CUDA_VISIBLE_DEVICES": "", **_egl(software[0] if len(devices) > 1 and software else None)}
    visible = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if len(visible) != 1:
        raise RenderingError(
            f"CUDA_VISIBLE_DEVICES is {environ.get('CUDA_VISIBLE_DEVICES')!r} in an env worker that was placed on a "
            "GPU, expected one device; do not set RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
        )
    index = next((i for i, device in enumerate(devices) if device.cuda == 0), None)
    if draws_with_egl and devices and (index is None or index >= _MUJOCO_DEVICES):
        found = "no EGL device draws on it" if index is None else f"it is EGL's device {index}"
        why = "" if index is None else f", and MuJoCo knows the first {_MUJOCO_DEVICES}"
        raise RenderingError(
            f"the simulator was placed on CUDA device {visible[0]}, but {found}{why}; place env on another, or on "
            "node_group: node with vla3.env.options.render_backend=osmesa (MIG slices cannot draw)"
        )
    return {"CUDA_VISIBLE_DEVICES": visible[0], **_egl(index)}


def _egl(index: int | None) -> dict[str, str]:
    return {} if index is None else dict.fromkeys(_EGL_VARIABLES, str(index))


@cache
def egl_devices() -> tuple[EglDevice, ...]:
    """EGL's devices in its order, asked of the library itself: importing PyOpenGL would fix the platform for good.

    Empty where there is no EGL, or where it cannot tell its devices apart.
    """
    try:
        egl = ctypes.CDLL("libEGL.so.1")
        egl.eglGetProcAddress.argtypes, egl.eglGetProcAddress.restype = [ctypes.c_char_p], ctypes.c_void_p
    except (OSError, AttributeError):
        return ()
    names = (b"eglQueryDevicesEXT", b"eglQueryDeviceAttribEXT", b"eglQueryDeviceStringEXT")
    addresses = [egl.eglGetProcAddress(name) for name in names]
    if not all(addresses):
        return ()
    handles, count = (ctypes.c_void_p * _MOST)(), ctypes.c_int(0)
    counter, size, pointer = ctypes.POINTER(ctypes.c_int), ctypes.c_ssize_t, ctypes.c_void_p
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.POINTER(pointer), counter)(addresses[0])
    attribute = ctypes.CFUNCTYPE(ctypes.c_uint, pointer, ctypes.c_int, ctypes.POINTER(size))(addresses[1])
    text = ctypes.CFUNCTYPE(ctypes.c_char_p, pointer, ctypes.c_int)(addresses[2])
    if not query(_MOST, handles, ctypes.byref(count)):
        return ()
    found = []
    for handle in handles[: count.value]:
        number = size(-1)
        known = attribute(handle, _EGL_CUDA_DEVICE_NV, ctypes.byref(number)) and number.value >= 0
        extensions = (text(handle, _EGL_EXTENSIONS) or b"").split()
        found.append(EglDevice(int(number.value) if known else None, b"EGL_MESA_device_software" in extensions))
    return tuple(found)
