"""Light meshes change what is drawn, not what collides."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vla3_plugin.envs import maniskill_meshes

found = importlib.util.find_spec("mani_skill")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(found is None, reason="ManiSkill is not installed")]


def panda() -> str:
    assert found is not None and found.submodule_search_locations
    return str(Path(found.submodule_search_locations[0]) / "assets" / "robots" / "panda" / "panda_v3.urdf")


def meshes(urdf: str, kind: str) -> list[Path]:
    links = ElementTree.parse(urdf).getroot().iter("link")
    shapes = (shape for link in links for shape in link.iter(kind))
    return [Path(urdf).parent / mesh.attrib["filename"] for shape in shapes for mesh in shape.iter("mesh")]


@pytest.fixture
def light(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("VLA3_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:  # two simulators start at once
        paths = set(pool.map(lambda _: maniskill_meshes.light_urdf(panda(), 1000), range(2)))
    assert len(paths) == 1
    return paths.pop()


def test_a_light_robot_is_drawn_with_few_triangles_and_collides_as_before(light):
    import trimesh

    assert meshes(light, "collision") == meshes(panda(), "collision")
    drawn = meshes(light, "visual")
    assert len(drawn) == len(meshes(panda(), "visual"))
    for mesh, stock in zip(drawn, meshes(panda(), "visual"), strict=True):
        now, before = trimesh.load(mesh, force="mesh"), trimesh.load(stock, force="mesh")
        assert len(now.faces) <= 2000
        assert abs(now.bounds - before.bounds).max() < 0.01  # m
    assert not [f for f in Path(light).parent.iterdir() if f.name.startswith(".")]


def test_a_second_start_finds_the_files(light, monkeypatch):
    monkeypatch.setattr(maniskill_meshes, "_light_mesh", lambda *_: pytest.fail("made again"))
    assert maniskill_meshes.light_urdf(panda(), 1000) == light
