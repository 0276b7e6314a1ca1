"""The doctor on the machine: devices and the profile they give, memory, shared memory, files, ports, Ray's room."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
from pathlib import Path
from typing import Any

from vla3_plugin.doctor import Finding, ProbeError, probe
from vla3_plugin.envs import wire
from vla3_plugin.placement.memory import GB, MB, available_memory, estimate
from vla3_plugin.profile import joins_a_cluster

FILES_NEEDED, FILES_WANTED = 512, 4096  # Ray and the simulators' pipes take hundreds
BLOCK = 64 * MB  # shared memory of one simulator process with several cameras at full size, rounded up
SHM_WANTED = 1 * GB  # Ray's object store goes to disk where /dev/shm is smaller
# The smallest run: a learner rank, a policy worker, one ManiSkill process, the nano policy.
_SMALLEST = dict(parameters=2_000_000, env="maniskill", env_workers=1, env_processes=1)
_SHM_FIX = "mount -o remount,size=4G /dev/shm (docker run --shm-size=4g)"


def check_devices() -> list[Finding]:
    """GPUs, the profile that a recipe would take, and a torch that cannot use the GPU that is there."""
    from vla3_plugin.profile import resolve_profile

    try:
        import torch
    except ImportError as error:
        return [Finding("devices", "bad", f"torch does not import: {error}", "pip install 'torch==2.13.0'")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    findings = [Finding("GPUs", "ok", ", ".join(names) or "none")]
    if not names and (driver := _nvidia_gpus()):
        findings = [
            Finding(
                "GPUs", "warn", f"the driver shows {driver}, torch {torch.__version__} sees none",
                "install a CUDA build of torch ('torch==2.13.0' from PyTorch's CUDA index), or unset "
                "CUDA_VISIBLE_DEVICES",
            )
        ]  # fmt: skip
    try:
        profile = resolve_profile()
        findings.append(Finding("profile", "ok", f"{profile} (vla3.profile=cpu|gpu overrides)"))
    except ValueError as error:
        findings.append(Finding("profile", "bad", str(error), "unset VLA3_PROFILE, or set it to auto, cpu or gpu"))
    return findings


def _nvidia_gpus() -> str:
    """What the driver itself lists, independent of torch."""
    folder = Path("/proc/driver/nvidia/gpus")
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    return f"{count} NVIDIA GPU(s)" if count else ""


def check_shared_memory(shm: Path = Path("/dev/shm")) -> list[Finding]:
    """Whether a block as simulators share it can be made, and whether Ray's object store fits into memory."""
    findings = []
    try:
        with wire.unnamed_file() as file:
            os.ftruncate(file.fileno(), BLOCK)
            with mmap.mmap(file.fileno(), BLOCK) as block:
                block[-1] = 1
        findings.append(Finding("shared memory", "ok", f"a block of {BLOCK // MB} MB can be shared with a simulator"))
    except (OSError, ValueError, OverflowError) as error:
        detail = f"no block of {BLOCK // MB} MB can be made: {error}; simulators hand images over through it"
        fix = f"raise the limit on file size (ulimit -f unlimited); without memfd: {_SHM_FIX}"
        findings.append(Finding("shared memory", "bad", detail, fix))
    try:
        free = shutil.disk_usage(shm).free
    except OSError as error:
        detail = f"{shm}: {error}; Ray keeps objects on disk then"
        return [*findings, Finding("/dev/shm", "bad" if not shm.exists() else "warn", detail, _SHM_FIX)]
    state, text = ("ok", "") if free >= SHM_WANTED else ("warn", "; Ray keeps objects on disk then, which is slow")
    return [*findings, Finding("/dev/shm", state, f"{free / GB:.2f} GB free{text}", _SHM_FIX if text else "")]  # type: ignore[arg-type]


def check_file_descriptors() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    text = "unlimited" if soft == infinite else f"{soft}"
    if soft == infinite or soft >= FILES_WANTED:
        return [Finding("open files", "ok", text)]
    can = hard == infinite or hard >= FILES_WANTED
    fix = f"ulimit -n {FILES_WANTED}" if can else f"raise the hard limit to {FILES_WANTED} (/etc/security/limits.conf)"
    return [Finding("open files", "bad" if soft < FILES_NEEDED else "warn", f"{text} allowed at once", fix)]


def check_memory(root: Path | str = "/") -> list[Finding]:
    """What is left of the machine, its control groups (``root`` is where /proc and /sys stand) and RLIMIT_AS."""
    needed = estimate(**_SMALLEST)["host"]  # type: ignore[arg-type]
    available = available_memory(root)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    findings = []
    text = f"{available.bytes / GB:.1f} GB left ({available.source}); the smallest run takes about {needed / GB:.1f} GB"
    if available.bytes >= needed:
        findings.append(Finding("memory", "ok", text))
    elif available.source == "machine":
        findings.append(Finding("memory", "bad", text, "end other processes, or take a larger machine"))
    else:
        fix = f"raise the limit to {needed / GB:.0f} GB or more (docker run --memory, Slurm --mem, systemd MemoryMax)"
        findings.append(Finding("memory", "bad", text, fix))
    if limit != resource.RLIM_INFINITY and limit < 64 * GB:  # torch and Ray map far more than they use
        detail = f"{limit / GB:.1f} GB of address space for a process; torch and Ray map far more than they use"
        findings.append(Finding("address space", "bad", detail, "ulimit -v unlimited"))
    return findings


