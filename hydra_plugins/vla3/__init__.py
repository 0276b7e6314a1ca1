"""Hydra finds this namespace package by itself; it adds the plugin's recipes and configs to every search path.

Recipes appear as the group ``recipe`` and the config groups under ``vla3/``, so that none can collide with verl's own.
"""

import os

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin

from vla3_plugin.config import VLA3Config
from vla3_plugin.profile import register_resolvers
from vla3_plugin.resources import resource_dir


class Vla3ConfigSource(FileConfigSource):
    """Serves ``recipe/X`` from ``recipes/X.yaml``, ``vla3/G/X`` from ``configs/G/X.yaml`` wherever these lie, and our
    own choice for verl's group ``model``.

    A scheme of its own, because the two directories have other names than their groups and move with the install form.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        self.path = ""  # every path below is absolute: os.path.join drops what stands before an absolute part

    @staticmethod
    def scheme() -> str:
        return "vla3"

    @staticmethod
    def _locate(config_path: str) -> str:
        head, _, rest = config_path.partition("/")
        root = {"recipe": "recipes", "vla3": "configs", "model": "configs/model"}.get(head)
        return os.path.join(resource_dir(root), rest) if root else os.path.join(resource_dir("configs"), "_", head)

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        return super().load_config(self._locate(config_path))

    def is_group(self, config_path: str) -> bool:
        return config_path == "" or super().is_group(self._locate(config_path))

    def is_config(self, config_path: str) -> bool:
        return super().is_config(self._locate(config_path))

    def list(self, config_path: str, results_filter=None):
        if config_path == "":
            return ["recipe", "vla3", "model"]
        return super().list(self._locate(config_path), results_filter)


class Vla3SearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        register_resolvers()
        ConfigStore.instance().store(group="vla3/schema", name="typed", node=VLA3Config)
        search_path.append(provider="vla3-plugin", path="vla3://")
