"""What docs/security.md promises: who may connect, what is never run, where a run writes, what no log line holds."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vla3_plugin import security
from vla3_plugin.envs.libero_setup import LiberoUnavailable, read_torch_array
from vla3_plugin.policies import checkpoints, hub
from vla3_plugin.telemetry.video import video_path, write_video
from vla3_plugin.trainer import checkpoint

ROOT = Path(__file__).parents[1]
TOKEN = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1eF3h"


def fresh(code: str, cwd: Path, **environ: str) -> dict:
    """Run ``code`` in a new interpreter; the JSON on its last line."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


_LISTENERS = """
import ipaddress, psutil
def beyond_loopback():
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for c in process.net_connections("tcp"):
            ip = ipaddress.ip_address(c.laddr.ip) if c.laddr else None
            if c.status == "LISTEN" and not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback:
                found.append([process.name(), c.laddr.ip, c.laddr.port])
    return found
"""


# ---------------------------------------------------------------- who may connect

_CLUSTER = (
    _LISTENERS
    + """
import verl, json, os, stat, subprocess, sys, time
from omegaconf import OmegaConf
from vla3_plugin.launch import prepare_cluster
prepare_cluster(OmegaConf.create({"ray_kwargs": {"ray_init": {}}}))
import ray
context = ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
@ray.remote
def where():
    return ray.util.get_node_ip_address()
answer = {"node": ray.get(where.remote()), "token": os.environ["RAY_AUTH_TOKEN_PATH"],
          "in_environment": "RAY_AUTH_TOKEN" in os.environ}
answer["mode"] = [stat.S_IMODE(os.stat(p).st_mode) for p in (answer["token"], os.path.dirname(answer["token"]))]
time.sleep(2)  # the agents open their ports last
answer["beyond"] = beyond_loopback()
answer["clients"] = {}
address = context.address_info["gcs_address"]
clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
for name, extra in (("none", {}), ("wrong", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}),
                    ("right", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": answer["token"]})):
    client = subprocess.run([sys.executable, "-c", f"import ray; ray.init(address={address!r}); print('joined')"],
                            env={**clean, **extra}, capture_output=True, text=True, timeout=100)
    answer["clients"][name] = ["joined" in client.stdout, "token" in client.stderr.lower()]
ray.shutdown()
print(json.dumps(answer))
"""
)


@pytest.mark.slow
def test_a_cluster_that_we_start_listens_on_loopback_and_refuses_whoever_has_not_its_token(tmp_path):
    answer = fresh(_CLUSTER, tmp_path, HOME=str(tmp_path), RAY_AUTH_TOKEN="an-old-one")
    assert answer["beyond"] == []
    assert answer["node"] == "127.0.0.1", "TransferQueue binds to the node's address"
    assert answer["mode"] == [0o600, 0o700] and not answer["in_environment"]
    assert answer["clients"] == {"none": [False, True], "wrong": [False, True], "right": [True, False]}
    assert not os.path.exists(answer["token"]), "gone with the run"


_GROUP = (
    _LISTENERS
    + """
import json, os, socket, sys, tempfile
import torch, verl
import verl.utils.distributed as distributed
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from omegaconf import OmegaConf
from torch.distributed.fsdp import fully_shard
from vla3_plugin.learner.model_config import ModelCard
from vla3_plugin.learner import weights
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
distributed.initialize_global_process_group_ray()
engine = weights.GlooCheckpointEngine(0)
alone = weights.Circle(0, 1, "127.0.0.1", engine.listen("127.0.0.1"))
weights._connect(alone, engine.listener)
answer = {"beyond": beyond_loopback()}

class Net(torch.nn.Linear):
    config = ModelCard("net")
    def can_generate(self):
        return False

class Evil:
    def __reduce__(self):
        return os.mkdir, (os.path.abspath("evil"),)

net = fully_shard(Net(4, 4), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
optimizer = torch.optim.AdamW(net.parameters())
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
net(torch.randn(2, 4)).sum().backward()
optimizer.step()
contents = ["model", "optimizer", "extra"]
manager = FSDPCheckpointManager(
    model=net, optimizer=optimizer, lr_scheduler=schedule, processing_class=None,
    checkpoint_config=OmegaConf.create({"save_contents": contents, "load_contents": contents}),
)
manager.save_checkpoint("checkpoint")
saved = net.weight.full_tensor().clone()
expected = torch.rand(3)
with torch.no_grad():
    net.weight.zero_()
manager.load_checkpoint("checkpoint")
answer["restored"] = bool(torch.equal(net.weight.full_tensor(), saved) and torch.equal(torch.rand(3), expected))
answer["refused"] = []
for kind in ("model", "optim", "extra_state"):
    file = f"checkpoint/{kind}_world_size_1_rank_0.pt"
    good = open(file, "rb").read()
    torch.save({"x": Evil()}, file)
    try:
        manager.load_checkpoint("checkpoint")
    except ValueError as error:
        answer["refused"].append(str(error))
    open(file, "wb").write(good)
answer["ran"] = os.path.exists("evil")
print(json.dumps(answer))
"""
)


