"""Simulators are found by name, built-in and third-party, without importing any."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from vla3_plugin.envs import registry


def test_the_built_in_simulators_are_known_without_installation(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    assert registry.env_names() == ["latency", "libero", "maniskill"]
    assert registry.env_target("maniskill") == "vla3_plugin.envs.maniskill:ManiSkillEnv"


def test_a_third_partys_entry_point_is_found(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("maze", "maze_sim:MazeEnv", group)])
    assert registry.env_names() == ["latency", "libero", "maniskill", "maze"]
    assert registry.env_target("maze") == "maze_sim:MazeEnv"


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError, match=r"vla3.env.name: 'manisk1ll'.*did you mean 'maniskill'.*libero, maniskill"):
        registry.env_target("manisk1ll")


def test_a_class_stands_for_itself():
    assert registry.env_target("my_sim:MyEnv") == "my_sim:MyEnv"


def test_a_missing_simulator_is_a_fault_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'vla3-plugin[libero]'" in registry.env_fault("libero", None)
    assert registry.env_fault("libero", "/another/python") is None  # it may be installed there
    assert "did you mean 'libero'" in registry.env_fault("liber", None)
