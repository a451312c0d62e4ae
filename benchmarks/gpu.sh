#!/usr/bin/env bash
# All that needs a GPU, in one call of under ten minutes: the kernel tests compiled, the kernel benchmark with
# Table 1's sweep, a generation that must give the PyTorch backend's tokens, decoding throughput of Qwen3's
# architectures, and what tracing costs. Needs no network and no install.
#
#   benchmarks/gpu.sh [FOLDER]        JSON goes there; benchmarks/results without one
#
# PYTHON      the interpreter, python3 without one: Python 3.11 or newer with CUDA builds of torch and triton,
#             transformers 5.x and pytest
# SFI_WHEELS  a folder of wheels of what it lacks (nvtx, say), put on the path without pip
#
# PARTS       a regular expression: only the parts whose names match, such as decode or sweep
# BUDGET      seconds for all parts, 570 without one; what finds no time left is listed with exit code 124
#
# A part that fails does not stop the others; the last lines give every part's exit code, and the worst is ours.
set -uo pipefail
out=$(mkdir -p "${1:-$(dirname "${BASH_SOURCE[0]}")/results}" && cd "${1:-$(dirname "${BASH_SOURCE[0]}")/results}" && pwd) || exit 1
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${PYTHON:-python3}
export PYTHONPATH=.:kernels:traces PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=160
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # other people's plugins bring warnings, which are errors in our tests
unset TRITON_INTERPRET
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [[ -n ${SFI_WHEELS:-} ]]; then
  for wheel in "$SFI_WHEELS"/*.whl; do "$python" -m zipfile -e "$wheel" "$scratch/site"; done
  PYTHONPATH=$PYTHONPATH:$scratch/site
fi
gpu=$("$python" -c 'import re, torch
print(re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))') || {
  echo "error: torch must see a CUDA device; without one run: sfi kernel-bench" >&2
  exit 4
}
stem=$out/$(date -u +%F)-$gpu
names=() codes=() seconds=()

part() { # NAME LIMIT COMMAND...
  local name=$1 limit=$2 code=124 begin=$SECONDS left=$((${BUDGET:-570} - SECONDS))
  shift 2
  [[ $name =~ ${PARTS:-.} ]] || return 0
  printf '\n== %s\n' "$name"
  ((left > limit)) || limit=$left
  if ((limit > 10)); then
    timeout --signal=INT --kill-after=20 "$limit" "$@" # what measures keeps its finished rows
    code=$?
  fi
  names+=("$name") codes+=("$code") seconds+=("$((SECONDS - begin))")
}

bench() { # NAME OPTIONS...
  local name=$1
  shift
  part "$name" 100 "$python" -m sfi_cli kernel-bench --backend triton --force --quiet \
    --output "$stem-$name.json" "$@"
}

generate() { "$python" -m sfi_cli generate --no-compare --dtype float32 --quiet --json --set "engine.backend=$1" --force -o "$2"; }
end_to_end() {
  generate torch "$scratch/torch.json" && generate triton "$stem-generate.json" || return
  "$python" - "$scratch/torch.json" "$stem-generate.json" <<'PYTHON'
import json, sys
torch, triton = (json.load(open(path)) for path in sys.argv[1:])
tokens = [[request["token_ids"] for request in run["requests"]] for run in (torch, triton)]
for name, run in (("torch", torch), ("triton", triton)):
    print(f"{name:<7} {run['decode_tokens_per_second']:,.1f} tokens/s, paths {run['paths']}")
print("same tokens" if tokens[0] == tokens[1] else f"tokens differ: {tokens}")
kernels = any(name.startswith("triton") for name in triton["paths"])
sys.exit(0 if tokens[0] == tokens[1] and kernels else 1)
PYTHON
}
export -f generate end_to_end
export python stem scratch
part generate 120 bash -c end_to_end
# one process a core compiles the tests' kernels in minutes instead of one after the other
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-p xdist -n "$(($(nproc) < 8 ? $(nproc) : 8))")
part tests 240 "$python" -m pytest -q -p no:cacheprovider --tb=short --maxfail=20 "${workers[@]}" \
  tests/kernels tests/core/measure/test_kernel_bench.py tests/core/engine/test_triton_backend.py tests/core/engine/test_audit.py \
  tests/core/engine/test_on_a_gpu.py tests/traces/test_timing.py

decode() { # NAME LIMIT OPTIONS...
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" "$python" -m sfi_cli bench --force --quiet --seed 0 --steps 40 --set bench.warm_up=8 --repeats 2 \
    --time-limit 4 --output "$stem-$name.json" "$@"
}

# the static cache is compiled anew at every point, which takes longer than all else: it has a part of its own
for size in 0.6b 4b 8b; do
  decode "decode-$size" 70 --random-weights "qwen3-$size" --baseline transformers-dynamic \
    --context 8K,32K,128K --batch 1,4,16
done
decode decode-4b-static 60 --random-weights qwen3-4b --baseline transformers-static --context 8K --batch 16
decode decode-4b-ragged 40 --random-weights qwen3-4b --baseline none --context 32K --batch 8 --ragged \
  --set bench.synchronized=true
decode decode-4b-tiers 60 --random-weights qwen3-4b --baseline none --context 32K,128K --batch 1 --kv-device-budget 30% \
  --policy sfi,quest,freekv,synckv,snapkv --set synckv.heads=even

bench sweep --sweep retention
bench ops
bench ops-batch-1 --batch 1
bench ops-128k-batch-4 --context 131072 --batch 4 --retention 0.01761 # 4 + 2048 + 256 tokens

overlap() { # the second stream under the first one's layers, for ui.perfetto.dev
  "$python" -m sfi_cli trace record -o "$scratch/run" --quiet && "$python" -m sfi_cli trace export "$scratch/run" \
    --format perfetto --force -o "$stem-overlap.json"
}
export -f overlap
part overlap 60 bash -c overlap
part tracing 60 "$python" benchmarks/tracing.py --output "$stem-tracing.json"
part tracing-0.6b 90 "$python" benchmarks/tracing.py --model qwen3-0.6b --repeats 5 \
  --output "$stem-tracing-qwen3-0.6b.json"

printf '\n== summary\n'
worst=0
for i in "${!names[@]}"; do
  printf '%-18s exit %-3s %4d s\n' "${names[i]}" "${codes[i]}" "${seconds[i]}"
  ((codes[i] > worst)) && worst=${codes[i]}
done
"$python" - "$stem-summary.json" "${names[*]}" "${codes[*]}" "${seconds[*]}" <<'PYTHON'
import json, sys, torch
from sfi_core.machine.describe import describe_measured
path, *columns = sys.argv[1:]
names, codes, seconds = (column.split() for column in columns)
parts = {n: {"exit_code": int(c), "seconds": int(s)} for n, c, s in zip(names, codes, seconds)}
document = {"parts": parts, "machine": describe_measured(torch.device("cuda"))}
open(path, "w").write(json.dumps(document, indent=2) + "\n")
PYTHON
ls -1 "$out"
exit "$worst"