@pytest.mark.slow
def test_process_groups_listen_on_loopback_and_a_learners_checkpoint_runs_no_code(tmp_path):
    """verl opens these files with torch.load(weights_only=False); the patch makes it the restricted reader."""
    answer = fresh(_GROUP, tmp_path)
    assert answer["beyond"] == []
    assert answer["restored"], "weights, optimizer and generator states come back through the restricted reader"
    assert len(answer["refused"]) == 3 and all("posix.mkdir" in text for text in answer["refused"])
    assert not answer["ran"]


def test_an_existing_cluster_is_joined_as_its_owner_configured_it(monkeypatch):
    from vla3_plugin.profile import joins_a_cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert joins_a_cluster("auto") and not joins_a_cluster() and not joins_a_cluster("local")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert joins_a_cluster() and not joins_a_cluster("local")
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert not joins_a_cluster(), "empty is unset, as Ray has it"


# ---------------------------------------------------------------- what is never run

_FORBIDDEN = {
    "torch.load": "weights_only",
    "pickle.load": None,
    "pickle.loads": None,
    "cloudpickle.load": None,
    "cloudpickle.loads": None,
    "joblib.load": None,
    "yaml.load": None,
    "yaml.unsafe_load": None,
    "eval": None,
    "exec": None,
    "os.system": None,
}


def _calls(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}, node.lineno


def test_the_code_opens_no_pickle_runs_no_text_and_trusts_no_hub_code():
    faults = []
    for folder in ("vla3_plugin", "patches", "hydra_plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, keywords, line in _calls(path):
                allowed = _FORBIDDEN.get(name, "")
                if allowed is None or (allowed and keywords.get(allowed) != "True"):
                    faults.append(f"{path.name}:{line} {name}")
                if name in ("np.load", "numpy.load") and keywords.get("allow_pickle") != "False":
                    faults.append(f"{path.name}:{line} {name} without allow_pickle=False")
                if keywords.get("trust_remote_code", "False") != "False" or keywords.get("shell", "False") != "False":
                    faults.append(f"{path.name}:{line} {name} with {keywords}")
    assert faults == []


def test_nothing_but_json_and_safetensors_is_fetched_from_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **k: asked.update(k) or str(tmp_path))
    hub.download("owner/name")
    assert set(asked["allow_patterns"]) == {"*.json", "*.safetensors"}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "pi0", "attn_implementation": "kernels-community/flash-attn2"},
        {"model_type": "pi0", "vlm_config": {"_attn_implementation": "somebody/kernel@main"}},
        {"model_type": "pi0", "_attn_implementation": {"text_config": "somebody/kernel"}},
    ],
)
def test_a_checkpoint_that_asks_for_a_kernel_from_the_hub_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(checkpoints.CheckpointError, match="code from a hub, which is never run; use sdpa or eager"):
        checkpoints.read_config(tmp_path)


def test_an_attention_of_transformers_own_is_accepted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_attn_implementation": "sdpa"}))
    assert checkpoints.read_config(tmp_path) == {"_attn_implementation": "sdpa"}


def test_initial_states_that_hide_code_are_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save(Evil(), tmp_path / "task.pruned_init")
    with pytest.raises(LiberoUnavailable, match="mkdir is not part of a numpy array"):
        read_torch_array(tmp_path / "task.pruned_init")
    assert not (tmp_path / "evil").exists()


# ---------------------------------------------------------------- where a run writes


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_refused(name, tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "other").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "other" / "model.safetensors")
    index = {"weight_map": {"w": name}}
    (tmp_path / "policy" / checkpoints.INDEX).write_text(json.dumps(index))
    with pytest.raises(checkpoints.CheckpointError, match="expected names of files beside it"):
        checkpoints.weight_shapes(tmp_path / "policy")


