"""Light visual meshes for ManiSkill's robots: software rendering is bound by triangles, not by pixels.

The Panda's visual meshes hold 135 000 triangles and its wrist camera another 425 000; at 64 px a few thousand look the
same. Visual meshes alone are replaced: collision shapes, masses and kinematics are those of the stock robot. Decimation
is Garland and Heckbert's quadric error metric (1997), as ``fast-simplification`` implements it.
"""

from __future__ import annotations

import hashlib
import os
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

FORMAT = 2  # raise it when the same input gives other files
MIN_FACES = 60  # a part with fewer is kept as it is
_ONE_AT_A_TIME = threading.Lock()  # ``fast-simplification`` keeps its mesh in global variables


def cache_dir() -> Path:
    """``$VLA3_CACHE``, or ``vla3`` below the user's cache directory."""
    if "VLA3_CACHE" in os.environ:
        return Path(os.environ["VLA3_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vla3"


def light_urdf(urdf: str, faces_per_mesh: int) -> str:
    """Path of a copy of ``urdf`` whose visual meshes have about ``faces_per_mesh`` triangles at most.

    Made once and cached; several processes and threads may ask at the same time.
    """
    with _ONE_AT_A_TIME:
        return _light_urdf(urdf, faces_per_mesh)


def _light_urdf(urdf: str, faces_per_mesh: int) -> str:
    source = Path(urdf).resolve()
    text = source.read_bytes()
    key = hashlib.sha256(b"%d %d %s " % (FORMAT, faces_per_mesh, os.fsencode(source)) + text).hexdigest()[:16]
    folder = cache_dir() / "maniskill" / f"{source.stem}-{key}"
    target = folder / source.name
    if target.exists():  # written last
        return str(target)
    folder.mkdir(parents=True, exist_ok=True)
    root = ElementTree.fromstring(text)
    done: dict[str, str] = {}
    for link in root.iter("link"):
        for kind in ("visual", "collision"):
            for mesh in (m for shape in link.iter(kind) for m in shape.iter("mesh")):
                name = mesh.attrib["filename"].replace("package://", "")
                if kind == "visual":
                    if name not in done:
                        done[name] = _light_mesh(source.parent / name, folder, faces_per_mesh)
                    mesh.set("filename", done[name])
                else:
                    mesh.set("filename", str(source.parent / name))
    srdf = source.with_suffix(".srdf")
    if srdf.exists():  # the loader looks for the collision pairs to ignore beside the URDF
        _write(folder / srdf.name, srdf.read_bytes())
    _write(target, ElementTree.tostring(root))
    return str(target)


def _light_mesh(source: Path, folder: Path, faces_per_mesh: int) -> str:
    """File name in ``folder``; materials are kept."""
    import trimesh

    loaded: Any = trimesh.load(source)
    parts = list(loaded.geometry.values()) if isinstance(loaded, trimesh.Scene) else [loaded]
    total = sum(len(part.faces) for part in parts)
    share = min(1.0, faces_per_mesh / total)
    for part in parts:
        if len(part.faces) * share < len(part.faces) and len(part.faces) > MIN_FACES:
            _decimate(part, max(MIN_FACES, int(len(part.faces) * share)))
    suffix = source.suffix if source.suffix in (".glb", ".stl") else ".glb"
    name = f"{source.stem}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:6]}{suffix}"
    _write(folder / name, loaded.export(file_type=suffix[1:]))
    return name


def _decimate(part: Any, faces: int) -> None:
    """Reduce a ``trimesh.Trimesh`` to about ``faces`` triangles in place; its material stays, textures do not."""
    import trimesh

    part.merge_vertices(merge_norm=True, merge_tex=True)
    points, triangles = _simplify(part.vertices, part.faces, faces)
    if len(triangles) > 2 * faces:  # many small shells (the wrist camera's inside) do not collapse; draw their outline
        hull = part.convex_hull
        points, triangles = _simplify(hull.vertices, hull.faces, faces)
    material = getattr(part.visual, "material", None)
    part.vertices, part.faces = points, triangles
    if material is not None:
        part.visual = trimesh.visual.TextureVisuals(material=material)


def _simplify(points: Any, triangles: Any, faces: int) -> tuple[Any, Any]:
    import fast_simplification

    return fast_simplification.simplify(points.astype("float32"), triangles.astype("int32"), target_count=faces)


def _write(path: Path, data: bytes) -> None:
    """Atomically: another process sees the old file, none, or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)
