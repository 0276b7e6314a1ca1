#!/usr/bin/env bash
# Everything a fresh Debian 12 with Python 3.11 needs: system libraries (as root), virtual environment, torch, plugin.
# PYTHON: the interpreter; VENV: where to; TORCH_INDEX: a pip index to take torch from (for instance PyTorch's own CPU
# index, which saves gigabytes on a machine without a GPU).
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH=torch==2.13.0

libraries="libosmesa6 libegl1 libgl1-mesa-dri libvulkan1"

vulkan_ok() { # software Vulkan for ManiSkill: Mesa 24.3 or newer; a machine with a GPU driver brings its own
  command -v nvidia-smi >/dev/null && return 0
  dpkg --compare-versions "$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers 2>/dev/null || echo 0)" ge 24.3
}
gl_ok() { dpkg-query -W $libraries >/dev/null 2>&1; }

system_libraries() {
  command -v dpkg-query >/dev/null || { echo "setup: not a Debian: install OSMesa, EGL and Mesa >= 24.3 Vulkan yourself"; return; }
  gl_ok && vulkan_ok && return
  if [ "$(id -u)" != 0 ]; then
    echo "setup: run as root once, or ask for: apt-get install $libraries and mesa-vulkan-drivers >= 24.3 (Debian 12: from bookworm-backports)"
    return
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  if ! vulkan_ok && [ "$(. /etc/os-release; echo "$VERSION_CODENAME")" = bookworm ] &&
     ! apt-cache policy mesa-vulkan-drivers | grep -q backports; then
    # from the mirror this machine already uses
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Created-By: Packages' | awk '$2=="bookworm"{print $1; exit}')
    echo "deb $mirror bookworm-backports main" > /etc/apt/sources.list.d/vla3-backports.list
    apt-get update -qq
  fi
  apt-get install -y -qq $libraries >/dev/null
  if ! vulkan_ok; then
    apt-get install -y -qq -t bookworm-backports mesa-vulkan-drivers >/dev/null || apt-get install -y -qq mesa-vulkan-drivers >/dev/null
  fi
}

stamp=$VENV/.vla3-$(cat pyproject.toml setup.sh | sha256sum | cut -c1-12)
system_libraries
if [ ! -e "$stamp" ]; then
  "$PYTHON" -c 'import sys; assert (3, 10) <= sys.version_info[:2] <= (3, 12), f"Python 3.10 to 3.12 is needed, this is {sys.version}"'
  [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
  "$VENV/bin/python" -m pip install -q --upgrade pip
  "$VENV/bin/python" -m pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
  "$VENV/bin/python" -m pip install -q "$TORCH" -e '.[libero,maniskill,dev]'
  "$VENV/bin/python" -m pip check
  rm -f "$VENV"/.vla3-*
  touch "$stamp"
fi
