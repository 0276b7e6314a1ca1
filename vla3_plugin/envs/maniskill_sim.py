"""One ManiSkill simulation as ``ManiSkillEnv`` uses it: built with our cameras, stepped without drawing."""

from __future__ import annotations

import difflib
import functools
import types
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

import numpy as np

SCENERY = ("table-workspace", "ground")
FACES_PER_MESH = 1000
NO_VULKAN = ("physical device", "ErrorIncompatibleDriver", "ErrorInitializationFailed", "Failed to load Vulkan")
VULKAN = (
    "ManiSkill renders with Vulkan and found no usable device. Without a GPU it needs Mesa's software Vulkan 24.3 or "
    "newer; on Debian 12 from backports: apt-get install -y libvulkan1 && apt-get install -y -t bookworm-backports "
    "mesa-vulkan-drivers"
)


def _without_history(method: Callable[..., Any]) -> Callable[..., Any]:
    """In torch's inference mode: ManiSkill's small tensors cost a sixth less. What it changes in place must be changed
    there ever after, so every method that touches the simulation is."""

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.inference_mode():
            return method(*args, **kwargs)

    return inside


@dataclass(frozen=True)
class Task:
    """Defaults of a task: its instruction, control steps until truncation (ManiSkill's own is 50 for all three; the
    scripted experts of the last two were measured at ours), view of ``base_camera``."""

    instruction: str
    max_steps: int
    eye: tuple[float, float, float] = (0.45, 0.0, 0.5)
    target: tuple[float, float, float] = (0.0, 0.0, 0.1)
    fov: float = 0.7

    @property
    def view(self) -> dict[str, Any]:
        return {"eye": self.eye, "target": self.target, "fov": self.fov}


TASKS = {
    "PickCube-v1": Task("pick up the cube and move it to the goal", 50),
    "PushCube-v1": Task("push the cube forward into the goal region", 48, target=(0.06, 0.0, 0.05)),
    "StackCube-v1": Task("put the red cube on the green cube", 96, fov=1.05),
}


