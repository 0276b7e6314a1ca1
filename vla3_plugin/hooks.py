"""How the plugin reaches into verl without a fork: import hooks, and version-guarded patches.

A hook costs nothing until the module it waits for is imported, which keeps ``import verl`` fast.
"""

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from vla3_plugin.resources import resource_dir


class _Serve(importlib.abc.MetaPathFinder):
    """Serve ``name`` from another module's file. Appended last, so a verl that ships ``name`` itself wins."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        source = importlib.util.find_spec(self.source)
        return source and importlib.util.spec_from_file_location(fullname, source.origin)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Call ``action(module)`` right after module ``name`` was executed."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action, self.busy = name, action, False

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name or self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.busy = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def serve_module(name: str, source: str) -> None:
    if not any(isinstance(f, _Serve) and f.name == name for f in sys.meta_path):
        sys.meta_path.append(_Serve(name, source))


def _when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


def after_import(name: str, then: str) -> None:
    """Import module ``then`` once ``name`` has been imported (at once if it already is)."""

    def load(_module: ModuleType) -> None:
        importlib.import_module(then)

    _when_imported(name, load)


@dataclass
class PatchRecord:
    """One file of ``patches/``: what it changes, why, and whether it applies to the installed verl."""

    name: str
    target: str
    versions: str
    why: str
    upstream: str
    state: str  # "waiting", "applied", "not needed: verl X"


PATCHES: dict[str, PatchRecord] = {}


def apply_patches() -> None:
    """Arm every patch of ``patches/`` whose ``VERSIONS`` contain the installed verl.

    A patch file defines TARGET (module), VERSIONS (a PEP 440 specifier), WHY, UPSTREAM and ``apply(module)``.
    """
    from packaging.specifiers import SpecifierSet

    version = importlib.metadata.version("verl")
    for path in sorted(resource_dir("patches").glob("[a-z]*.py")):
        if path.stem in PATCHES:
            continue
        name = f"vla3_plugin.patches.{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # patched-in functions must be picklable by reference
        spec.loader.exec_module(module)
        record = PatchRecord(path.stem, module.TARGET, module.VERSIONS, module.WHY, module.UPSTREAM, "waiting")
        PATCHES[path.stem] = record
        if SpecifierSet(module.VERSIONS).contains(version, prereleases=True):
            _when_imported(module.TARGET, _applier(module, record))
        else:
            record.state = f"not needed: verl {version}"


def _applier(patch: ModuleType, record: PatchRecord) -> Callable[[ModuleType], None]:
    def apply(target: ModuleType) -> None:
        patch.apply(target)
        record.state = "applied"

    return apply