# ---------------------------------------------------------------- ports


def check_ports() -> list[Finding]:
    """Ports of Ray's processes that other machines can reach, as far as this user may look."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            name = _ray_role(process.cmdline())
            if name is None:
                continue
            ports = sorted(
                {
                    c.laddr.port
                    for c in process.net_connections("tcp")
                    if c.status == psutil.CONN_LISTEN and not _loopback(c.laddr.ip)
                }
            )
            token = any(_asks_for_token(p) for p in [process, *process.parents()])
        except (psutil.Error, OSError):
            continue
        if ports:
            found.append((f"{name} (pid {process.pid}): {', '.join(map(str, ports))}", token))
    if not found:
        return [Finding("Ray ports", "ok", "no Ray process that this user sees listens beyond loopback")]
    lines = [text + ("" if token else ", no token asked") for text, token in found]
    fix = (
        "ray stop, and start the cluster with RAY_AUTH_MODE=token, or let the run start its own"
        if not all(token for _, token in found)
        else "keep these ports from other machines: TransferQueue and torch ask for no token there (docs/security.md)"
    )
    return [Finding("Ray ports", "warn", "listen beyond loopback:\n" + "\n".join(lines), fix)]


def _asks_for_token(process: Any) -> bool:
    """By its environment; that of workers, which rename themselves, is lost, and their raylet's is asked instead."""
    import psutil

    try:
        return process.environ().get("RAY_AUTH_MODE", "").lower() == "token"
    except (psutil.Error, OSError):
        return False


def _ray_role(command: list[str]) -> str | None:
    name = os.path.basename(command[0]).split(" ")[0] if command else ""
    if name in ("gcs_server", "raylet") or name.startswith("ray::"):
        return name
    return "ray dashboard" if any("ray/dashboard/" in part for part in command[:4]) else None


def _loopback(address: str) -> bool:
    import ipaddress

    ip = ipaddress.ip_address(address.split("%")[0])
    return bool((getattr(ip, "ipv4_mapped", None) or ip).is_loopback)


# ---------------------------------------------------------------- the recipe

_RECIPE_PROBE = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import verl
from hydra import compose, initialize_config_module
from vla3_plugin import config_cross, config_verl
from vla3_plugin.config import ConfigError, parse
from vla3_plugin.placement.fit import demand
from vla3_plugin.profile import joins_a_cluster
from vla3_plugin.trainer.preflight import preflight
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=["+recipe=" + sys.argv[1]])
answer = {"faults": config_verl.faults(config)}
try:
    vla3 = parse(config.vla3)
    answer["faults"] += config_cross.faults(config, vla3)
except ConfigError as error:
    answer["faults"] += error.faults
if not answer["faults"]:
    sections, answer["faults"] = preflight(config, vla3)
    needed = demand(config)
    memory = sections.get("memory", {})
    answer |= {"arithmetic": needed.arithmetic(), "gpus": needed.gpus, "cpus": needed.cpus,
               "device": str(config.trainer.device), "memory": memory.get("host"), "available": memory.get("available")}
    if joins_a_cluster():
        import ray
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        answer["cluster"] = ray.cluster_resources()
    else:
        import torch
        answer["cluster"] = {"GPU": torch.cuda.device_count(), "CPU": os.cpu_count()}
print()
print(json.dumps(answer))
"""


def check_recipe(recipe: str, deadline_s: float = 240.0) -> list[Finding]:
    """Whether a recipe composes, passes its checks, and finds the devices, CPUs and memory that it would ask Ray for.

    Ray's CPUs are logical, and so are the GPUs of a CPU run: a cluster that the run starts itself has as many as it
    needs. The cluster at ``RAY_ADDRESS`` has what it has.
    """
    name = f"recipe {recipe}"
    try:
        answer = probe(["-c", _RECIPE_PROBE, recipe], deadline_s)
    except ProbeError as error:
        fix = f"mend what the last line names; python -m verl.trainer.main recipe={recipe} --cfg job shows the same"
        return [Finding(name, "bad", f"it does not compose: {error}", fix)]
    if answer["faults"]:
        return [
            Finding(name, "bad", "\n".join(answer["faults"]), "change the keys that are named, or mend what they need")
        ]
    there, own = answer["cluster"], not joins_a_cluster()
    short = answer["device"] != "cpu" and there.get("GPU", 0) < answer["gpus"]
    short |= not own and (there.get("CPU", 0) < answer["cpus"] or there.get("GPU", 0) < answer["gpus"])
    text = f"{answer['arithmetic']}; {'here' if own else 'the cluster has'}: {there.get('GPU', 0):g} GPUs, "
    text += f"{there.get('CPU', 0):g} CPUs" + (" (Ray's are logical)" if own else "")
    if answer["memory"]:
        text += f"; about {answer['memory'] / GB:.1f} of {answer['available'] / GB:.1f} GB of memory"
    if short:
        fix = "lower trainer.n_gpus_per_node and actor_rollout_ref.rollout.n_gpus_per_node, or use vla3.profile=cpu"
        return [Finding(name, "bad", text, fix)]
    return [Finding(name, "ok", text)]