class Simulation:
    """``env`` is ManiSkill's ``BaseEnv`` of ``num_envs`` environments ("rows"), without gymnasium's wrappers."""

    def __init__(
        self,
        num_envs: int,
        task: str,
        robot: Optional[str],
        control_mode: str,
        cameras: Sequence[str],
        views: dict[str, dict[str, Any]],
        size: int,
        shader: str,
        reward: str,
        light: bool,
        gpu: bool,
        render_backend: str,
        privileged: bool,
        reconfigure: bool,
    ) -> None:
        gymnasium = _import_maniskill()
        if light and robot:
            _use_light_robot(robot)
        self._cameras, self._privileged, self._gpu = list(cameras), privileged, gpu
        self._light, self._reconfigure = light, reconfigure
        try:
            self.env: Any = gymnasium.make(
                task,
                num_envs=num_envs,
                **({"robot_uids": robot} if robot else {}),
                obs_mode="rgb",
                control_mode=control_mode,
                reward_mode="normalized_dense" if reward in ("dense", "progress") else "none",
                sim_backend="physx_cuda" if gpu else "physx_cpu",
                render_backend=render_backend,
                sensor_configs=_sensors(views, size, shader),
            ).unwrapped
        except gymnasium.error.UnregisteredEnv as error:
            from mani_skill.utils.registration import REGISTERED_ENVS

            near = difflib.get_close_matches(task, REGISTERED_ENVS, 5, 0.4)
            raise ValueError(f"env.task is {task!r}, not one of ManiSkill's tasks; near: {near}") from error
        except EOFError as error:  # it asked on stdin whether to download them
            raise RuntimeError(
                f"{task} needs assets that are not on this machine; fetch them with: "
                f"python -m mani_skill.utils.download_asset {task}"
            ) from error
        except NotImplementedError as error:  # a RuntimeError, too
            if "reward mode" not in str(error):
                raise
            raise ValueError(
                f"env.reward is {reward!r}; ManiSkill has no normalised dense reward for {task}; set env.reward: sparse"
            ) from error
        except RuntimeError as error:
            if any(sign in str(error) for sign in NO_VULKAN):
                raise RuntimeError(f"{VULKAN}. (ManiSkill said: {error})") from error
            raise
        known = sorted(self.env.scene.sensors)
        if unknown := [c for c in self._cameras if c not in known]:
            raise ValueError(f"env.cameras names {unknown}, {task} with robot {robot or 'of its own'} has {known}")
        # ``step`` and ``reset`` observe, and drawing is what costs: 2 ms a step without, 10 to 300 with. So drawing is
        # taken out of them and done in ``capture``, once a chunk.
        self._draw = self.env._get_obs_sensor_data
        self.env._get_obs_sensor_data = types.MethodType(lambda *_, **__: {}, self.env)
        self.env.get_sensor_params = dict
        self._trim()

    @_without_history
    def reset(self, row: int, seed: int) -> None:
        """Draw a new initial state for one row; the others stay as they are.

        ManiSkill keeps the contacts of the last physics step, so an episode after one that ended in a grasp begins with
        ``is_grasped`` true: its first observation would depend on what was played before. A step in the new state
        replaces them, and a second reset takes that step back. On a GPU a step would move the other rows too.

        PhysX itself keeps more than that: after a reset, states differ in the last digits from the first touch on.
        Only a scene built anew forgets all.
        """
        options: dict[str, Any] = {}
        if self._reconfigure:
            self.env.reset(seed=[seed % 2**32], options={"reconfigure": True})
            self._trim()
            return
        if self._gpu:
            import torch

            options["env_idx"] = torch.tensor([row], device=self.env.device)
        self.env.reset(seed=[seed % 2**32], options=options)
        if not self._gpu:
            self.env.scene.step()
            self.env.reset(seed=[seed % 2**32], options=options)

    def _trim(self) -> None:
        """Leave out of a scene just built what would be drawn for nothing."""
        import sapien

        for sensor in [s for s in self.env.scene.sensors if s not in self._cameras]:
            del self.env.scene.sensors[sensor]
        if self._light and not self._gpu and "ground" in self.env.scene.actors:
            for entity in self.env.scene.actors["ground"]._objs:
                entity.find_component_by_type(sapien.render.RenderBodyComponent).visibility = 0

    @_without_history
    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One control step of all rows, ``actions`` float32 [rows, A]: success [rows], fail [rows], reward [rows]."""
        _, reward, _, _, info = self.env.step(actions)
        nothing = np.zeros(len(actions), np.bool_)
        success, fail = (_numpy(info[n]) if n in info else nothing for n in ("success", "fail"))
        return success, fail, _numpy(reward)

    @_without_history
    def worth(self) -> np.ndarray:
        """ManiSkill's normalised dense reward of the present state without an action, float32 [rows]."""
        import torch

        info = self.env.get_info()
        still = torch.zeros(self.env.num_envs, *self.env.single_action_space.shape, device=self.env.device)
        return _numpy(self.env.get_reward(obs=self.env.get_obs(info, unflattened=True), action=still, info=info))

    @_without_history
    def capture(self, images: Optional[np.ndarray] = None) -> dict[str, Any]:
        """What ManiSkill shows now: ``state``, name to array [rows, ...], and what the cameras see, drawn into
        ``images`` uint8 [rows, cameras, H, W, 3] (None: not drawn)."""
        observed = self.env.get_obs(unflattened=True)
        state = {"qpos": _numpy(observed["agent"]["qpos"])}
        state |= {name: _numpy(value) for name, value in observed["extra"].items()}
        if self._privileged:
            things = {name: a for name, a in self.env.scene.actors.items() if name not in SCENERY}
            state |= {f"{name}_pose": _numpy(actor.pose.raw_pose) for name, actor in things.items()}
        if images is not None and self._cameras:
            import torch

            drawn = self._draw()
            for i, camera in enumerate(self._cameras):
                torch.from_numpy(images[:, i]).copy_(drawn[camera]["rgb"])
        return {"state": state, "images": images}


def cuda_found() -> bool:
    try:
        import torch

        return bool(torch.cuda.is_available())
    except ImportError:  # ManiSkill's import says what is missing
        return False


def _import_maniskill() -> Any:
    try:
        import gymnasium
        import mani_skill.envs  # noqa: F401  registers the tasks
    except ImportError as error:
        raise ImportError(f"{error}; ManiSkill is installed with: pip install 'vla3-plugin[maniskill]'") from error
    return gymnasium


def _sensors(views: dict[str, dict[str, Any]], size: int, shader: str) -> dict[str, Any]:
    import sapien
    from mani_skill.utils.sapien_utils import look_at

    sensors: dict[str, Any] = {"width": size, "height": size, "shader_pack": shader}
    for camera, view in views.items():
        pose = look_at(eye=list(view["eye"]), target=list(view["target"])).raw_pose[0].cpu().numpy()
        sensors[camera] = {"pose": sapien.Pose(pose[:3], pose[3:]), "fov": float(view["fov"])}
    return sensors


def _use_light_robot(uid: str) -> None:
    """Let ManiSkill build robot ``uid`` with light meshes. The id stays, since scenes place robots by it."""
    from mani_skill.agents.registration import REGISTERED_AGENTS

    from vla3_plugin.envs.maniskill_meshes import light_urdf

    entry = REGISTERED_AGENTS.get(uid)
    if entry is None:
        raise ValueError(f"env.robot is {uid!r}, ManiSkill has {sorted(REGISTERED_AGENTS)}")
    stock = entry.agent_cls
    if stock.urdf_path and not getattr(stock, "vla3_light", False):
        path = light_urdf(stock.urdf_path, FACES_PER_MESH)
        entry.agent_cls = type(stock.__name__, (stock,), {"urdf_path": path, "vla3_light": True})


def _numpy(value: Any) -> np.ndarray:
    return value.cpu().numpy() if hasattr(value, "cpu") else np.asarray(value)
