"""``vla3 doctor``: versions, whether the plugin loaded (and if not, the error verl swallowed), patches, simulators."""

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any


def _versions() -> list[dict[str, Any]]:
    from packaging.requirements import Requirement

    rows = []
    for text in requires("vla3-plugin") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found: str | None = version(requirement.name)
        except PackageNotFoundError:
            found = None
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        rows.append({"package": requirement.name, "found": found, "expected": str(requirement.specifier), "ok": fits})
    return rows


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as plain data; ``ok`` is false where a training run could not start."""
    import verl  # noqa: F401  loads the plugin as every run does

    from vla3_plugin import hooks
    from vla3_plugin.envs.registry import env_fault, env_names

    plugin = sys.modules.get("vla3_plugin.plugin")
    error = getattr(plugin, "LOAD_ERROR", None) if plugin else "verl did not load it: VERL_USE_EXTERNAL_PLUGINS?"
    simulators = {name: env_fault(name, None) for name in env_names()}
    findings: dict[str, Any] = {
        "python": sys.version.split()[0],
        "versions": _versions(),
        "plugin_error": error,
        "patches": [vars(record) for record in hooks.PATCHES.values()],
        "simulators": simulators,
        "gpu": importlib.util.find_spec("torch") is not None and __import__("torch").cuda.is_available(),
    }
    findings["ok"] = error is None and all(row["ok"] for row in findings["versions"])
    return findings


def format_findings(findings: dict[str, Any]) -> str:
    lines = [f"python {findings['python']}, {'a' if findings['gpu'] else 'no'} CUDA device"]
    for row in findings["versions"]:
        mark = "ok " if row["ok"] else "BAD"
        lines.append(f"  {mark} {row['package']} {row['found'] or 'missing'} (expected {row['expected'] or 'any'})")
    lines.append("plugin: loaded" if findings["plugin_error"] is None else f"plugin: {findings['plugin_error']}")
    lines += [f"  patch {p['name']} on {p['target']}: {p['state']}; {p['why']}" for p in findings["patches"]]
    lines += [f"  simulator {name}: {fault or 'installed'}" for name, fault in findings["simulators"].items()]
    return "\n".join(lines)