@pytest.mark.parametrize("name", ["../victim.txt", "/etc/passwd", "actor/../../victim.txt"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(name, tmp_path):
    path = checkpoint.save(tmp_path / "run", 1, lambda folder: (folder / "policy").mkdir(), {"global_steps": 1}, keep=2)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": ""}
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    assert name in str(checkpoint.fault(path))


def test_links_in_a_checkpoints_place_are_not_followed_when_it_is_replaced_or_removed(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious.txt").write_text("keep me")
    root = tmp_path / "run"
    root.mkdir()
    for name in (f".saving_{checkpoint.PREFIX}1", f"{checkpoint.PREFIX}1"):
        (root / name).symlink_to(victim)
    for step in (1, 2, 3):
        try:
            checkpoint.save(root, step, lambda folder: (folder / "w").write_text("x"), {}, keep=1)
        except OSError:
            pass  # stopping is as good as working
    assert (victim / "precious.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    "task", ["../../outside", "/etc/cron.d/x", "a/../../b", "..", "\x00", "put the bowl; rm -rf ~"]
)
def test_a_video_stays_in_the_run_directory_whatever_the_task_is_called(task, tmp_path):
    run = tmp_path / "run"
    path = video_path(run, 0, task, 1, True)
    assert path.parent == run / "videos" / "step-000000"
    if task == "../../outside":
        write_video(path, np.zeros((2, 16, 16, 3), np.uint8), fps=5)
        assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"experiment_name": "../../elsewhere"}, "trainer.experiment_name: '../../elsewhere', expected a name"),
        ({"experiment_name": ".."}, "trainer.experiment_name: '..', expected a name"),
        ({"default_local_dir": "/elsewhere"}, "trainer.default_local_dir: '/elsewhere' is outside vla3.run_dir"),
        ({"default_local_dir": "/runs/a/../b"}, "trainer.default_local_dir: '/runs/a/../b' is outside"),
        ({"default_local_dir": "/runs/ab"}, "trainer.default_local_dir: '/runs/ab' is outside"),
    ],
)
def test_names_and_places_that_lead_out_of_the_run_directory_are_refused(trainer, said):
    (fault,) = security.stray_paths({"trainer": {"experiment_name": "a", **trainer}}, "/runs/a")
    assert said in fault


def test_places_inside_the_run_directory_are_accepted():
    config = {"trainer": {"experiment_name": "a.b-c", "default_local_dir": "/runs/a/checkpoints"}, "ray_kwargs": {}}
    assert security.stray_paths(config, "/runs/a") == []


# ---------------------------------------------------------------- what no log line holds


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN", "not-of-a-known-form"),
        ("ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY", "0123456789"),
        ("vla3.env.options.api_key", "x"),
        ("vla3.env.options.password", "x"),
        ("trainer.experiment_name", TOKEN),
        ("actor_rollout_ref.model.path", "https://user:pass@host/model"),
        ("trainer.project_name", "prefix-value-of-the-environment"),
    ],
)
def test_a_secret_in_the_config_is_refused_without_repeating_it(key, value, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "value-of-the-environment")
    (fault,) = security.exposed_in_arguments([f"+{key}={value}"])
    assert fault.startswith(f"{key}: its value looks like a secret") and value not in fault
    node: dict = {}
    inner = node
    for part in key.split(".")[:-1]:
        inner = inner.setdefault(part, {})
    inner[key.split(".")[-1]] = value
    assert security.exposed_secrets(node) == [fault]


def test_ordinary_keys_with_token_in_their_name_are_not_secrets():
    config = {
        "max_tokens": "48",
        "tokenizer": "some/path",
        "pad_token": "<pad>",
        "logprob_type": "token",
        "token": None,
    }
    assert security.exposed_secrets(config) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry", ["verl.trainer.main recipe=vla3_latency", "verl.trainer.main_ppo +recipe=vla3_latency"]
)
def test_a_token_on_the_command_line_reaches_no_output_and_no_file(entry, tmp_path):
    """Hydra's own dump of the config included: verl's entry has written it before the plugin sees the config."""
    module, recipe = entry.split()
    override = f"+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN={TOKEN}"
    done = subprocess.run(
        [sys.executable, "-m", module, recipe, override],
        cwd=tmp_path, env={**os.environ, "VLA3_PROFILE": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "env_vars.HF_TOKEN: its value looks like a secret" in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert [p for p in tmp_path.rglob("*") if p.is_file() and TOKEN in p.read_text(errors="replace")] == []


def test_the_token_of_a_cluster_is_new_every_time_and_its_users_alone(monkeypatch):
    removals = []
    monkeypatch.setattr(security.atexit, "register", lambda function, *a, **k: removals.append((function, a, k)))
    first, second = security._fresh_token(), security._fresh_token()
    try:
        assert first.read_text() != second.read_text() and len(first.read_text()) == 64
        assert stat.S_IMODE(first.stat().st_mode) == 0o600 and stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    finally:
        for function, arguments, keywords in removals:
            function(*arguments, **keywords)
    assert not first.exists() and not second.exists()
